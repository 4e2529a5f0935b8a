"""Batches of short inputs, computed at a short length: few lengths, as each is a program of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_TOKENS = "encoder_input_tokens"


def check_buckets(buckets: Sequence[int]) -> tuple[int, ...]:
  """Returns the lengths, the shortest first.

  Raises:
    ValueError: they are no positive numbers.
  """
  if any(not isinstance(length, int) or length < 1 for length in buckets):
    raise ValueError(
      f"input_length_buckets = {tuple(buckets)!r} must be lengths from 1 on, such as (64, 128, 256), "
      "or () for none"
    )
  return tuple(sorted(buckets))


def default_buckets(full_length: int) -> tuple[int, ...]:
  """Returns an eighth, a quarter and a half of a length, as multiples of 8."""
  eighth = -(-full_length // 64) * 8
  return tuple(n * eighth for n in (1, 2, 4) if n * eighth < full_length)


def cut_inputs(rows: Sequence[tuple[Any, Any]], buckets: Sequence[int]) -> list[tuple[Any, Any]]:
  """Returns (index, example) pairs with an encoder's inputs cut to the shortest bucket that holds all.

  Args:
    rows: those of one batch. Examples without `encoder_input_tokens` are left as they are.
    buckets: lengths, the shortest first.
  """
  first = rows[0][1]
  if _TOKENS not in first:
    return list(rows)
  full_length = len(first[_TOKENS])
  longest = max(_length(example[_TOKENS]) for _, example in rows)
  bucket = next((n for n in buckets if longest <= n < full_length), full_length)

  def cut(name: str, x: np.ndarray) -> np.ndarray:
    return x[:bucket] if name.startswith("encoder_") and len(x) == full_length else x

  return [(i, {name: cut(name, x) for name, x in example.items()}) for i, example in rows]


def _length(tokens_S: np.ndarray) -> int:
  """Returns the length up to the last token that is not padding."""
  places = np.flatnonzero(tokens_S)
  return int(places[-1]) + 1 if places.size else 0
