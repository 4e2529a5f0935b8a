"""Nested state dicts as flat ones with names like `target/encoder/encoder_norm/scale`, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import traverse_util
from flax.core import unfreeze

PyTree = Any

_SPEC_KEYS = frozenset({"driver", "kvstore", "metadata"})


def tensorstore_leaf(_: Any, value: Mapping[str, Any]) -> bool:
  """Returns whether a dict is not a level of names but describes an array in TensorStore."""
  return set(value) >= _SPEC_KEYS


def flatten_state_dict(
  state_dict: Mapping[str, Any], keep_empty_nodes: bool = False
) -> dict[str, Any]:
  """Returns {"outer/inner": leaf} for a nested dict.

  Args:
    state_dict: nested dicts with string keys.
    keep_empty_nodes: keep empty dicts as leaves, so that unflattening gives them back.
  """
  return traverse_util.flatten_dict(
    unfreeze(dict(state_dict)),
    sep="/",
    keep_empty_nodes=keep_empty_nodes,
    is_leaf=tensorstore_leaf,
  )


def unflatten_state_dict(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the nested dict that `flatten_state_dict` flattened."""
  return traverse_util.unflatten_dict(dict(flat), sep="/")


def get_name_tree(state_dict: Mapping[str, Any], keep_empty_nodes: bool = False) -> dict[str, Any]:
  """Returns the same nested dict with each leaf replaced by its flat name."""
  names = {
    name: leaf if leaf is traverse_util.empty_node else name
    for name, leaf in flatten_state_dict(state_dict, keep_empty_nodes).items()
  }
  return unflatten_state_dict(names)


def intersect_state(
  state_dict: Mapping[str, Any], intersect_state_dict: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the part of `state_dict` whose names `intersect_state_dict` has too."""
  kept = flatten_state_dict(intersect_state_dict, keep_empty_nodes=True)
  flat = flatten_state_dict(state_dict, keep_empty_nodes=True)
  return unflatten_state_dict({name: leaf for name, leaf in flat.items() if name in kept})


def merge_state(
  state_dict: Mapping[str, Any], from_scratch_state: Mapping[str, Any], overwrite: bool = False
) -> dict[str, Any]:
  """Returns `state_dict` with the names it lacks taken from `from_scratch_state`.

  Args:
    state_dict: the state that counts.
    from_scratch_state: where missing leaves come from.
    overwrite: let `from_scratch_state` win where both have a name.
  """
  mine = flatten_state_dict(state_dict, keep_empty_nodes=True)
  scratch = flatten_state_dict(from_scratch_state, keep_empty_nodes=True)
  return unflatten_state_dict({**mine, **scratch} if overwrite else {**scratch, **mine})
