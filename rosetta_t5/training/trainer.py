"""The trainer holds the train state, runs steps over batches, and passes their metrics on."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from clu import metrics as clu_metrics
from jax.sharding import PartitionSpec

from rosetta_t5.argument_types import NonNegative
from rosetta_t5.parallel.data_layout import check_row_lengths
from rosetta_t5.parallel.partitioner import BasePartitioner
from rosetta_t5.telemetry.metrics_manager import MakeWriter, MetricsManager, now
from rosetta_t5.training.step import FIRST_NONFINITE, Batch, Metrics, PyTree, eval_step, train_step
from rosetta_t5.training.train_state import TrainState

_REPLICATED = PartitionSpec()


def merge_metrics(a: Metrics, b: Metrics) -> Metrics:
  """Merges the metrics of two sets of batches, name by name."""
  return {name: metric.merge(b[name]) for name, metric in a.items()}


class BaseTrainer(contextlib.AbstractContextManager):
  """Runs a subclass's train and eval steps over batches (T5X: BaseTrainer).

  A subclass defines two properties: `_partitioned_train_step`, a function
  (train_state, batch) → (train_state, metrics), and `_partitioned_eval_step`, a function
  (train_state, batch) → metrics. Everything else has a default.

  Attributes:
    train_state: the state after the last step.
    train_metrics_manager: writes the metrics of `train`.
    eval_metrics_managers: writes the metrics of `eval`, one manager per evaluation task.
    first_nonfinite: a `FirstNonFinite`, the first step of the last call of `train` whose loss or gradients were not
      finite; None if the train step does not return such a record.
    stop_training: a subclass sets it to True to end the run when `train` returns.
  """

  _num_microbatches: int | None = None  # T5X's name, which trainers written for T5X set

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
      train_state: the state to start from, on the devices.
      partitioner: compiles the steps for the mesh.
      eval_names: the names of the evaluation tasks.
      summary_dir: the folder for metrics; None writes no metrics.
      train_state_axes: the train state with a PartitionSpec in place of each array.
      rng: the run's random key.
      extra_writers: metric writers besides TensorBoard; see `MetricsManager`.
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
    self.first_nonfinite: Any = None
    self.stop_training = False
    self._created = now()
    self._merge = jax.jit(merge_metrics)

  def __exit__(self, *exc_info: object) -> None:
    self.close()

  @property
  def num_microbatches(self) -> int:
    """The number of parts that a batch is split into."""
    return self._num_microbatches or 1

  def _get_step_rng(self, step: jax.Array | int) -> jax.Array:
    """Returns the random key of the step that follows `step` completed steps."""
    return jax.random.fold_in(self._base_rng, step)

  @property
  @abc.abstractmethod
  def _partitioned_train_step(self) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The train step on the mesh."""

  @property
  @abc.abstractmethod
  def _partitioned_eval_step(self) -> Callable[[TrainState, Batch], Metrics]:
    """The eval step on the mesh."""

  def train(
    self, batch_iter: Iterator[Batch], num_steps: int, start_step: int | None = None
  ) -> Any:
    """Runs `num_steps` steps, or fewer if `batch_iter` ends before.

    Args:
      batch_iter: sharded batches, one per step. No batch is drawn after the last step.
      num_steps: the number of steps.
      start_step: the number of steps completed before; None reads it from the train state.

    Returns:
      A future of the metrics' values by name, averaged over these steps.
    """
    start_step = int(self.train_state.step) if start_step is None else start_step
    step_fn = self._compiled_train_step or self._partitioned_train_step
    manager = self.train_metrics_manager
    manager.start_duration_timer(block_on=self.train_state.step)
    step = start_step
    metrics: Metrics = {}
    while step < start_step + num_steps:
      with jax.profiler.StepTraceAnnotation("train", step_num=step):
        if (batch := next(batch_iter, None)) is None:
          break
        self.train_state, new_metrics = step_fn(self.train_state, batch)
      metrics = self._merge(metrics, new_metrics) if metrics else new_metrics
      step += 1
    metrics = dict(metrics)
    self.first_nonfinite = metrics.pop(FIRST_NONFINITE, None)
    if metrics:
      uptime = np.float32(now() - self._created)
      metrics["timing/uptime"] = clu_metrics.LastValue(total=uptime, count=np.float32(1))
    return manager.write_metrics_summary(metrics, step, step - start_step)

  def eval(self, batch_iters: Mapping[str, Iterator[Batch]]) -> dict[str, Any]:
    """Runs the eval step over all batches of each task.

    Args:
      batch_iters: the batches of each task, by task name.

    Returns:
      The metrics' values of each task by name (clu values, as in T5X).

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
    metrics: Metrics = {}
    num_batches = 0
    for batch in batches:
      new_metrics = step_fn(self.train_state, batch)
      metrics = self._merge(metrics, new_metrics) if metrics else new_metrics
      num_batches += 1
    if num_batches == 0:
      raise ValueError(
        f"the evaluation of task {name!r} has no batches: its split has fewer examples than one "
        "batch. Lower the evaluation batch size (train_eval/utils.DatasetConfig.batch_size)"
      )
    return manager.write_metrics_summary(metrics, step, num_batches)

  def compile_train(self, batch: PyTree) -> None:
    """Compiles the train step for batches of this shape (arrays or ShapeDtypeStructs).

    Raises:
      ValueError: the mesh cannot split the rows.
    """
    lengths = {name: x.shape[1] for name, x in batch.items() if len(x.shape) > 1}
    check_row_lengths(lengths, self._partitioner.mesh.shape)
    with self._timed_compilation(self.train_metrics_manager):
      self._compiled_train_step = self._partitioner.compile(
        self._partitioned_train_step, self.train_state, batch
      )

  def compile_eval(self, batches: Mapping[str, PyTree]) -> None:
    """Compiles the eval step for each task's batches; equal shapes share one program."""
    by_shape: dict[Any, Callable[..., Any]] = {}
    step = self._partitioned_eval_step
    for name, batch in batches.items():
      key = tuple((feature, x.shape, str(x.dtype)) for feature, x in sorted(batch.items()))
      with self._timed_compilation(self.eval_metrics_managers[name]):
        if key not in by_shape:
          by_shape[key] = self._partitioner.compile(step, self.train_state, batch)
      self._compiled_eval_steps[name] = by_shape[key]

  @contextlib.contextmanager
  def _timed_compilation(self, manager: MetricsManager) -> Iterator[None]:
    started = now()
    yield
    seconds = now() - started
    manager.write_scalar("timing/compilation_seconds", seconds, int(self.train_state.step))

  def close(self) -> None:
    """Waits until all metrics are written."""
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
    num_microbatches: NonNegative | None,
    weight_metrics_computer: Any = None,
    extra_writers: Sequence[MakeWriter] = (),
    overlapping_parts: int = 1,
  ):
    """Builds a trainer; `BaseTrainer` describes the arguments that are not listed here.

    Args:
      model: the model.
      train_state: the state to start from.
      partitioner: compiles the steps for the mesh.
      eval_names: the names of the evaluation tasks.
      summary_dir: the folder for metrics.
      train_state_axes: the train state with a PartitionSpec in place of each array.
      rng: the run's random key.
      learning_rate_fn: the schedule, step → learning rate.
      num_microbatches: the number of parts that a batch is split into; None or 1 for no split.
      weight_metrics_computer: an object whose `compute_metrics(gradients, old_train_state,
        new_train_state)` returns additional metrics.
      extra_writers: metric writers besides TensorBoard, such as `[@trackers.WandbWriter]`.
      overlapping_parts: into how many parts each microbatch is split further. All of them are computed at
        once, so that collectives of one overlap with matmuls of another.
    """
    self._learning_rate_fn = learning_rate_fn
    self._num_microbatches = (num_microbatches or 1) * overlapping_parts
    self._overlapping_parts = overlapping_parts
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
      microbatches_at_once=self._overlapping_parts,
      weight_metrics=computer.compute_metrics if computer is not None else None,
      pad_id=self._model.pad_id,
    )
    axes, batch_axes = self._train_state_axes, self._partitioner.data_partition_spec
    partitioned = self._partitioner.partition(
      step, (axes, batch_axes, _REPLICATED), (axes, _REPLICATED), donate_argnums=(0,)
    )
    return partitioned.bind_last(jnp.asarray(self._base_rng))

  @functools.cached_property
  def _partitioned_eval_step(self) -> Callable[[TrainState, Batch], Metrics]:
    return self._partitioner.partition(
      functools.partial(eval_step, eval_fn=self._model.eval_fn),
      in_axis_resources=(self._train_state_axes, self._partitioner.data_partition_spec),
      out_axis_resources=_REPLICATED,
    )


def lower_trainer_step(
  trainer_cls: Callable[..., BaseTrainer] | None, batch: PyTree, is_training: bool, **arguments: Any
) -> Any:
  """Returns a trainer's step lowered for batches of a shape; see `jax.jit(f).lower`.

  Args:
    trainer_cls: builds the run's trainer, such as `Trainer` with a schedule bound; None for a
      `Trainer` with a constant learning rate.
    batch: the arrays or shapes of a batch, by feature.
    is_training: whether to lower the train step or the eval step.
    **arguments: the other arguments of the trainer; the state may be one of shapes.
  """
  if trainer_cls is None:
    arguments |= {"learning_rate_fn": lambda _: jnp.float32(1e-3), "num_microbatches": None}
  trainer = (trainer_cls or Trainer)(eval_names=[], summary_dir=None, **arguments)
  step: Any = trainer._partitioned_train_step if is_training else trainer._partitioned_eval_step
  return step.lower(trainer.train_state, batch)
