"""Optimizers made of others: one that skips spikes, and one for each part of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import Traversal, flatten_dict, unflatten_dict

from rosetta_t5.argument_types import Positive, PositiveNumber, Rate
from rosetta_t5.networks.gpu_fusion import global_norm
from rosetta_t5.training.optimizers import optimizer_def
from rosetta_t5.training.optimizers.optimizer_def import Optimizer, OptimizerDef, OptimizerState

PyTree = Any


class SpikeGuardState(NamedTuple):
  """The state of a guarded optimizer.

  Attributes:
    steps: the number of steps that were not skipped.
    means: exponential averages of their gradient norm and loss, [2].
    counts: `notfinite_count` counts the skipped steps since the last one that was not,
      `total_notfinite` all of them; `inner_state` is the guarded optimizer's state.
  """

  steps: Any
  means: Any
  counts: optax.ApplyIfFiniteState


class SpikeGuard(OptimizerDef):
  """An optimizer that skips steps whose loss or gradient norm is not finite or far above its average.

  A skipped step changes neither the parameters nor the optimizer's state. It counts as a step of the
  run, and in the metric `skipped_steps`.

  Args:
    optimizer: the optimizer of the other steps.
    max_norm_ratio: the maximum gradient norm, as a multiple of its average.
    max_loss_ratio: the maximum loss, as a multiple of its average's absolute value.
    decay: the decay of the averages, which leave out skipped steps.
    warmup_steps: the number of first steps, of which only those with infinities or NaN are skipped.
    max_skipped_steps: after so many skipped steps in a row, the run restores the last checkpoint
      before them and continues with the next data; None to continue without. It is checked whenever
      metrics are reported.
    max_restorations: how often the run restores the same checkpoint before it ends with an error.
  """

  uses_loss = True

  def __init__(
    self,
    optimizer: OptimizerDef,
    max_norm_ratio: PositiveNumber = 5.0,
    max_loss_ratio: PositiveNumber = 2.0,
    decay: Rate = 0.98,
    warmup_steps: Positive = 100,
    max_skipped_steps: Positive | None = 10,
    max_restorations: Positive = 3,
  ):
    self.optimizer = optimizer
    self.uses_learning_rate = optimizer.uses_learning_rate
    self.max_skipped_steps = max_skipped_steps
    self.max_restorations = max_restorations
    self._ratios = (max_norm_ratio, max_loss_ratio)
    self._decay = decay
    self._warmup_steps = warmup_steps
    super().__init__(optimizer_def.HyperParams(optimizer=optimizer.hyper_params, loss=None))

  def init_state(self, params: PyTree) -> OptimizerState:
    """Returns the state of step 0."""
    inner = self.optimizer.init_state(params)
    zero = jnp.zeros((), jnp.int32)
    counts = optax.ApplyIfFiniteState(zero, jnp.ones((), bool), jnp.copy(zero), inner.param_states)
    return OptimizerState(inner.step, SpikeGuardState(jnp.copy(zero), jnp.zeros(2), counts))

  def apply_gradient(
    self, hyper_params: Any, params: PyTree, state: OptimizerState, grads: PyTree
  ) -> tuple[PyTree, OptimizerState]:
    """Returns the parameters and the state after one step, which may be skipped."""
    guard: SpikeGuardState = state.param_states
    norm, loss = global_norm(grads), hyper_params.loss
    measured = jnp.stack([norm, jnp.float32(0) if loss is None else loss.value])
    means = guard.means / (1.0 - self._decay ** jnp.maximum(guard.steps, 1))
    limits = jnp.array(self._ratios) * jnp.abs(means)  # The loss may be negative.
    is_high = jnp.any(measured > limits)
    is_spike = ~jnp.all(jnp.isfinite(measured)) | (is_high & (guard.steps >= self._warmup_steps))
    inner = OptimizerState(state.step, guard.counts.inner_state)

    def apply() -> tuple[PyTree, PyTree]:
      new_params, new = self.optimizer.apply_gradient(hyper_params.optimizer, params, inner, grads)
      return new_params, new.param_states

    new_params, inner_state = jax.lax.cond(is_spike, lambda: (params, inner.param_states), apply)
    counts = optax.ApplyIfFiniteState(
      notfinite_count=jnp.where(is_spike, guard.counts.notfinite_count + 1, 0),
      last_finite=~is_spike,
      total_notfinite=guard.counts.total_notfinite + is_spike,
      inner_state=inner_state,
    )
    averaged = optax.incremental_update(measured, guard.means, 1.0 - self._decay)
    new_means = jnp.where(is_spike, guard.means, averaged)
    new_guard = SpikeGuardState(guard.steps + ~is_spike, new_means, counts)
    return new_params, OptimizerState(state.step + 1, new_guard)

  def update_hyper_params(self, **hyper_param_overrides: Any) -> optimizer_def.HyperParams:
    """Returns the guarded optimizer's hyperparameters with some replaced, and the loss."""
    inner = self.optimizer.update_hyper_params(**hyper_param_overrides)
    return optimizer_def.HyperParams(optimizer=inner, loss=hyper_param_overrides.get("loss"))

  def set_param_axes(self, param_logical_axes: PyTree) -> None:
    """Passes the names of the parameters' logical axes on."""
    self.optimizer.set_param_axes(param_logical_axes)

  def trained(self, params: PyTree) -> PyTree:
    """Returns the parameters that the guarded optimizer trains."""
    return self.optimizer.trained(params)

  def params_to_evaluate(self, params: PyTree, param_states: SpikeGuardState) -> PyTree:
    """Returns the parameters that the guarded optimizer evaluates."""
    return self.optimizer.params_to_evaluate(params, param_states.counts.inner_state)

  def derive_logical_axes(self, optimizer: Optimizer, param_logical_axes: PyTree) -> Optimizer:
    """Returns `optimizer` with axis names, or None, in place of arrays."""
    guard = optimizer.state.param_states
    inner_state = OptimizerState(None, guard.counts.inner_state)
    inner = self.optimizer.derive_logical_axes(
      Optimizer(self.optimizer, inner_state, optimizer.target), param_logical_axes
    )
    counts = optax.ApplyIfFiniteState(None, None, None, inner.state.param_states)
    axes = OptimizerState(None, SpikeGuardState(None, None, counts))
    return optimizer.replace(state=axes, target=param_logical_axes)


