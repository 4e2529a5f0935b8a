"""One training step, as a pure function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from clu import metrics as clu_metrics
from flax import struct
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.linen.partitioning import with_sharding_constraint
from jaxtyping import Array, Bool, Float, Int

from rosetta_t5.telemetry import metrics as metrics_lib
from rosetta_t5.telemetry.run_measures import GRADIENT_NORM, global_norm
from rosetta_t5.training.train_state import InferenceState, TrainState

PyTree = Any
Batch = Mapping[str, jax.Array]
Metrics = dict[str, Any]
LossFn = Callable[..., tuple[jax.Array, Any]]

FIRST_NONFINITE = "first_nonfinite"


def train_step(
  state: TrainState,
  batch: Batch,
  rng: jax.Array,
  *,
  loss_fn: LossFn,
  learning_rate_fn: Callable[[Int[Array, ""]], Float[Array, ""]],
  num_microbatches: int | None = None,
  weight_metrics: Callable[[PyTree, TrainState, TrainState], Metrics] | None = None,
) -> tuple[TrainState, Metrics]:
  """Returns the state after one update on `batch`, and the metrics of the batch.

  Args:
    state: what the step starts from; `state.step` updates have been made.
    batch: arrays whose first dimension is the batch.
    rng: the run's key; this step's is folded in from it and the step.
    loss_fn: loss_fn(params, batch, dropout_rng) → (loss, metrics).
    learning_rate_fn: the schedule, of the step before the update.
    num_microbatches: parts the batch is worked through in; their gradients are summed.
    weight_metrics: called with gradients, old and new state; returns more metrics.
  """
  learning_rate = learning_rate_fn(state.step)
  grads, loss, metrics, mutables = accumulate_gradients(
    loss_fn, state, batch, jax.random.fold_in(rng, state.step), num_microbatches
  )
  new_state = state.apply_gradient(grads, learning_rate, flax_mutables=mutables)
  metrics |= learning_rate_metrics(learning_rate)
  metrics[FIRST_NONFINITE] = FirstNonFinite.of(state.step, loss, grads)
  metrics[GRADIENT_NORM] = metrics_lib.AveragePerStep(total=global_norm(grads))
  if weight_metrics is not None:
    metrics |= weight_metrics(grads, state, new_state)
  return new_state, metrics


def learning_rate_metrics(learning_rate: Float[Array, ""]) -> Metrics:
  """Returns the learning rate as a mean over steps, and as it was last."""
  one = jnp.array(1.0)
  return {
    "learning_rate": clu_metrics.Average(total=learning_rate, count=one),
    "learning_rate/current": clu_metrics.LastValue(total=learning_rate, count=one),
  }


def accumulate_gradients(
  loss_fn: LossFn,
  state: TrainState,
  batch: Batch,
  dropout_rng: jax.Array,
  num_microbatches: int | None = None,
) -> tuple[PyTree, Float[Array, ""], Metrics, PyTree]:
  """Returns the gradients of a batch, its loss, its metrics and the new mutable collections.

  Microbatches follow each other in the batch, as in T5X; each gets its own dropout key, split off
  in turn. Gradients are summed, never averaged: the loss is a sum over tokens.

  Raises:
    ValueError: the batch cannot be cut into that many equal parts.
  """
  if not num_microbatches or num_microbatches == 1:
    return _gradients(loss_fn, state.params, state.flax_mutables, batch, dropout_rng)
  _check_divides(num_microbatches, batch)

  def add_microbatch(carry: PyTree, part: Batch) -> tuple[PyTree, Metrics]:
    total_grads, total_loss, mutables, rng = carry
    rng, part_rng = jax.random.split(rng)
    part = {
      name: with_sharding_constraint(value, ("batch",) + (None,) * (value.ndim - 1))
      for name, value in part.items()
    }
    grads, loss, metrics, mutables = _gradients(loss_fn, state.params, mutables, part, part_rng)
    return (jax.tree.map(jnp.add, total_grads, grads), total_loss + loss, mutables, rng), metrics

  parts = {
    name: value.reshape(num_microbatches, -1, *value.shape[1:]) for name, value in batch.items()
  }
  zeros = jax.tree.map(jnp.zeros_like, state.params)
  carry = (zeros, jnp.zeros(()), state.flax_mutables, dropout_rng)
  (grads, loss, mutables, _), stacked = jax.lax.scan(add_microbatch, carry, parts)
  # A metric without arrays (a duration, set after the step) has no parts to reduce.
  metrics = {
    n: metric.reduce() if jax.tree.leaves(metric) else metric for n, metric in stacked.items()
  }
  return grads, loss, metrics_lib.set_step_metrics_num_steps(metrics, 1), mutables


def _gradients(
  loss_fn: LossFn, params: PyTree, mutables: PyTree, batch: Batch, dropout_rng: jax.Array
) -> tuple[PyTree, Float[Array, ""], Metrics, PyTree]:
  if not mutables:
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, metrics), grads = grad_fn(params, batch, dropout_rng)
    return grads, loss, metrics, mutables

  def loss_of(params: PyTree, overwritten: PyTree) -> tuple[jax.Array, Any]:
    return loss_fn(params, batch, dropout_rng, {**mutables, **overwritten})

  # A collection whose gradient is its next value (fp8's scales): replaced, never summed.
  overwritten = {name: mutables[name] for name in (OVERWRITE_WITH_GRADIENT,) if name in mutables}
  grad_fn = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
  (loss, (metrics, mutables)), (grads, overwritten) = grad_fn(params, overwritten)
  return grads, loss, metrics, {**mutables, **overwritten}


def _check_divides(num_microbatches: int, batch: Batch) -> None:
  batch_size = next(iter(batch.values())).shape[0]
  if batch_size % num_microbatches:
    raise ValueError(
      f"trainer.Trainer.num_microbatches = {num_microbatches} does not divide the batch of "
      f"{batch_size} examples: change one of the two"
    )


def eval_step(state: TrainState | InferenceState, batch: Batch, *, eval_fn: LossFn) -> Metrics:
  """Returns the metrics of a batch without dropout: eval_fn(params, batch) → (loss, metrics)."""
  return dict(eval_fn(state.params, batch)[1])


@struct.dataclass
class FirstNonFinite(clu_metrics.Metric):
  """Where the first NaN or infinity of several steps stood: in the loss, or in which gradients.

  Attributes:
    step: the updates made before that step.
    bad: [1 + parameters], whether the loss, and each parameter's gradient, was not finite.
  """

  step: Int[Array, ""]
  bad: Bool[Array, " N"]

  @classmethod
  def of(cls, step: jax.Array, loss: jax.Array, grads: PyTree) -> FirstNonFinite:
    """Returns the record of one step."""
    # A sum is finite unless a term is not (or all are huge, which is as bad).
    sums = [jnp.sum(grad, dtype=jnp.float32) for grad in jax.tree.leaves(grads)]
    return cls(step=step, bad=~jnp.isfinite(jnp.stack([loss.astype(jnp.float32), *sums])))

  def merge(self, other: FirstNonFinite) -> FirstNonFinite:
    """Returns the record of the earlier of the two that is bad."""
    mine = jnp.any(self.bad)
    return FirstNonFinite(
      step=jnp.where(mine, self.step, other.step), bad=jnp.where(mine, self.bad, other.bad)
    )

  def compute(self) -> jax.Array:
    """Returns whether anything was not finite."""
    return jnp.any(self.bad)
