"""Tables of tokens that get more or fewer rows: the vocabulary of a checkpoint was extended, padded or cut."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from rosetta_t5.checkpoints.arrays import lazy_arrays
from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray, as_stored_array
from rosetta_t5.checkpoints.arrays.state_dicts import flatten_arrays, unflatten_state_dict

# The parameters with a row or a column for each token, and the axis of the tokens.
TOKEN_AXES = {
  re.compile(r"target/(.*/)?token_embedder/embedding"): 0,
  re.compile(r"target/(.*/)?logits_dense/kernel"): -1,
}

_log = logging.getLogger(__name__)


def resize_vocabulary(
  stored: Mapping[str, Any], expected: Mapping[str, Any], *, is_resuming: bool = False
) -> dict[str, Any]:
  """Returns a checkpoint's state dict in which the tables of tokens have the model's number of rows.

  New rows are the mean of the old ones. The last rows are left out if there are too many.

  Args:
    stored: the checkpoint's nested state dict.
    expected: the model's.
    is_resuming: whether the checkpoint is the run's own, whose tables have the right size.
  """
  del is_resuming
  arrays, wanted = flatten_arrays(stored), flatten_arrays(expected)
  for name in arrays.keys() & wanted.keys():
    for pattern, axis in TOKEN_AXES.items():
      if pattern.fullmatch(name):
        arrays[name] = _resize(name, as_stored_array(arrays[name]), wanted[name].shape, axis)
  return unflatten_state_dict(arrays)


def _resize(name: str, array: StoredArray, shape: tuple[int, ...], axis: int) -> StoredArray:
  rows, needed = array.shape[axis], shape[axis]
  if rows == needed:
    return array
  if rows > needed:
    _log.warning(
      "%s: the last %d of its %d rows are left out (resize_vocabulary)", name, rows - needed, rows
    )
    return lazy_arrays.slice_axis(array, axis, 0, needed)
  _log.warning(
    "%s: %d rows are added to its %d, with their mean as values (resize_vocabulary)",
    *(name, needed - rows, rows),
  )
  mean = array.get().astype(np.float32).mean(axis, keepdims=True).astype(array.dtype)
  added = as_stored_array(np.repeat(mean, needed - rows, axis))
  return lazy_arrays.concatenate([array, added], axis)
