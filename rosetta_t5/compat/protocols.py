"""The signatures of the functions and classes that T5X users write themselves (T5X's protocols)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from rosetta_t5.data.dataset_config import DatasetConfig

PyTree = Any
Batch = Mapping[str, jax.Array]
Metrics = Mapping[str, Any]


class SaveStateTransformationFn(Protocol):
  """Changes a state dict before it is saved."""

  def __call__(self, state_dict: PyTree, parameter_infos: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the changed state dict and the changed tree of `ParameterInfo`."""


class RestoreStateTransformationFn(Protocol):
  """Changes a restored state dict into what the model expects."""

  def __call__(
    self, state_dict: PyTree, target_state_dict: PyTree, *, is_resuming: bool = False
  ) -> PyTree:
    """Returns the changed state dict; `is_resuming` is true for the run's own checkpoint."""


class CheckpointerConstructor(Protocol):
  """Builds a checkpointer for T5X's older layout."""

  def __call__(
    self,
    train_state: Any,
    partitioner: Any,
    checkpoints_dir: str,
    dataset_iterator: Any = None,
    *,
    keep: int | None = None,
    save_dtype: Any = np.float32,
    restore_dtype: Any = None,
    keep_dataset_checkpoints: int | None = None,
  ) -> Any:
    """Returns a checkpointer."""


class CheckpointManagerConstructor(Protocol):
  """Builds a checkpoint manager."""

  def __call__(
    self,
    directory: str,
    train_state: Any,
    partitioner: Any,
    dataset_iterator: Any = None,
    save_dtype: Any = None,
    restore_dtype: Any = None,
    keep: int | None = None,
    period: int | None = None,
    force_keep_period: int | None = None,
    checkpoint_steps: Sequence[int] | None = None,
  ) -> Any:
    """Returns a manager."""


class GetDatasetCallable(Protocol):
  """Builds the training data."""

  def __call__(
    self,
    cfg: DatasetConfig,
    shard_id: int,
    num_shards: int,
    feature_converter_cls: Callable[..., Any],
    num_epochs: int | None = None,
    continue_from_last_checkpoint: bool = True,
  ) -> Any:
    """Returns a tf.data.Dataset, or a clu DatasetIterator, of this shard's batches."""


class GetEvalDatasetCallable(Protocol):
  """Builds the data on which the evaluation loss is computed."""

  def __call__(
    self,
    cfg: DatasetConfig,
    shard_id: int,
    num_shards: int,
    eval_steps: int,
    feature_converter_cls: Callable[..., Any],
  ) -> Mapping[str, Any]:
    """Returns a dataset for each task."""


class ArrayMapFuture(Protocol):
  """A future of arrays by name."""

  def result(self) -> Mapping[str, jax.Array]:
    """Waits for the arrays and returns them."""


class MetricValueMapFuture(Protocol):
  """A future of metric values by name."""

  def result(self) -> Mapping[str, Any]:
    """Waits for the values and returns them."""


class TimeFuture(Protocol):
  """A future of a time."""

  def result(self) -> float:
    """Waits for the time and returns it."""


class LearningRateCallable(Protocol):
  """A learning rate schedule."""

  def __call__(self, step: jax.Array) -> jax.Array:
    """Returns the learning rate of step number `step`, counted from 0."""


class SummarizeMetricsCallable(Protocol):
  """Computes values from metrics that were accumulated over several steps."""

  def __call__(self, metrics: Metrics, duration: float, num_steps: int) -> Mapping[str, jax.Array]:
    """Returns values by name; `duration` is in seconds."""


class PartitionedTrainCallable(Protocol):
  """A training step on the mesh."""

  def __call__(self, train_state: Any, batch: Batch) -> tuple[Any, Metrics]:
    """Returns the new state and the batch's metrics."""


class PartitionedEvalCallable(Protocol):
  """An evaluation step on the mesh."""

  def __call__(self, train_state: Any, batch: Batch) -> Metrics:
    """Returns the batch's metrics."""


class BaseTrainerConstructor(Protocol):
  """Builds a trainer."""

  def __call__(
    self,
    model: Any,
    train_state: Any,
    partitioner: Any,
    eval_names: Sequence[str],
    summary_dir: str | None,
    train_state_axes: Any,
    rng: jax.Array,
  ) -> Any:
    """Returns a `BaseTrainer`."""


class InitFnCallable(Protocol):
  """Initializes a module's variables."""

  def __call__(
    self,
    rng: jax.Array,
    input_shapes: Mapping[str, tuple[int, ...]],
    input_types: Mapping[str, Any] | None,
  ) -> Mapping[str, PyTree]:
    """Returns the variables by collection."""


class InferStepWithRngCallable(Protocol):
  """Predicts for a batch, with a random key."""

  def __call__(self, params: PyTree, batch: Batch, rng: jax.Array | None = None) -> PyTree:
    """Returns predictions or scores."""


class InferStepWithoutRngCallable(Protocol):
  """Predicts or scores for a batch."""

  def __call__(self, params: PyTree, batch: Batch) -> PyTree:
    """Returns predictions or scores."""


class InferFnCallable(Protocol):
  """Predicts or scores for a whole dataset; `get_infer_fn` builds one."""

  def __call__(self, ds: Any, train_state: Any, rng: jax.Array | None = None) -> Any:
    """Returns (index, output) pairs; with auxiliary values, (those pairs, the values)."""


class EvaluatorConstructor(Protocol):
  """Builds an evaluator of predictions, such as `seqio.Evaluator`."""

  def __call__(
    self,
    mixture_or_task_name: str,
    feature_converter: Any,
    eval_split: str,
    use_cached: bool,
    seed: int | None,
    sequence_length: Mapping[str, int] | None,
    log_dir: str | None,
    use_memory_cache: bool,
  ) -> Any:
    """Returns an evaluator of one task or mixture."""
