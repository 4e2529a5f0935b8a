"""T5X's trainer for experts, and its functions that change arrays of a tree by their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from rosetta_t5.argument_types import NonNegative, Positive
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.training import Trainer, TrainState
from rosetta_t5.training.optimizers.param_paths import path_name

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


class MoeTrainer(Trainer):
  """T5X's trainer for experts.

  T5X multiplies the gradients of experts by `num_expert_partitions`, because its compiler averaged them
  over the devices. Here the gradients on any mesh are those of one device, so nothing is multiplied.
  """

  def __init__(
    self,
    model: Any,
    train_state: TrainState,
    partitioner: BasePartitioner,
    eval_names: Sequence[str],
    summary_dir: str | None,
    train_state_axes: Any,
    rng: jax.Array,
    learning_rate_fn: Callable[[jax.Array], jax.Array],
    num_microbatches: NonNegative | None,
    num_expert_partitions: Positive,
    sharded_match_fn: Callable[[str], bool] | None = None,
    weight_metrics_computer: Any = None,
    extra_writers: Sequence[Any] = (),
  ):
    """Builds a `Trainer`, which describes the other arguments.

    Args:
      num_expert_partitions: exists for T5X's callers.
      sharded_match_fn: exists for T5X's callers.
    """
    del num_expert_partitions, sharded_match_fn
    super().__init__(
      model,
      train_state,
      partitioner,
      eval_names,
      summary_dir,
      train_state_axes,
      rng,
      learning_rate_fn,
      num_microbatches,
      weight_metrics_computer,
      extra_writers,
    )