class MultiOptimizer(OptimizerDef):
  """Applies several optimizers, each to the parameters that its traversal visits (as in T5X).

  Parameters that no traversal visits do not change and have no state. K-FAC and Sophia, which compute the
  loss of all parameters, cannot be one of the optimizers. The state of an optimizer that
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
    self.traversals, self.sub_optimizers = zip(*self._pairs, strict=True)
    self.uses_learning_rate = any(each.uses_learning_rate for each in self.sub_optimizers)
    self.uses_loss = any(each.uses_loss for each in self.sub_optimizers)
    super().__init__([optimizer.hyper_params for optimizer in self.sub_optimizers])

  def init_state(self, params: PyTree) -> OptimizerState:
    """Returns the initial state of each visited parameter, and None for the others.

    Raises:
      ValueError: a traversal visits no parameter, or two visit the same one.
    """
    states: dict[tuple[str, ...], Any] = dict.fromkeys(flatten_dict(params))
    seen: set[tuple[str, ...]] = set()
    for index, (traversal, optimizer) in enumerate(self._pairs):
      part = _part(traversal, params)
      paths = set(flatten_dict(part))
      if not paths:
        raise ValueError(
          f"optimizer {index} of MultiOptimizer matches no parameter, so it would train nothing: "
          "correct its traversal, or remove the pair"
        )
      if twice := seen & paths:
        raise ValueError(
          f"two optimizers of MultiOptimizer, number {index} and one before it, match parameter "
          f"{'/'.join(min(twice))!r}: narrow one of the two traversals"
        )
      seen |= paths
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
      part, part_state = self.sub_optimizers[index].apply_gradient(
        part_hyper_params, part, OptimizerState(state.step, part_states), part_grads
      )
      new_params.update(flatten_dict(part))
      new_states.update(self._stored(index, part_state.param_states))
    return unflatten_dict(new_params), OptimizerState(state.step + 1, unflatten_dict(new_states))

  def trained(self, params: PyTree) -> PyTree:
    """Returns the parameters that a traversal visits."""
    parts = [flatten_dict(_part(traversal, params)) for traversal in self.traversals]
    return unflatten_dict({path: value for part in parts for path, value in part.items()})

  def params_to_evaluate(self, params: PyTree, param_states: PyTree) -> PyTree:
    """Returns the parameters that the optimizers evaluate."""
    evaluated = params
    for index, optimizer in enumerate(self.sub_optimizers):
      part = self._part_of(index, params, param_states)
      evaluated = optimizer_def.replace_part(evaluated, optimizer.params_to_evaluate(*part))
    return evaluated

  def update_hyper_params(self, **hyper_param_overrides: Any) -> list[Any]:
    """Returns the hyperparameters with some replaced, or all of them by `hyper_params=[...]`."""
    hyper_params = hyper_param_overrides.pop("hyper_params", self.hyper_params)
    return [
      optimizer.update_hyper_params(hyper_params=each, **hyper_param_overrides)
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
    state = OptimizerState(None, unflatten_dict(axes))
    return optimizer.replace(state=state, target=param_logical_axes)

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


def _part(traversal: Traversal, tree: PyTree) -> PyTree:
  """Returns the part of a nested dict that `traversal` visits."""
  flat = flatten_dict(tree)
  visited = traversal.iterate(unflatten_dict({path: "/".join(path) for path in flat}))
  return _select(tree, [tuple(name.split("/")) for name in visited])


def _select(tree: PyTree, paths: Sequence[tuple[str, ...]]) -> PyTree:
  """Returns the part of a nested dict with these paths."""
  flat = flatten_dict(tree)
  return unflatten_dict({path: flat[path] for path in paths})
