"""What becomes of a batch's segments: spans dropped, ends cut off, or plain text; in numpy.

Objectives and UL2's denoisers are those of `data.objectives`, without TensorFlow. Each row depends
on its tokens and its own key alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from absl import logging

from rosetta_t5.data.objectives.span_corruption import segment_length
from rosetta_t5.data.objectives.text_objectives import UL2_DENOISERS, Denoiser, prefix_lengths
from rosetta_t5.data.prepared.corruption import corrupt_spans, keys_of, noise_and_spans

OBJECTIVES = ("span_corruption", "prefix_lm", "causal_lm", "ul2")
_END = 1  # of T5's and our own vocabularies


class Objective(Protocol):
  """Makes features of segments.

  Attributes:
    length: tokens of a segment.
  """

  @property
  def length(self) -> int: ...

  def features(self, tokens_BL: np.ndarray, keys_B: np.ndarray) -> dict[str, np.ndarray]:
    """Returns a task's features, padded with zeros at the end."""


@dataclasses.dataclass(frozen=True)
class Plain:
  """Targets alone, for decoder-only models."""

  length: int

  def features(self, tokens_BL: np.ndarray, keys_B: np.ndarray) -> dict[str, np.ndarray]:
    """See `Objective`."""
    del keys_B
    return {"targets": tokens_BL}


@dataclasses.dataclass(frozen=True)
class Spans:
  """T5's span corruption.

  Attributes:
    length: tokens of a segment.
    density: part of them that is dropped.
    mean_length: of a dropped span, on average.
    vocab_size: sentinels are its last ids.
    mode: tokens before the inputs.
  """

  length: int
  density: float
  mean_length: float
  vocab_size: int
  mode: tuple[int, ...] = ()

  def features(self, tokens_BL: np.ndarray, keys_B: np.ndarray) -> dict[str, np.ndarray]:
    """See `Objective`."""
    inputs, targets = corrupt_spans(
      tokens_BL, keys_B, self.vocab_size, self.density, self.mean_length
    )
    return {"inputs": _ended(_told(self.mode, inputs)), "targets": _ended(targets)}


@dataclasses.dataclass(frozen=True)
class Ending:
  """A text's end follows from its beginning: prefix LM, and UL2's sequential denoiser.

  Attributes:
    length: tokens of a segment.
    density: the end's part on average, drawn evenly from 0 to twice that.
    most: tokens of the longest end.
    mode: tokens before the inputs.
  """

  length: int
  density: float
  most: int
  mode: tuple[int, ...] = ()

  def features(self, tokens_BL: np.ndarray, keys_B: np.ndarray) -> dict[str, np.ndarray]:
    """See `Objective`."""
    share_B = keys_of(keys_B, 2) / 2.0**64 * 2 * self.density
    ends_B = np.clip(np.rint(share_B * self.length), 1, min(self.length - 1, self.most)).astype(int)
    places_1L = np.arange(self.length)[None]
    starts_B1 = (self.length - ends_B)[:, None]
    inputs = np.where(places_1L < starts_B1, tokens_BL, 0)
    places_BM = starts_B1 + np.arange(self.most)[None]
    rows_B1 = np.arange(len(tokens_BL))[:, None]
    targets = tokens_BL[rows_B1, np.minimum(places_BM, self.length - 1)]
    targets = np.where(places_BM < self.length, targets, 0)
    return {"inputs": _ended(_told(self.mode, inputs)), "targets": _ended(targets)}


def make_objectives(
  name: str,
  lengths: Mapping[str, int],
  pieces: int,
  extra_ids: int,
  encode: Callable[[str], Sequence[int]],
  density: float = 0.15,
  mean_length: float = 3.0,
) -> list[Objective]:
  """Returns an objective, or UL2's denoisers, which take turns.

  Args:
    name: one of OBJECTIVES.
    lengths: of "inputs" and "targets", or of "targets" alone for causal_lm.
    pieces: of the vocabulary.
    extra_ids: sentinels above them.
    encode: a text's tokens; for UL2's modes.
    density: of span_corruption.
    mean_length: of span_corruption's spans.

  Raises:
    ValueError: there is no such objective, or the lengths do not fit it.
  """
  if name not in OBJECTIVES:
    raise ValueError(f"prepared_task.objective = {name!r} is none of {', '.join(OBJECTIVES)}")
  wanted = {"targets"} if name == "causal_lm" else {"inputs", "targets"}
  if set(lengths) != wanted:
    raise ValueError(
      f"TASK_FEATURE_LENGTHS = {dict(lengths)}, but {name} has {sorted(wanted)}: name these"
    )
  if name == "causal_lm":
    return [Plain(lengths["targets"])]
  if name == "span_corruption":
    return [_denoising(Denoiser("", density, mean_length), lengths, (pieces, extra_ids))]
  if name == "prefix_lm":
    return [_denoising(Denoiser("", None, None), lengths, (pieces, extra_ids))]
  return [
    _denoising(denoiser, lengths, (pieces, extra_ids), tuple(encode(denoiser.mode)))
    for denoiser in UL2_DENOISERS.values()
  ]


def _denoising(
  denoiser: Denoiser,
  lengths: Mapping[str, int],
  ids: tuple[int, int],
  mode: tuple[int, ...] = (),
) -> Objective:
  """Fits a denoiser to the lengths, an end token each."""
  if denoiser.mean_length is None:
    length, most, density = prefix_lengths(
      {name: size - 1 for name, size in lengths.items()}, len(mode), denoiser.density
    )
    return Ending(length, density, min(most, length - 1), mode)
  assert denoiser.density is not None
  length = segment_length(
    lengths["inputs"] - len(mode), lengths["targets"], denoiser.density, denoiser.mean_length
  )
  # T5 counts no sentinel where less than half a span is dropped: such rows are shortened by one.
  while length > 1:
    noise, spans = noise_and_spans(length, denoiser.density, denoiser.mean_length)
    inputs, targets = len(mode) + length - noise + spans + 1, noise + spans + 1
    if inputs <= lengths["inputs"] and targets <= lengths["targets"]:
      break
    length -= 1
  else:
    raise ValueError(
      f"TASK_FEATURE_LENGTHS = {dict(lengths)} leave no room for text: set longer ones"
    )
  if spans > ids[1]:
    logging.warning(
      "Rows of %d tokens have %d dropped spans, but there are %d sentinels (prepared_task.extra_ids): "
      "the vocabulary's last pieces stand for the others, as in T5",
      length,
      spans,
      ids[1],
    )
  return Spans(length, denoiser.density, denoiser.mean_length, sum(ids), mode)


def _told(mode: Sequence[int], inputs_BL: np.ndarray) -> np.ndarray:
  modes_BM = np.broadcast_to(np.array(mode, np.int32), (len(inputs_BL), len(mode)))
  return np.concatenate([modes_BM, inputs_BL], axis=1)


def _ended(tokens_BL: np.ndarray) -> np.ndarray:
  """Adds an end token after each row's last."""
  ended = np.pad(tokens_BL, ((0, 0), (0, 1)))
  ended[np.arange(len(ended)), np.count_nonzero(tokens_BL, axis=1)] = _END
  return ended
