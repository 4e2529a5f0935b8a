"""Training objectives on batches of prepared segments, in numpy.

They are the objectives and UL2 denoisers of `data.objectives`, without TensorFlow, with the same
distributions but other random numbers: a row depends only on its own tokens and key.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np

from rosetta_t5.data.objectives.span_corruption import (
  noise_and_spans,
  segment_length,
  warn_of_missing_sentinels,
)
from rosetta_t5.data.objectives.text_objectives import UL2_DENOISERS, Denoiser, prefix_lengths

OBJECTIVES = ("span_corruption", "prefix_lm", "causal_lm", "ul2")
_END = 1  # the end token's id in T5's vocabularies and in those that `rosetta-t5 vocab` trains
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's increment, 2**64 divided by the golden ratio

Features = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class BatchObjective(abc.ABC):
  """Makes a task's features from segments of text.

  Attributes:
    length: number of tokens in a segment.
  """

  length: int
  # The class's name in `description`, which positions in the data contain.
  stored_name: ClassVar[str]

  @property
  def description(self) -> str:
    """The objective with its settings, which must stay as they are in positions of existing runs."""
    return str(self).replace(type(self).__name__, self.stored_name, 1)

  @abc.abstractmethod
  def features(self, tokens_BL: np.ndarray, keys_B: np.ndarray) -> Features:
    """Returns the task's features, padded with zeros at the end."""


@dataclasses.dataclass(frozen=True)
class CausalLM(BatchObjective):
  """Causal language modelling for decoder-only models: the whole segment becomes the targets."""

  stored_name = "Plain"

  def features(self, tokens_BL: np.ndarray, keys_B: np.ndarray) -> Features:
    """Returns the tokens as targets."""
    del keys_B
    return {"targets": tokens_BL}


@dataclasses.dataclass(frozen=True)
class SpanCorruption(BatchObjective):
  """T5's span corruption.

  Attributes:
    density: fraction of the tokens that is dropped.
    mean_length: mean number of tokens in a dropped span.
    vocab_size: size of the vocabulary, whose last ids are the sentinels.
    mode: the tokens that announce a UL2 denoiser; they are prepended to the inputs.
  """

  stored_name = "Spans"
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
class PrefixLM(BatchObjective):
  """Prediction of a text's end from its beginning: prefix LM, and UL2's sequential denoiser.

  Attributes:
    density: mean fraction of the segment that becomes the targets; each row's fraction is drawn
      uniformly between 0 and twice this value.
    most: the largest number of tokens that become the targets.
    mode: the tokens that announce a UL2 denoiser; they are prepended to the inputs.
  """

  stored_name = "Ending"
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


def make_objectives(
  name: str,
  lengths: Mapping[str, int],
  pieces: int,
  extra_ids: int,
  encode: Callable[[str], Sequence[int]],
  density: float = 0.15,
  mean_length: float = 3.0,
) -> list[BatchObjective]:
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
    return [CausalLM(lengths["targets"])]
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
) -> BatchObjective:
  """Returns an objective whose segments fill both features, including one end token in each."""
  if denoiser.mean_length is None:
    without_end = {name: size - 1 for name, size in lengths.items()}
    length, most, density = prefix_lengths(without_end, len(mode), denoiser.density)
    return PrefixLM(length, density, min(most, length - 1), mode)
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
  return SpanCorruption(length, denoiser.density, denoiser.mean_length, pieces + extra_ids, mode)


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


@np.errstate(over="ignore")
def splitmix64(values: np.ndarray) -> np.ndarray:
  """Hashes each uint64 with splitmix64 (Steele et al. 2014), which serves as a random generator."""
  values = values + _GOLDEN
  values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return values ^ (values >> np.uint64(31))


def random_keys(*numbers: int | np.ndarray) -> np.ndarray:
  """Returns a uint64 key for each combination of the numbers; arrays are broadcast."""
  key = np.zeros((), np.uint64)
  for number in numbers:
    key = splitmix64(key ^ splitmix64(np.asarray(number).astype(np.uint64)))
  return key


def corrupt_spans(
  tokens_BL: np.ndarray,
  keys_B: np.ndarray,
  vocab_size: int,
  noise_density: float = 0.15,
  mean_span_length: float = 3.0,
) -> tuple[np.ndarray, np.ndarray]:
  """Drops random spans and returns the inputs and the targets, without end tokens.

  Args:
    tokens_BL: int32 tokens; the rows must have no padding.
    keys_B: one uint64 key for each row.
    vocab_size: size of the vocabulary, whose last ids are the sentinels, from `vocab_size - 1` down.
    noise_density: fraction of the tokens that is dropped.
    mean_span_length: mean number of tokens in a dropped span.
  """
  batch, length = tokens_BL.shape
  noise, spans = noise_and_spans(length, noise_density, mean_span_length)
  kept_BS = _random_parts(length - noise, spans, random_keys(keys_B, 0))
  dropped_BS = _random_parts(noise, spans, random_keys(keys_B, 1))
  lengths_BT = np.stack([kept_BS, dropped_BS], axis=-1).reshape(batch, -1)
  starts_BT = np.cumsum(lengths_BT, axis=1)[:, :-1]  # the starts of all spans but the first
  is_start_BL = np.zeros((batch, length), bool)
  is_start_BL[:, 0] = True
  is_start_BL[np.arange(batch)[:, None], starts_BT] = True
  span_BL = np.cumsum(is_start_BL, axis=1) - 1
  is_noise_BL = span_BL % 2 == 1
  sentinel_BL = vocab_size - 1 - span_BL // 2

  def keep(is_kept_BL: np.ndarray) -> np.ndarray:
    """Keeps the selected tokens and replaces each other span by one sentinel."""
    mixed_BL = np.where(is_kept_BL, tokens_BL, sentinel_BL).astype(np.int32)
    # The rows remain equally long, because all have the same numbers of spans and dropped tokens.
    return mixed_BL[is_kept_BL | is_start_BL].reshape(batch, -1)

  return keep(~is_noise_BL), keep(is_noise_BL)


def _random_parts(total: int, parts: int, keys_B: np.ndarray) -> np.ndarray:
  """Splits `total` into random positive integers [B, parts]; all splits are equally likely."""
  if parts == 1:
    return np.full((len(keys_B), 1), total)
  positions = np.arange(total - 1, dtype=np.uint64)
  draws = splitmix64(keys_B[:, None] + positions * _GOLDEN)
  cuts = np.sort(np.argpartition(draws, parts - 2, axis=1)[:, : parts - 1], axis=1) + 1
  return np.diff(cuts, axis=1, prepend=0, append=total)
