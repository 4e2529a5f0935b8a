"""T5X's `trainer`: trainers, their functions, actions, and the metrics manager."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rosetta_t5.telemetry.metrics import AveragePerStep
from rosetta_t5.telemetry.metrics_manager import MetricsManager
from rosetta_t5.telemetry.metrics_manager import now as _time
from rosetta_t5.training import step, trainer
from rosetta_t5.training.actions import *
from rosetta_t5.training.step import Batch, Metrics, PyTree
from rosetta_t5.training.train_state import TrainState
from rosetta_t5.training.trainer import BaseTrainer, Trainer, merge_metrics
from t5x.utils import flatten_dict_string_keys

_OVER_DATA = PartitionSpec("data")


class PreemptionError(Exception):
  """The run is about to be preempted (T5X)."""


class WeightMetricsComputer:
  """Computes metrics of each parameter's weights, gradient and update (T5X)."""

  def compute_metrics(
    self, gradients: PyTree, old_train_state: TrainState, new_train_state: TrainState
  ) -> Metrics:
    """Returns the metrics of one step.

    They are `weight_rms`, `weight_max`, `weight_gradient_rms`, `weight_update_rms` and
    `weight_update_divided_by_weight_rms`, each followed by `/` and the parameter's name, and
    `weight_gradient_norm` over all gradients.
    """
    old, new = old_train_state.params, new_train_state.params
    update = jax.tree.map(jnp.subtract, new, old)
    squares = [jnp.vdot(grad, grad) for grad in jax.tree.leaves(gradients)]
    return {
      **_metric_per_array("weight_rms", _rms, new),
      **_metric_per_array("weight_gradient_rms", _rms, gradients),
      "weight_gradient_norm": AveragePerStep.from_model_output(jnp.sqrt(sum(squares))),
      **_metric_per_array("weight_update_rms", _rms, update),
      **_metric_per_array(
        "weight_update_divided_by_weight_rms", _rms, jax.tree.map(jnp.divide, update, old)
      ),
      **_metric_per_array("weight_max", lambda x: jnp.max(jnp.abs(x)), new),
    }


def _metric_per_array(name: str, measure: Any, tree: PyTree) -> Metrics:
  flat = flatten_dict_string_keys(tree)
  return {f"{name}/{k}": AveragePerStep.from_model_output(measure(x)) for k, x in flat.items()}


def _rms(x: jax.Array) -> jax.Array:
  return jnp.sqrt(jnp.mean(jnp.square(x)))


def accumulate_grads_microbatched(
  model: Any,
  train_state: TrainState,
  batch: Batch,
  dropout_rng: jax.Array,
  num_microbatches: int | None,
  data_partition_spec: PartitionSpec = _OVER_DATA,
) -> tuple[PyTree, Metrics, PyTree | None]:
  """Returns the gradients of a batch, its metrics, and new mutable collections or None (T5X).

  Args:
    model: the model, whose `loss_fn` is differentiated.
    train_state: the state with parameters and mutable collections.
    batch: arrays whose first dimension is the batch.
    dropout_rng: the random key of this step.
    num_microbatches: the number of parts that the batch is split into; None for no split.
    data_partition_spec: ignored; microbatches are sharded like the logical axis `batch`.
  """
  grads, _, metrics, mutables = step.accumulate_gradients(
    model.loss_fn, train_state, batch, dropout_rng, num_microbatches, model.pad_id
  )
  return grads, metrics, mutables or None


def apply_grads(
  train_state: TrainState,
  grad_accum: PyTree,
  metrics: Metrics,
  learning_rate: jax.Array,
  weight_metrics_computer: WeightMetricsComputer | None,
  other_state_variables: Mapping[str, Any] | None = None,
) -> tuple[TrainState, Metrics]:
  """Returns the state after one optimizer step, and the metrics with those of the step (T5X).

  Args:
    train_state: the state before the step.
    grad_accum: the gradients.
    metrics: the metrics of the batch.
    learning_rate: the learning rate of this step.
    weight_metrics_computer: computes additional metrics; None for none.
    other_state_variables: other arguments of `train_state.apply_gradient`, such as `flax_mutables`.
  """
  new_state = train_state.apply_gradient(
    grad_accum, learning_rate=learning_rate, **(other_state_variables or {})
  )
  metrics = {**metrics, **step.learning_rate_metrics(jnp.asarray(learning_rate))}
  if weight_metrics_computer is not None:
    metrics |= weight_metrics_computer.compute_metrics(grad_accum, train_state, new_state)
  return new_state, metrics


def eval_step(model: Any, train_state: TrainState, batch: Batch) -> Metrics:
  """Returns the metrics of a batch, without dropout (T5X)."""
  return step.eval_step(train_state, batch, eval_fn=model.eval_fn)


def train_with_lr(
  train_state: TrainState,
  batch: Batch,
  learning_rate: jax.Array,
  dropout_rng: jax.Array,
  model: Any,
  num_microbatches: int | None,
  weight_metrics_computer: WeightMetricsComputer | None = None,
  data_partition_spec: PartitionSpec = _OVER_DATA,
) -> tuple[TrainState, Metrics]:
  """Returns the state after one step on a batch, and its metrics (T5X); see the functions above."""
  grads, metrics, mutables = accumulate_grads_microbatched(
    model, train_state, batch, dropout_rng, num_microbatches, data_partition_spec
  )
  return apply_grads(
    train_state,
    grads,
    metrics,
    learning_rate,
    weight_metrics_computer,
    other_state_variables={"flax_mutables": mutables} if mutables else None,
  )


_OWN_FUNCTIONS = (accumulate_grads_microbatched, apply_grads, train_with_lr, eval_step)


def on_name_set() -> None:
  """Called after each assignment to a name of this module.

  `Trainer` uses this module's functions if a user has replaced one of them, else rosetta_t5's.
  """
  is_ours = all(globals()[function.__name__] is function for function in _OWN_FUNCTIONS)
  trainer.train_step = step.train_step if is_ours else _train_step_of_functions
  trainer.eval_step = step.eval_step if is_ours else _eval_step_of_functions


def _train_step_of_functions(
  state: Any, batch: Batch, rng: jax.Array, **settings: Any
) -> tuple[Any, Metrics]:
  """Has the arguments of `step.train_step`, all of which `Trainer` passes."""
  if (at_once := settings["microbatches_at_once"]) > 1:
    raise ValueError(
      "trainer.Trainer.overlapping_parts must be 1 where functions of t5x.trainer are replaced, got "
      f"{at_once}: T5X's functions compute one microbatch after the other"
    )
  return train_with_lr(
    state,
    batch,
    settings["learning_rate_fn"](state.step),
    jax.random.fold_in(rng, state.step),
    getattr(settings["loss_fn"], "__self__", None),  # the model, whose bound method this is
    settings["num_microbatches"],
    getattr(settings["weight_metrics"], "__self__", None),
  )


def _eval_step_of_functions(state: Any, batch: Batch, *, eval_fn: Any) -> Metrics:
  return eval_step(getattr(eval_fn, "__self__", None), state, batch)
