"""Sparse upcycling: every expert of a layer starts as the dense layer's feed-forward block."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rosetta_t5.checkpoints.arrays.lazy_arrays import as_stored_array, repeat
from rosetta_t5.checkpoints.arrays.state_dicts import flatten_state_dict, unflatten_state_dict

_EXPERT = re.compile(r"target/.*/expert/.*")


def upcycle(
  stored: Mapping[str, Any], expected: Mapping[str, Any], *, is_resuming: bool = False
) -> dict[str, Any]:
  """Returns a checkpoint's state dict in which arrays of dense blocks are repeated for each expert.

  Args:
    stored: the checkpoint's nested state dict, under the model's names (see `assignment_map`).
    expected: the model's nested state dict of leaves with `shape`.
    is_resuming: whether the checkpoint is the run's own, which has experts.
  """
  if is_resuming:
    return dict(stored)
  flat, wanted = flatten_state_dict(stored), flatten_state_dict(expected)
  for name in filter(_EXPERT.fullmatch, flat.keys() & wanted.keys()):
    shape = wanted[name].shape
    if flat[name].shape == shape[1:]:
      flat[name] = repeat(as_stored_array(flat[name]), shape[0])
  return unflatten_state_dict(flat)
