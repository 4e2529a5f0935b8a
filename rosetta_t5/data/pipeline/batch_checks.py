"""Checks of host batches, within microseconds: token ids are in range, and there are targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

_INT32 = np.iinfo(np.int32)


@dataclasses.dataclass(frozen=True)
class TokenLimit:
  """The number of token ids that a model knows.

  Attributes:
    size: the rows of its embedding table.
    origin: the argument that sets it.
  """

  size: int
  origin: str


def token_limit(model: Any) -> TokenLimit | None:
  """Returns the limit of a model's token ids; None if its network does not state one."""
  config = getattr(model, "network_config", None)
  size = getattr(config, "vocab_size", None)
  return TokenLimit(size, f"network.{type(config).__name__}.vocab_size") if size else None


def check_ids(batch: Mapping[str, np.ndarray], data: str, limit: TokenLimit | None) -> None:
  """Checks that token ids are in the vocabulary, and that other integers fit into the devices' int32.

  Args:
    batch: arrays by feature, [B, ...]. The integers of a feature `*_tokens` are token ids.
    data: names the data in the message, such as "the task 'squad'".
    limit: the model's limit; None checks only for negative ids.

  Raises:
    ValueError: a value is out of range.
  """
  for name, values in batch.items():
    if getattr(values, "dtype", np.dtype(object)).kind not in "iu" or not values.size:
      continue
    low, high = _INT32.min, _INT32.max
    if name.endswith("_tokens"):
      low, high = 0, limit.size - 1 if limit else high
    elif values.dtype.itemsize < 4:
      continue
    if values.min() < low or values.max() > high:
      raise ValueError(_out_of_range_text(name, values, (low, high), data, limit))


def check_has_target(batch: Mapping[str, np.ndarray], data: str) -> None:
  """Checks that a training batch has a target token with a loss weight other than 0.

  Raises:
    ValueError: it has none, so there would be nothing to learn from.
  """
  for name in ("decoder_loss_weights", "decoder_target_tokens"):
    if name in batch and not batch[name].any():
      raise ValueError(
        f"a batch of {data} has no target to learn from: its {len(batch[name])} rows have only 0 in "
        f"{name}, which means padding. Check the task's targets (rosetta-t5 inspect shows them): the "
        "preprocessors must return at least one token, and TASK_FEATURE_LENGTHS must leave room for it"
      )


def _out_of_range_text(
  name: str, values: np.ndarray, bounds: tuple[int, int], data: str, limit: TokenLimit | None
) -> str:
  low, high = bounds
  row, *position = np.argwhere((values < low) | (values > high))[0].tolist()
  at = f"row {row}" + (f", position {position[0]}" if position else "")
  value = values[(row, *position)]
  text = (
    f"{data} has the value {value} in {name} ({at} of a batch): it must be from {low} to {high}"
  )
  if not name.endswith("_tokens"):
    return f"{text}, because integers have 32 bits on the devices. Correct the task's preprocessors"
  if value == -1:
    text += (
      " (-1 stands for a token that a SentencePiece vocabulary lacks, mostly the end token, eos_id)"
    )
  if limit is not None:
    text += f", since the model's vocabulary has {limit.size} ids ({limit.origin})"
  return f"{text}. Correct the task's vocabulary or its preprocessors"
