"""Conversion between nested state dicts and flat ones with names like `target/encoder/norm/scale`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etils import epath
from flax import serialization, traverse_util
from flax.core import unfreeze

_SPEC_KEYS = frozenset({"driver", "kvstore", "metadata"})


def tensorstore_leaf(_: Any, value: Mapping[str, Any]) -> bool:
  """Returns whether a dict is a TensorStore spec, which is a leaf, and not a level of names."""
  return set(value) >= _SPEC_KEYS


def flatten_state_dict(
  state_dict: Mapping[str, Any], keep_empty_nodes: bool = False
) -> dict[str, Any]:
  """Returns {"outer/inner": leaf} for a nested dict.

  Args:
    state_dict: nested dicts with string keys.
    keep_empty_nodes: keep empty dicts as leaves, so that unflattening restores them.
  """
  return traverse_util.flatten_dict(
    unfreeze(dict(state_dict)), sep="/", keep_empty_nodes=keep_empty_nodes, is_leaf=tensorstore_leaf
  )


def read_state_dict(file: epath.Path) -> dict[str, Any]:
  """Returns the nested dict in a msgpack file of flax.

  Raises:
    ValueError: the file is damaged.
  """
  content = file.read_bytes()
  try:
    state: dict[str, Any] = serialization.msgpack_restore(content)
    return dict(state)
  except Exception as error:  # flax raises whatever its functions on arrays do.
    raise ValueError(f"{file} is damaged: {str(error) or type(error).__name__}") from error


def unflatten_state_dict(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the nested dict that `flatten_state_dict` flattened."""
  return traverse_util.unflatten_dict(dict(flat), sep="/")


def flatten_arrays(state_dict: Mapping[str, Any]) -> dict[str, Any]:
  """Returns {"outer/inner": leaf} for the leaves with a shape. Optimizer states also have others."""
  leaves = flatten_state_dict(state_dict)
  return {name: leaf for name, leaf in leaves.items() if hasattr(leaf, "shape")}


def merge_state(
  state_dict: Mapping[str, Any], from_scratch_state: Mapping[str, Any], overwrite: bool = False
) -> dict[str, Any]:
  """Returns the union of two state dicts.

  Args:
    state_dict: the state whose leaves are preferred.
    from_scratch_state: the state that provides the missing leaves.
    overwrite: prefer the leaves of `from_scratch_state`.
  """
  state = flatten_state_dict(state_dict, keep_empty_nodes=True)
  scratch = flatten_state_dict(from_scratch_state, keep_empty_nodes=True)
  return unflatten_state_dict(state | scratch if overwrite else scratch | state)
