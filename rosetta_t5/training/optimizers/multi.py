"""Different optimizers for different parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax.traverse_util import Traversal, flatten_dict, unflatten_dict

from rosetta_t5.training.optimizers.optimizer_def import Optimizer, OptimizerDef, OptimizerState

PyTree = Any


class MultiOptimizer(OptimizerDef):
  """Applies several optimizers, each to the parameters that its traversal visits (as in T5X).

  Parameters that no traversal visits do not change and have no state. Each optimizer must have one
  state per parameter, as Adafactor does. To combine optax optimizers, use `optax.multi_transform`
  in `optimizers.chain`.

      kernels = flax.traverse_util.ModelParamTraversal(lambda path, _: 'kernel' in path)
      MultiOptimizer([(kernels, Adafactor(decay_rate=0.8))])

  Args:
    traversals_and_optimizers: pairs of a traversal of the parameters and an optimizer.

  Raises:
    ValueError: the state of an optimizer is not one state per parameter.
  """

  hyper_params: list[Any]

  def __init__(self, traversals_and_optimizers: Sequence[tuple[Traversal, OptimizerDef]]):
    self._pairs = list(traversals_and_optimizers)
    self.traversals, self.sub_optimizers = zip(*self._pairs, strict=True)
    for optimizer in self.sub_optimizers:
      if type(optimizer).init_param_state is OptimizerDef.init_param_state:
        raise ValueError(
          f"MultiOptimizer cannot use {type(optimizer).__name__}, whose state is not one state per "
          "parameter: use optimizers.chain([optax.multi_transform(...)]) instead"
        )
    super().__init__([optimizer.hyper_params for optimizer in self.sub_optimizers])

  def init_state(self, params: PyTree) -> OptimizerState:
    """Returns the initial state of each visited parameter, and None for the others.

    Raises:
      ValueError: two traversals visit the same parameter.
    """
    states: dict[tuple[str, ...], Any] = dict.fromkeys(flatten_dict(params))
    owners: dict[tuple[str, ...], int] = {}
    for index, (traversal, optimizer) in enumerate(self._pairs):
      part = _part(traversal, params)
      for path in flatten_dict(part):
        if path in owners:
          raise ValueError(
            f"optimizers {owners[path]} and {index} of MultiOptimizer both match parameter "
            f"{'/'.join(path)!r}: narrow one of the two traversals"
          )
        owners[path] = index
      states.update(flatten_dict(optimizer.init_state(part).param_states))
    return OptimizerState(jnp.zeros((), jnp.int32), unflatten_dict(states))

  def apply_gradient(
    self, hyper_params: Any, params: PyTree, state: OptimizerState, grads: PyTree
  ) -> tuple[PyTree, OptimizerState]:
    """Returns the parameters and the state after one step of each optimizer."""
    new_params, new_states = flatten_dict(params), flatten_dict(state.param_states)
    for (traversal, optimizer), numbers in zip(self._pairs, hyper_params, strict=True):
      paths = list(flatten_dict(_part(traversal, params)))
      part_params, part_states, part_grads = (
        _select(tree, paths) for tree in (params, state.param_states, grads)
      )
      part_params, part_state = optimizer.apply_gradient(
        numbers, part_params, OptimizerState(state.step, part_states), part_grads
      )
      new_params.update(flatten_dict(part_params))
      new_states.update(flatten_dict(part_state.param_states))
    return unflatten_dict(new_params), OptimizerState(state.step + 1, unflatten_dict(new_states))

  def update_hyper_params(self, **hyper_param_overrides: Any) -> list[Any]:
    """Returns the hyperparameters of all optimizers with these overrides, or `hyper_params=[...]`."""
    numbers = hyper_param_overrides.pop("hyper_params", self.hyper_params)
    if not hyper_param_overrides:
      return numbers
    return [each.replace(**hyper_param_overrides) for each in numbers]

  def set_param_axes(self, param_logical_axes: PyTree) -> None:
    """Passes the axis names of its parameters to each optimizer."""
    for traversal, optimizer in self._pairs:
      optimizer.set_param_axes(_part(traversal, param_logical_axes))

  def derive_logical_axes(self, optimizer: Optimizer, param_logical_axes: PyTree) -> Optimizer:
    """Returns `optimizer` with axis names, or None, in place of arrays."""
    axes = dict.fromkeys(flatten_dict(optimizer.target))
    for traversal, sub_optimizer in self._pairs:
      part = _part(traversal, optimizer.target)
      states = _select(optimizer.state.param_states, list(flatten_dict(part)))
      whole = Optimizer(sub_optimizer, OptimizerState(None, states), part)
      derived = sub_optimizer.derive_logical_axes(whole, param_logical_axes)
      axes.update(flatten_dict(derived.state.param_states))
    return optimizer.replace(
      state=OptimizerState(None, unflatten_dict(axes)), target=param_logical_axes
    )


def _part(traversal: Traversal, tree: PyTree) -> PyTree:
  """Returns the part of a nested dict that `traversal` visits."""
  flat = flatten_dict(tree)
  visited = traversal.iterate(unflatten_dict({path: "/".join(path) for path in flat}))
  return _select(tree, [tuple(name.split("/")) for name in visited])


def _select(tree: PyTree, paths: Sequence[tuple[str, ...]]) -> PyTree:
  """Returns the part of a nested dict with these paths."""
  flat = flatten_dict(tree)
  return unflatten_dict({path: flat[path] for path in paths})
