"""Parameters and their logical axes by path, for plain and frozen dicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

PyTree = Any


def path_name(path: Sequence[Any]) -> str:
  """Formats a jax key path as 'encoder/mlp/wi/kernel'."""
  return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def axes_by_path(param_logical_axes: PyTree) -> dict[str, Any]:
  """Returns the axis names (a PartitionSpec, a tuple, or None) of each parameter by path."""
  leaves = jax.tree_util.tree_flatten_with_path(param_logical_axes, is_leaf=_is_axis_names)[0]
  return {path_name(path): names for path, names in leaves}


def axes_like(params: PyTree, param_logical_axes: PyTree) -> list[Any]:
  """Returns the axis names of each leaf of `params`, in order; None for a leaf without names."""
  by_path = axes_by_path(param_logical_axes)
  leaves = jax.tree_util.tree_flatten_with_path(params)[0]
  return [by_path.get(path_name(path)) for path, _ in leaves]


def _is_axis_names(node: Any) -> bool:
  return node is None or isinstance(node, (tuple, jax.sharding.PartitionSpec))
