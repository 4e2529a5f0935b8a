"""One training step, as a pure function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from clu import metrics as clu_metrics
from flax import struct
from flax.core import FrozenDict, freeze
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.linen.partitioning import with_sharding_constraint
from jaxtyping import Array, Bool, Float, Int

from rosetta_t5.networks.gpu_fusion import square_sums, with_common_factor
from rosetta_t5.telemetry import metrics as metrics_lib
from rosetta_t5.telemetry.run_metrics import GRADIENT_NORM
from rosetta_t5.training.losses import with_divisors
from rosetta_t5.training.optimizers.optimizer_def import StepLoss, replace_part
from rosetta_t5.training.train_state import params_to_evaluate, trained_params, uses_loss

PyTree = Any
Batch = Mapping[str, jax.Array]
Metrics = dict[str, Any]
LossFn = Callable[..., tuple[jax.Array, Any]]
State = Any  # a TrainState, or a user's state with its attributes and methods

FIRST_NONFINITE = "first_nonfinite"


def train_step(
  state: State,
  batch: Batch,
  rng: jax.Array,
  *,
  loss_fn: LossFn,
  learning_rate_fn: Callable[[Int[Array, ""]], Float[Array, ""]],
  num_microbatches: int | None = None,
  microbatches_at_once: int = 1,
  weight_metrics: Callable[[PyTree, State, State], Metrics] | None = None,
  pad_id: int = 0,
) -> tuple[State, Metrics]:
  """Returns the state after one optimizer step on `batch`, and the metrics of the batch.

  Args:
    state: the state before the step, after `state.step` completed steps.
    batch: arrays whose first dimension is the batch.
    rng: the run's key; the key of this step is `fold_in(rng, state.step)`.
    loss_fn: loss_fn(params, batch, dropout_rng) → (loss, metrics).
    learning_rate_fn: the schedule, called with the number of completed steps.
    num_microbatches: the number of parts that the batch is split into; their gradients are summed.
    microbatches_at_once: how many of them the program computes side by side.
    weight_metrics: called with gradients, old and new state; returns additional metrics.
    pad_id: see `accumulate_gradients`.
  """
  learning_rate, rng = learning_rate_fn(state.step), jax.random.fold_in(rng, state.step)
  arguments = (loss_fn, state, batch, rng, num_microbatches, pad_id)
  grads, loss, metrics, mutables = accumulate_gradients(*arguments, microbatches_at_once)
  grads = with_common_factor(grads)
  about_loss = {"loss": _step_loss(loss, *arguments)} if uses_loss(state) else {}
  new_state = state.apply_gradient(grads, learning_rate, flax_mutables=mutables, **about_loss)
  metrics |= learning_rate_metrics(learning_rate)
  squares = square_sums(grads)
  metrics[FIRST_NONFINITE] = FirstNonFinite.of(state.step, loss, squares)
  metrics[GRADIENT_NORM] = metrics_lib.AveragePerStep(total=jnp.sqrt(sum(squares)))
  metrics |= weight_metrics(_of_all(grads, state), state, new_state) if weight_metrics else {}
  return new_state, metrics


def _of_all(grads: PyTree, state: State) -> PyTree:
  """Returns gradients of all parameters, zero for those that are not trained."""
  return replace_part(jax.tree.map(jnp.zeros_like, state.params), grads)


def _step_loss(
  loss: Array, loss_fn: LossFn, state: State, batch: Batch, rng: Array, num: int | None, pad_id: int
) -> StepLoss:
  parts = num or 1

  def of_first_microbatch(params: PyTree, variables: PyTree | None = None) -> jax.Array:
    whole = with_divisors(batch, pad_id) if parts > 1 else batch
    part = {name: value[: len(value) // parts] for name, value in whole.items()}
    part = {name: _constrain_to_batch(value) for name, value in part.items()}
    mutables = {**state.flax_mutables, **(variables or {})}
    return loss_fn(params, part, rng, *([mutables] if mutables else []))[0]

  return StepLoss(loss, of_first_microbatch, parts)


def _constrain_to_batch(value: jax.Array) -> jax.Array:
  return with_sharding_constraint(value, ("batch",) + (None,) * (value.ndim - 1))


def learning_rate_metrics(learning_rate: Float[Array, ""]) -> Metrics:
  """Returns the learning rate as a mean over steps and as the last value."""
  one = jnp.array(1.0)
  return {
    "learning_rate": clu_metrics.Average(total=learning_rate, count=one),
    "learning_rate/current": clu_metrics.LastValue(total=learning_rate, count=one),
  }


def accumulate_gradients(
  loss_fn: LossFn,
  state: State,
  batch: Batch,
  dropout_rng: jax.Array,
  num_microbatches: int | None = None,
  pad_id: int = 0,
  microbatches_at_once: int = 1,
) -> tuple[PyTree, Float[Array, ""], Metrics, PyTree]:
  """Returns the gradients of the trained parameters, the loss, the metrics and the new mutable collections.

  As in T5X, microbatches are contiguous slices of the batch, and each has its own dropout key.
  Gradients are summed rather than averaged, because the loss is a sum over tokens. Without weights in the
  batch, `pad_id` is the token that has none.

  Raises:
    ValueError: the batch cannot be split into that many equal parts.
  """
  trained = trained_params(state)
  if trained is not state.params:
    loss_fn = _loss_of_part(loss_fn, state.params)
  if not num_microbatches or num_microbatches == 1:
    return _gradients(loss_fn, trained, state.flax_mutables, batch, dropout_rng)
  batch_size = next(iter(batch.values())).shape[0]
  if batch_size % num_microbatches:
    raise ValueError(
      f"the batch of {batch_size} examples must be a multiple of trainer.Trainer.num_microbatches × "
      f"overlapping_parts = {num_microbatches}: change one of them"
    )

  def add_microbatch(carry: PyTree, part: Batch) -> tuple[PyTree, Metrics]:
    total_grads, total_loss, mutables, rng = carry
    rng, part_rng = jax.random.split(rng)
    part = {name: _constrain_to_batch(value) for name, value in part.items()}
    grads, loss, metrics, mutables = _gradients(loss_fn, trained, mutables, part, part_rng)
    return (jax.tree.map(jnp.add, total_grads, grads), total_loss + loss, mutables, rng), metrics

  whole = with_divisors(batch, pad_id)
  parts = {n: value.reshape(num_microbatches, -1, *value.shape[1:]) for n, value in whole.items()}
  zeros = jax.tree.map(jnp.zeros_like, trained)
  carry = (zeros, jnp.zeros(()), state.flax_mutables, dropout_rng)
  (grads, loss, mutables, _), stacked = jax.lax.scan(
    add_microbatch, carry, parts, unroll=microbatches_at_once
  )
  # A metric without arrays, such as a duration that is set after the step, cannot be reduced.
  metrics = {n: x.reduce() if jax.tree.leaves(x) else x for n, x in stacked.items()}
  return grads, loss, metrics_lib.set_step_metrics_num_steps(metrics, 1), mutables


def _loss_of_part(loss_fn: LossFn, params: PyTree) -> LossFn:
  """Returns the loss as a function of a part of the parameters; the others are constants."""
  return lambda part, *arguments: loss_fn(replace_part(params, part), *arguments)


def _gradients(
  loss_fn: LossFn, params: PyTree, mutables: PyTree, batch: Batch, dropout_rng: jax.Array
) -> tuple[PyTree, Float[Array, ""], Metrics, PyTree]:
  if not mutables:
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, metrics), grads = grad_fn(params, batch, dropout_rng)
    return grads, loss, metrics, mutables

  def loss_of(params: PyTree, overwritten: PyTree) -> tuple[jax.Array, Any]:
    return loss_fn(params, batch, dropout_rng, {**mutables, **overwritten})

  # The gradient of this collection (fp8's scales) is its next value: it is replaced, not summed.
  overwritten = {name: mutables[name] for name in (OVERWRITE_WITH_GRADIENT,) if name in mutables}
  grad_fn = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
  (loss, (metrics, updated)), (grads, overwritten) = grad_fn(params, overwritten)
  new_mutables = {**updated, **overwritten}
  is_frozen = isinstance(mutables, FrozenDict)
  return grads, loss, metrics, freeze(new_mutables) if is_frozen else new_mutables


def eval_step(state: State, batch: Batch, *, eval_fn: LossFn) -> Metrics:
  """Returns the metrics of a batch without dropout.

  Args:
    state: the state.
    batch: arrays whose first dimension is the batch.
    eval_fn: eval_fn(params, batch) → (loss, metrics). If the state has mutable collections, they are
      its third argument.
  """
  mutables = (state.flax_mutables,) if state.flax_mutables else ()
  return dict(eval_fn(params_to_evaluate(state), batch, *mutables)[1])


@struct.dataclass
class FirstNonFinite(clu_metrics.Metric):
  """The first of several steps whose loss or gradients had NaN or infinite values.

  Attributes:
    step: the number of steps completed before that step.
    bad: [1 + number of parameters], whether the loss and each parameter's gradient were not finite.
  """

  step: Int[Array, ""]
  bad: Bool[Array, " N"]

  @classmethod
  def of(cls, step: jax.Array, loss: jax.Array, squares: Sequence[jax.Array]) -> FirstNonFinite:
    """Returns the record of one step.

    Args:
      step: the number of steps completed before.
      loss: the loss.
      squares: the sum of squares of each gradient, which is finite unless a value is not, or the norm overflows.
    """
    return cls(step=step, bad=~jnp.isfinite(jnp.stack([loss.astype(jnp.float32), *squares])))

  def merge(self, other: FirstNonFinite) -> FirstNonFinite:
    """Returns the earlier record that is bad, or else the later record."""
    is_bad = jnp.any(self.bad)
    return FirstNonFinite(
      step=jnp.where(is_bad, self.step, other.step), bad=jnp.where(is_bad, self.bad, other.bad)
    )

  def compute(self) -> jax.Array:
    """Returns whether any value was not finite."""
    return jnp.any(self.bad)
