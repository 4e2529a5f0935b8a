"""T5X's `contrib.moe.training_utils`: changing arrays of a tree by their names."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax

from rosetta_t5.training.optimizers.optimizer_def import path_name

PyTree = Any


def match_fn(prefix: str | None) -> Callable[[str], bool]:
  """Returns a function that finds the regular expression at the start of a name; None finds nothing."""
  pattern = re.compile(prefix) if prefix else None
  return lambda name: pattern is not None and pattern.match(name) is not None


def tree_map_with_names(
  f: Callable[[Any], Any],
  param_tree: PyTree,
  match_name_fn: Callable[[str], bool] = lambda name: True,
) -> PyTree:
  """Returns the tree with `f` applied to the leaves whose name, such as "a/b/c", matches.

  None is a leaf.
  """

  def change(path: Any, leaf: Any) -> Any:
    return f(leaf) if match_name_fn(path_name(path)) else leaf

  return jax.tree_util.tree_map_with_path(change, param_tree, is_leaf=lambda x: x is None)


def scale_sharded_grads(
  grads: PyTree, sharded_match_fn: Callable[[str], bool] | None, scale_factor: float
) -> PyTree:
  """Returns the gradients, multiplied by a factor where the parameter's name matches."""
  if sharded_match_fn is None:
    return grads
  return tree_map_with_names(lambda grad: grad * scale_factor, grads, sharded_match_fn)
