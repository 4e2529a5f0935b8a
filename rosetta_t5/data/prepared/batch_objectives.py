"""Training objectives on batches of prepared segments, in numpy.

They are the objectives and UL2 denoisers of `data.objectives`, without TensorFlow. Each objective has
a `length`, the number of tokens in a segment, and a method `features(tokens_BL, keys_B)`, which
returns the task's features, padded with zeros at the end. A row depends only on its own tokens and
key.

The names of the classes and of their fields are part of the fingerprint that is saved with a position
in the data. If they change, existing runs cannot continue from their saved positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rosetta_t5.data.objectives.span_corruption import (
  noise_and_spans,
  segment_length,
  warn_of_missing_sentinels,
)
from rosetta_t5.data.objectives.text_objectives import UL2_DENOISERS, Denoiser, prefix_lengths
from rosetta_t5.data.prepared.corruption import corrupt_spans, random_keys

OBJECTIVES = ("span_corruption", "prefix_lm", "causal_lm", "ul2")
_END = 1  # the end token's id in T5's vocabularies and in those that `rosetta-t5 vocab` trains

Features = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Plain:
  """Causal language modelling for decoder-only models: the whole segment becomes the targets."""

  length: int

  def features(self, tokens_BL: np.ndarray, keys_B: np.ndarray) -> Features:
    """Returns the tokens as targets."""
    del keys_B
    return {"targets": tokens_BL}


@dataclasses.dataclass(frozen=True)
class Spans:
  """T5's span corruption.

  Attributes:
    length: number of tokens in a segment.
    density: fraction of the tokens that is dropped.
    mean_length: mean number of tokens in a dropped span.
    vocab_size: size of the vocabulary, whose last ids are the sentinels.
    mode: the tokens that announce a UL2 denoiser; they are prepended to the inputs.
  """

  length: int
  density: float
  mean_length: float
  vocab_size: int
  mode: tuple[int, ...] = ()

  def features(self, tokens_BL: np.ndarray, keys_B: np.ndarray) -> Features:
    """Returns the corrupted text as inputs and the dropped spans as targets."""
    inputs, targets = corrupt_spans(
      tokens_BL, keys_B, self.vocab_size, self.density, self.mean_length
    )
    return _inputs_and_targets(self.mode, inputs, targets)


@dataclasses.dataclass(frozen=True)
class Ending:
  """Prediction of a text's end from its beginning: prefix LM, and UL2's sequential denoiser.

  Attributes:
    length: number of tokens in a segment.
    density: mean fraction of the segment that becomes the targets; each row's fraction is drawn
      uniformly between 0 and twice this value.
    most: the largest number of tokens that become the targets.
    mode: the tokens that announce a UL2 denoiser; they are prepended to the inputs.
  """

  length: int
  density: float
  most: int
  mode: tuple[int, ...] = ()

  def features(self, tokens_BL: np.ndarray, keys_B: np.ndarray) -> Features:
    """Returns the beginning as inputs and the end as targets."""
    fraction_B = random_keys(keys_B, 2) / 2.0**64 * 2 * self.density
    ends_B = np.clip(np.rint(fraction_B * self.length), 1, min(self.length - 1, self.most))
    starts_B1 = (self.length - ends_B.astype(int))[:, None]
    inputs = np.where(np.arange(self.length)[None] < starts_B1, tokens_BL, 0)
    positions_BM = starts_B1 + np.arange(self.most)[None]
    targets = np.take_along_axis(tokens_BL, np.minimum(positions_BM, self.length - 1), axis=1)
    targets = np.where(positions_BM < self.length, targets, 0)
    return _inputs_and_targets(self.mode, inputs, targets)


Objective = Plain | Spans | Ending


def make_objectives(
  name: str,
  lengths: Mapping[str, int],
  pieces: int,
  extra_ids: int,
  encode: Callable[[str], Sequence[int]],
  density: float = 0.15,
  mean_length: float = 3.0,
) -> list[Objective]:
  """Returns a list with the objective of this name; for "ul2", with its seven denoisers.

  Args:
    name: one of OBJECTIVES.
    lengths: the lengths of "inputs" and "targets"; for causal_lm, of "targets" alone.
    pieces: size of the vocabulary without the sentinels.
    extra_ids: number of sentinels, whose ids follow the pieces.
    encode: tokenizes a text, such as UL2's "[NLU]".
    density: fraction of the tokens that span_corruption drops.
    mean_length: mean number of tokens in a span that span_corruption drops.

  Raises:
    ValueError: `lengths` has the wrong features or too small values for the objective.
  """
  expected = {"targets"} if name == "causal_lm" else {"inputs", "targets"}
  if set(lengths) != expected:
    raise ValueError(
      f"TASK_FEATURE_LENGTHS must have the features {sorted(expected)} for the objective {name}, "
      f"got {dict(lengths)}"
    )
  if name == "causal_lm":
    return [Plain(lengths["targets"])]
  denoisers = {
    "span_corruption": [Denoiser("", density, mean_length)],
    "prefix_lm": [Denoiser("", None, None)],
    "ul2": list(UL2_DENOISERS.values()),
  }
  return [
    _fit_denoiser(denoiser, lengths, pieces, extra_ids, tuple(encode(denoiser.mode)))
    for denoiser in denoisers[name]
  ]


def _fit_denoiser(
  denoiser: Denoiser,
  lengths: Mapping[str, int],
  pieces: int,
  extra_ids: int,
  mode: tuple[int, ...],
) -> Objective:
  """Returns an objective whose segments fill both features, including one end token in each."""
  if denoiser.mean_length is None:
    without_end = {name: size - 1 for name, size in lengths.items()}
    length, most, density = prefix_lengths(without_end, len(mode), denoiser.density)
    return Ending(length, density, min(most, length - 1), mode)
  assert denoiser.density is not None
  longest = segment_length(
    lengths["inputs"] - len(mode), lengths["targets"], denoiser.density, denoiser.mean_length
  )
  # T5's formula counts no sentinel if less than half a span is dropped. Then a shorter segment fits.
  for length in range(longest, 1, -1):
    noise, spans = noise_and_spans(length, denoiser.density, denoiser.mean_length)
    inputs, targets = len(mode) + length - noise + spans + 1, noise + spans + 1
    if inputs <= lengths["inputs"] and targets <= lengths["targets"]:
      break
  else:
    raise ValueError(
      f"TASK_FEATURE_LENGTHS = {dict(lengths)} is too short for any text: set longer ones"
    )
  warn_of_missing_sentinels(length, spans, extra_ids)
  return Spans(length, denoiser.density, denoiser.mean_length, pieces + extra_ids, mode)


def _inputs_and_targets(
  mode: Sequence[int], inputs_BL: np.ndarray, targets_BM: np.ndarray
) -> Features:
  modes_BK = np.tile(np.array(mode, np.int32), (len(inputs_BL), 1))
  inputs_BL = np.concatenate([modes_BK, inputs_BL], axis=1)
  return {"inputs": _append_end(inputs_BL), "targets": _append_end(targets_BM)}


def _append_end(tokens_BL: np.ndarray) -> np.ndarray:
  """Appends an end token to each row's last token."""
  tokens_BL = np.pad(tokens_BL, ((0, 0), (0, 1)))
  ends_B = np.count_nonzero(tokens_BL, axis=1)
  tokens_BL[np.arange(len(tokens_BL)), ends_B] = _END
  return tokens_BL
