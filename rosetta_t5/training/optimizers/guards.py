"""Skips the steps whose loss or gradients spike."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from rosetta_t5.argument_types import Positive, PositiveNumber, Rate
from rosetta_t5.telemetry.run_metrics import global_norm
from rosetta_t5.training.optimizers.optimizer_def import (
  Optimizer,
  OptimizerDef,
  OptimizerState,
  StepLoss,
)

PyTree = Any


class SpikeGuardHyperParams(struct.PyTreeNode):
  """The hyperparameters of the guarded optimizer, and what the trainer sets."""

  optimizer: Any
  loss: StepLoss | None = struct.field(pytree_node=False, default=None)


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
    super().__init__(SpikeGuardHyperParams(optimizer.hyper_params))

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

  def update_hyper_params(self, **hyper_param_overrides: Any) -> SpikeGuardHyperParams:
    """Returns the guarded optimizer's hyperparameters with some replaced, and the loss."""
    loss = hyper_param_overrides.get("loss")
    if not self.optimizer.uses_loss:
      hyper_param_overrides.pop("loss", None)
    return SpikeGuardHyperParams(self.optimizer.update_hyper_params(**hyper_param_overrides), loss)

  def set_param_axes(self, param_logical_axes: PyTree) -> None:
    """Passes the names of the parameters' logical axes on."""
    self.optimizer.set_param_axes(param_logical_axes)

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
