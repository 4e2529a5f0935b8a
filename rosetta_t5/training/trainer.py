"""The trainer: holds the train state, runs steps over batches, and hands metrics to be written."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rosetta_t5.parallel.partitioner import BasePartitioner
from rosetta_t5.telemetry.metrics_manager import MakeWriter, MetricsManager
from rosetta_t5.training.step import (
  FIRST_NONFINITE,
  Batch,
  FirstNonFinite,
  Metrics,
  PyTree,
  eval_step,
  train_step,
)
from rosetta_t5.training.train_state import TrainState

_REPLICATED = PartitionSpec()


def merge_metrics(a: Metrics, b: Metrics) -> Metrics:
  """Returns the metrics of two sets of batches merged, name by name."""
  return {name: metric.merge(b[name]) for name, metric in a.items()}


class BaseTrainer(abc.ABC):
  """Runs a subclass's train and eval steps over batches (T5X: BaseTrainer).

  A subclass gives `_partitioned_train_step(train_state, batch) → (train_state, metrics)` and
  `_partitioned_eval_step(train_state, batch) → metrics`, as properties.

  Attributes:
    stop_training: a subclass sets it to end the run after the stretch of steps that it is in.
    train_state: the state after the last step.
    train_metrics_manager: writes what `train` measures.
    eval_metrics_managers: for each evaluation task, writes what `eval` measures.
    should_stop: asked after every step of `train`, with the updates made so far; None for never.
    stopped_at: the updates made when it said so; None before.
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
    extra_writers: Sequence[MakeWriter] = (),
  ):
    """Builds a trainer.

    Args:
      model: the model.
      train_state: the state to start from, on devices.
      partitioner: how functions are run on them.
      eval_names: the evaluation tasks.
      summary_dir: where metrics go; None for nowhere.
      train_state_axes: the state with PartitionSpecs in place of arrays.
      rng: the run's key.
      extra_writers: where metrics go besides TensorBoard's files; see `MetricsManager`.
    """
    self._model = model
    self.train_state = train_state
    self._partitioner = partitioner
    self._train_state_axes = train_state_axes
    self._base_rng = rng
    self._compiled_train_step: Callable[..., Any] | None = None
    self._compiled_eval_steps: dict[str, Callable[..., Any]] = {}
    self.train_metrics_manager = MetricsManager("train", summary_dir, extra_writers)
    self.eval_metrics_managers = {
      name: MetricsManager(f"training_eval/{name}", summary_dir, extra_writers)
      for name in eval_names
    }
    self.first_nonfinite: FirstNonFinite | None = None
    self.should_stop: Callable[[int], bool] | None = None
    self.stopped_at: int | None = None
    self.stop_training = False

  def __enter__(self) -> BaseTrainer:
    """A trainer is a context that closes it."""
    return self

  def __exit__(self, *exc_info: object) -> None:
    self.close()

  def _get_step_rng(self, step: jax.Array | int) -> jax.Array:
    """The key of the step after `step` updates."""
    return jax.random.fold_in(self._base_rng, step)

  @property
  @abc.abstractmethod
  def _partitioned_train_step(self) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The train step on the mesh."""

  @property
  @abc.abstractmethod
  def _partitioned_eval_step(self) -> Callable[[TrainState, Batch], Metrics]:
    """The eval step on the mesh."""

  @functools.cached_property
  def _merge(self) -> Callable[[Metrics, Metrics], Metrics]:
    return jax.jit(merge_metrics, donate_argnums=(0,))

  def train(
    self, batch_iter: Iterator[Batch], num_steps: int, start_step: int | None = None
  ) -> Any:
    """Runs `num_steps` steps, fewer if `should_stop` says so.

    Args:
      batch_iter: sharded batches.
      num_steps: how many of them to train on.
      start_step: updates made before; read from the train state if it is not given.

    Returns:
      A future of the metrics' values, by name, means over these steps.
    """
    start_step = int(self.train_state.step) if start_step is None else start_step
    step_fn = self._compiled_train_step or self._partitioned_train_step
    manager = self.train_metrics_manager
    manager.start_duration_timer(block_on=self.train_state.step)
    metrics: Metrics | None = None
    for step in range(start_step, start_step + num_steps):
      with jax.profiler.StepTraceAnnotation("train", step_num=step):
        self.train_state, new_metrics = step_fn(self.train_state, next(batch_iter))
      metrics = new_metrics if metrics is None else self._merge(metrics, new_metrics)
      if self.should_stop is not None and self.should_stop(step + 1):
        self.stopped_at, num_steps = step + 1, step + 1 - start_step
        break
    metrics = dict(metrics or {})
    self.first_nonfinite = metrics.pop(FIRST_NONFINITE, None)
    return manager.write_metrics_summary(metrics, start_step + num_steps, num_steps)

  def eval(self, batch_iters: Mapping[str, Iterator[Batch]]) -> dict[str, Any]:
    """Runs the eval step over the batches of each task.

    Args:
      batch_iters: for each task, its batches, as many as are to be seen.

    Returns:
      For each task the metrics' values, by name (clu values, as T5X gives them).

    Raises:
      ValueError: a task has no batches.
    """
    step = int(self.train_state.step)
    written = {name: self._eval_task(name, batches, step) for name, batches in batch_iters.items()}
    return {name: future.result() for name, future in written.items()}

  def _eval_task(self, name: str, batches: Iterator[Batch], step: int) -> Any:
    step_fn = self._compiled_eval_steps.get(name) or self._partitioned_eval_step
    manager = self.eval_metrics_managers[name]
    manager.start_duration_timer(block_on=self.train_state.step)
    metrics: Metrics | None = None
    num_batches = 0
    for batch in batches:
      new_metrics = step_fn(self.train_state, batch)
      metrics = new_metrics if metrics is None else self._merge(metrics, new_metrics)
      num_batches += 1
    if metrics is None:
      raise ValueError(
        f"the evaluation of task {name!r} has no batch: its split has fewer examples than one "
        "batch; lower the eval batch size (train_eval/utils.DatasetConfig.batch_size)"
      )
    return manager.write_metrics_summary(metrics, step, num_batches)

  def compile_train(self, batch: PyTree) -> None:
    """Compiles the train step for batches of this shape (arrays or ShapeDtypeStructs)."""
    self._compiled_train_step = self._partitioner.compile(
      self._partitioned_train_step, self.train_state, batch
    )

  def compile_eval(self, batches: Mapping[str, PyTree]) -> None:
    """Compiles the eval step for each task's batches; equal shapes share one program."""
    by_shape: dict[Any, Callable[..., Any]] = {}
    for name, batch in batches.items():
      key = tuple((feature, x.shape, str(x.dtype)) for feature, x in sorted(batch.items()))
      if key not in by_shape:
        by_shape[key] = self._partitioner.compile(
          self._partitioned_eval_step, self.train_state, batch
        )
      self._compiled_eval_steps[name] = by_shape[key]

  def close(self) -> None:
    """Writes out what is still to be written."""
    for manager in (self.train_metrics_manager, *self.eval_metrics_managers.values()):
      manager.close()


