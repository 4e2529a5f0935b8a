"""Different optimizers for different parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import Traversal, flatten_dict, unflatten_dict

from rosetta_t5.training.optimizers.guards import SpikeGuard
from rosetta_t5.training.optimizers.optimizer_def import (
  Optimizer,
  OptimizerDef,
  OptimizerState,
  StepLoss,
)

PyTree = Any


class MultiOptimizer(OptimizerDef):
  """Applies several optimizers, each to the parameters that its traversal visits (as in T5X).

  Parameters that no traversal visits do not change and have no state. The state of an optimizer that
  has one state per parameter, as Adafactor does, is stored by parameter as in T5X. That of others, such
  as optax's, is stored as `optimizer_0`, `optimizer_1`, … by the position of the pair.

      kernels = flax.traverse_util.ModelParamTraversal(lambda path, _: 'kernel' in path)
      MultiOptimizer([(kernels, Adafactor(decay_rate=0.8))])

  Args:
    traversals_and_optimizers: pairs of a traversal of the parameters and an optimizer.
  """

  hyper_params: list[Any]

  def __init__(self, traversals_and_optimizers: Sequence[tuple[Traversal, OptimizerDef]]):
    self._pairs = list(traversals_and_optimizers)
    if not self._pairs:
      raise ValueError("MultiOptimizer needs at least one pair of a traversal and an optimizer")
    self.traversals, self.sub_optimizers = zip(*self._pairs, strict=True)
    if any(isinstance(each, SpikeGuard) for each in self.sub_optimizers):
      raise ValueError(
        "MultiOptimizer cannot contain SpikeGuard, which skips whole steps: set SpikeGuard.optimizer "
        "to the MultiOptimizer instead"
      )
    self.uses_learning_rate = any(each.uses_learning_rate for each in self.sub_optimizers)
    self.uses_loss = any(each.uses_loss for each in self.sub_optimizers)
    super().__init__([optimizer.hyper_params for optimizer in self.sub_optimizers])

  def init_state(self, params: PyTree) -> OptimizerState:
    """Returns the initial state of each visited parameter, and None for the others.

    Raises:
      ValueError: a traversal visits no parameter, or two visit the same one.
    """
    states: dict[tuple[str, ...], Any] = dict.fromkeys(flatten_dict(params))
    owners: dict[tuple[str, ...], int] = {}
    for index, (traversal, optimizer) in enumerate(self._pairs):
      part = _part(traversal, params)
      if not part:
        raise ValueError(
          f"optimizer {index} of MultiOptimizer matches no parameter, so it would train nothing: "
          "correct its traversal, or remove the pair"
        )
      for path in flatten_dict(part):
        if path in owners:
          raise ValueError(
            f"optimizers {owners[path]} and {index} of MultiOptimizer both match parameter "
            f"{'/'.join(path)!r}: narrow one of the two traversals"
          )
        owners[path] = index
      states.update(self._stored(index, optimizer.init_state(part).param_states))
    return OptimizerState(jnp.zeros((), jnp.int32), unflatten_dict(states))

  def apply_gradient(
    self, hyper_params: Any, params: PyTree, state: OptimizerState, grads: PyTree
  ) -> tuple[PyTree, OptimizerState]:
    """Returns the parameters and the state after one step of each optimizer."""
    new_params, new_states = flatten_dict(params), flatten_dict(state.param_states)
    for index, part_hyper_params in enumerate(hyper_params):
      part, part_states = self._part_of(index, params, state.param_states)
      part_grads = _select(grads, list(flatten_dict(part)))
      if (loss := getattr(part_hyper_params, "loss", None)) is not None:
        part_hyper_params = part_hyper_params.replace(loss=_loss_of_part(loss, params))
      part, part_state = self.sub_optimizers[index].apply_gradient(
        part_hyper_params, part, OptimizerState(state.step, part_states), part_grads
      )
      new_params.update(flatten_dict(part))
      new_states.update(self._stored(index, part_state.param_states))
    return unflatten_dict(new_params), OptimizerState(state.step + 1, unflatten_dict(new_states))

  def params_to_evaluate(self, params: PyTree, param_states: PyTree) -> PyTree:
    """Returns the parameters that the optimizers evaluate."""
    evaluated = flatten_dict(params)
    for index, optimizer in enumerate(self.sub_optimizers):
      part = self._part_of(index, params, param_states)
      evaluated.update(flatten_dict(optimizer.params_to_evaluate(*part)))
    return unflatten_dict(evaluated)

  def update_hyper_params(self, **hyper_param_overrides: Any) -> list[Any]:
    """Returns the hyperparameters with some replaced, or all of them by `hyper_params=[...]`."""
    hyper_params = hyper_param_overrides.pop("hyper_params", self.hyper_params)
    if not hyper_param_overrides:
      return hyper_params
    without_loss = {name: n for name, n in hyper_param_overrides.items() if name != "loss"}
    return [
      each.replace(**(hyper_param_overrides if optimizer.uses_loss else without_loss))
      for optimizer, each in zip(self.sub_optimizers, hyper_params, strict=True)
    ]

  def set_param_axes(self, param_logical_axes: PyTree) -> None:
    """Passes the axis names of its parameters to each optimizer."""
    for traversal, optimizer in self._pairs:
      optimizer.set_param_axes(_part(traversal, param_logical_axes))

  def derive_logical_axes(self, optimizer: Optimizer, param_logical_axes: PyTree) -> Optimizer:
    """Returns `optimizer` with axis names, or None, in place of arrays."""
    axes: dict[tuple[str, ...], Any] = dict.fromkeys(flatten_dict(optimizer.target))
    for index, sub_optimizer in enumerate(self.sub_optimizers):
      part, states = self._part_of(index, optimizer.target, optimizer.state.param_states)
      whole = Optimizer(sub_optimizer, OptimizerState(None, states), part)
      derived = sub_optimizer.derive_logical_axes(whole, param_logical_axes)
      axes.update(self._stored(index, derived.state.param_states))
    return optimizer.replace(
      state=OptimizerState(None, unflatten_dict(axes)), target=param_logical_axes
    )

  def _stored(self, index: int, states: PyTree) -> dict[tuple[str, ...], Any]:
    """Returns the state of an optimizer by its paths in the whole state."""
    if type(self.sub_optimizers[index]).init_param_state is OptimizerDef.init_param_state:
      return {(f"optimizer_{index}",): states}
    return flatten_dict(states)

  def _part_of(self, index: int, params: PyTree, param_states: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the parameters that an optimizer updates, and its state."""
    part = _part(self.traversals[index], params)
    whole = param_states.get(f"optimizer_{index}")
    return part, _select(param_states, list(flatten_dict(part))) if whole is None else whole


def _loss_of_part(loss: StepLoss, params: PyTree) -> StepLoss:
  """Returns the loss as a function of some of the parameters."""

  def of_first_microbatch(part: PyTree, variables: PyTree | None = None) -> jax.Array:
    merged = unflatten_dict({**flatten_dict(params), **flatten_dict(part)})
    return loss.of_first_microbatch(merged, variables)

  return loss._replace(of_first_microbatch=of_first_microbatch)


def _part(traversal: Traversal, tree: PyTree) -> PyTree:
  """Returns the part of a nested dict that `traversal` visits."""
  flat = flatten_dict(tree)
  visited = traversal.iterate(unflatten_dict({path: "/".join(path) for path in flat}))
  return _select(tree, [tuple(name.split("/")) for name in visited])


def _select(tree: PyTree, paths: Sequence[tuple[str, ...]]) -> PyTree:
  """Returns the part of a nested dict with these paths."""
  flat = flatten_dict(tree)
  return unflatten_dict({path: flat[path] for path in paths})
