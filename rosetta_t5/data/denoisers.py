"""UL2's denoisers (Tay et al. 2022), as the paper or a user gives them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Denoiser:
  """One of UL2's denoisers.

  Attributes:
    mode: text before the inputs that announces the denoiser to the model, or "".
    density: fraction of the tokens that the model predicts. If `mean_length` is None, it may be None
      too: the text is then cut at any position.
    mean_length: mean number of tokens in a span; None means one span at the end of the text.
    rate: how often it is drawn, relative to the others.
  """

  mode: str
  density: float | None
  mean_length: float | None
  rate: float = 1.0


# Table 1 of the paper: R(egular), X(treme) and S(equential) denoisers, drawn equally often.
UL2_DENOISERS: Mapping[str, Denoiser] = {
  "r3": Denoiser("[NLU]", 0.15, 3.0),
  "r8": Denoiser("[NLU]", 0.15, 8.0),
  "x3": Denoiser("[NLG]", 0.5, 3.0),
  "x8": Denoiser("[NLG]", 0.5, 8.0),
  "x64": Denoiser("[NLG]", 0.15, 64.0),
  "x64_half": Denoiser("[NLG]", 0.5, 64.0),
  "s": Denoiser("[S2S]", 0.25, None),
}


def ul2_denoisers(rows: Sequence[Sequence[Any]] | None) -> Mapping[str, Denoiser]:
  """Returns UL2's denoisers by name.

  Args:
    rows: (mode, density, mean length, rate) of each; None for those of the paper. See `Denoiser`.

  Raises:
    ValueError: a row has other values.
  """
  if rows is None:
    return UL2_DENOISERS
  for row in rows:
    match row:
      case [str(), None, None, rate] if rate > 0:
        pass
      case [str(), float(density), length, rate] if (
        0 < density < 1 and rate > 0 and (length is None or length >= 1)
      ):
        pass
      case _:
        raise ValueError(
          "each of denoisers must be (mode text, density between 0 and 1, mean length of at least 1 "
          f"or None for a span at the end, rate above 0), such as ('[R]', 0.15, 3, 1); got {row!r}"
        )
  return {f"denoiser{number}": Denoiser(*row) for number, row in enumerate(rows)}