class Trainer(BaseTrainer):
  """Trains with `training.step.train_step` (T5X: Trainer)."""

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
    num_microbatches: int | None,
    weight_metrics_computer: Any = None,
    extra_writers: Sequence[MakeWriter] = (),
  ):
    """Builds a trainer; see `BaseTrainer` for the arguments not named here.

    Args:
      model: the model.
      train_state: the state to start from.
      partitioner: how functions are run on devices.
      eval_names: the evaluation tasks.
      summary_dir: where metrics go.
      train_state_axes: the state with PartitionSpecs in place of arrays.
      rng: the run's key.
      learning_rate_fn: the schedule, step → learning rate.
      num_microbatches: parts a batch is worked through in; None or 1 for the whole at once.
      weight_metrics_computer: an object whose `compute_metrics(gradients, old_train_state,
        new_train_state)` returns more metrics.
      extra_writers: where metrics go besides TensorBoard's files, `[@trackers.WandbWriter]` say.
    """
    self._learning_rate_fn = learning_rate_fn
    self._num_microbatches = num_microbatches
    self._weight_metrics_computer = weight_metrics_computer
    super().__init__(
      model, train_state, partitioner, eval_names, summary_dir, train_state_axes, rng, extra_writers
    )

  @functools.cached_property
  def _partitioned_train_step(self) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    computer = self._weight_metrics_computer
    step = functools.partial(
      train_step,
      loss_fn=self._model.loss_fn,
      learning_rate_fn=self._learning_rate_fn,
      num_microbatches=self._num_microbatches,
      weight_metrics=computer.compute_metrics if computer is not None else None,
    )
    return self._partitioner.partition(
      step,
      in_axis_resources=(
        self._train_state_axes,
        self._partitioner.data_partition_spec,
        _REPLICATED,
      ),
      out_axis_resources=(self._train_state_axes, _REPLICATED),
      donate_argnums=(0,),
    ).bind_last(jnp.asarray(self._base_rng))

  @functools.cached_property
  def _partitioned_eval_step(self) -> Callable[[TrainState, Batch], Metrics]:
    return self._partitioner.partition(
      functools.partial(eval_step, eval_fn=self._model.eval_fn),
      in_axis_resources=(self._train_state_axes, self._partitioner.data_partition_spec),
      out_axis_resources=_REPLICATED,
    )
