"""Batches of short inputs, computed at a short length: few lengths, as each is a program of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def check_buckets(buckets: Sequence[int] | None) -> tuple[int, ...]:
  """Returns the lengths, the shortest first; none for None.

  Raises:
    ValueError: they are no positive numbers.
  """
  if buckets is None:
    return ()
  if isinstance(buckets, int) or any(not isinstance(n, int) or n < 1 for n in buckets):
    raise ValueError(
      f"input_length_buckets = {buckets!r} must be lengths from 1 on, such as (64, 128, 256), "
      "or () for none"
    )
  return tuple(sorted(buckets))


def default_buckets(full_length: int) -> tuple[int, ...]:
  """Returns an eighth, a quarter and a half of a length, as multiples of 8."""
  eighth = -(-full_length // 64) * 8
  return tuple(n * eighth for n in (1, 2, 4) if n * eighth < full_length)


def cut_rows(
  rows: Sequence[tuple[Any, Any]], buckets: Sequence[int], is_scoring: bool = False
) -> list[tuple[Any, Any]]:
  """Returns (index, example) pairs with features cut to the shortest bucket that holds all.

  Of an encoder-decoder's rows the inputs are cut. A decoder-only model's rows have inputs and targets
  in one: to be scored they are cut as a whole; where the model is to go on from the inputs, of
  which the row's length tells how far, only `decoder_causal_attention`, which marks them.

  Args:
    rows: those of one batch. Examples with none of these features are left as they are.
    buckets: lengths, the shortest first.
    is_scoring: whether targets are scored and nothing is decoded.
  """
  measured, prefix = _what_to_cut(rows[0][1], is_scoring)
  if measured is None:
    return list(rows)
  full_length = len(rows[0][1][measured])
  longest = max(_length(example[measured]) for _, example in rows)
  bucket = next((n for n in buckets if longest <= n < full_length), full_length)

  def cut(name: str, x: np.ndarray) -> np.ndarray:
    return x[:bucket] if name.startswith(prefix) and len(x) == full_length else x

  return [(i, {name: cut(name, x) for name, x in example.items()}) for i, example in rows]


def _what_to_cut(example: Any, is_scoring: bool) -> tuple[str | None, str]:
  """Returns the feature whose length counts, and how the names of those to be cut begin."""
  if "encoder_input_tokens" in example:
    return "encoder_input_tokens", "encoder_"
  feature = "decoder_target_tokens" if is_scoring else "decoder_causal_attention"
  return (feature, "decoder_" if is_scoring else feature) if feature in example else (None, "")


def _length(tokens_S: np.ndarray) -> int:
  """Returns the length up to the last token that is not padding."""
  places = np.flatnonzero(tokens_S)
  return int(places[-1]) + 1 if places.size else 0
