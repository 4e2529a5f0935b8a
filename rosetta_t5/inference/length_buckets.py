"""Shortens batches of short inputs to one of a few lengths ("buckets"), each compiled once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def check_buckets(buckets: Sequence[int] | None, model: Any = None) -> tuple[int, ...]:
  """Returns the buckets in ascending order, or () for None.

  Args:
    buckets: the lengths.
    model: the model that computes the batches; None for one without experts.

  Raises:
    ValueError: they are not positive integers, or the model has experts, whose slots depend on the
      length.
  """
  if buckets is None:
    return ()
  if isinstance(buckets, int) or any(not isinstance(n, int) or n < 1 for n in buckets):
    raise ValueError(
      f"input_length_buckets must be positive lengths such as (64, 128, 256), or (), got {buckets!r}"
    )
  if buckets and model is not None and model.has_experts:
    raise ValueError(
      "input_length_buckets would change the results of a model with experts, because an expert has "
      f"fewer slots for shorter rows, got {buckets!r}: set it to ()"
    )
  return tuple(sorted(buckets))


def default_buckets(full_length: int) -> tuple[int, ...]:
  """Returns an eighth, a quarter and a half of a length, as multiples of 8."""
  eighth = -(-full_length // 64) * 8
  return tuple(n * eighth for n in (1, 2, 4) if n * eighth < full_length)


def cut_rows(
  rows: Sequence[tuple[Any, Any]], buckets: Sequence[int], is_scoring: bool = False
) -> list[tuple[Any, Any]]:
  """Cuts the features of a batch to the shortest bucket that no example's content exceeds.

  For an encoder-decoder model, the inputs are cut. A decoder-only model has inputs and targets in one
  row. When they are scored, the whole row is cut. When the model continues the inputs, only
  `decoder_causal_attention`, which marks the inputs, is cut: the length of the row remains, because it
  limits the length of the prediction.

  Args:
    rows: (index, example) pairs; examples without these features are not changed.
    buckets: lengths in ascending order.
    is_scoring: whether targets are scored instead of decoded.
  """
  measured, cut_prefix = _features_to_cut(rows[0][1], is_scoring)
  if measured is None:
    return list(rows)
  full_length = len(rows[0][1][measured])
  longest = max(len(np.trim_zeros(example[measured], "b")) for _, example in rows)
  bucket = next((n for n in buckets if longest <= n < full_length), full_length)

  def cut(name: str, x: np.ndarray) -> np.ndarray:
    return x[:bucket] if name.startswith(cut_prefix) and len(x) == full_length else x

  return [(i, {name: cut(name, x) for name, x in example.items()}) for i, example in rows]


def _features_to_cut(example: Mapping[str, Any], is_scoring: bool) -> tuple[str | None, str]:
  """Returns the feature that determines the length, and the prefix of the features to cut."""
  if "encoder_input_tokens" in example:
    return "encoder_input_tokens", "encoder_"
  measured = "decoder_target_tokens" if is_scoring else "decoder_causal_attention"
  if measured not in example:
    return None, ""
  return measured, "decoder_" if is_scoring else measured
