"""The signatures that users' own functions and trainers have (T5X's protocols)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

PyTree = Any
Batch = Mapping[str, jax.Array]
Metrics = Mapping[str, Any]


class ArrayMapFuture(Protocol):
  """Arrays by name, later."""

  def result(self) -> Mapping[str, jax.Array]:
    """Waits for them."""


class MetricValueMapFuture(Protocol):
  """Metrics' values by name, later."""

  def result(self) -> Mapping[str, Any]:
    """Waits for them."""


class TimeFuture(Protocol):
  """A time, later."""

  def result(self) -> float:
    """Waits for it."""


class LearningRateCallable(Protocol):
  """A schedule."""

  def __call__(self, step: jax.Array) -> jax.Array:
    """Returns the learning rate of the update after `step` updates."""


class SummarizeMetricsCallable(Protocol):
  """Makes values of metrics gathered over several steps."""

  def __call__(self, metrics: Metrics, duration: float, num_steps: int) -> Mapping[str, jax.Array]:
    """Returns values by name; `duration` is in seconds."""


class PartitionedTrainCallable(Protocol):
  """A train step on the mesh."""

  def __call__(self, train_state: Any, batch: Batch) -> tuple[Any, Metrics]:
    """Returns the new state and the batch's metrics."""


class PartitionedEvalCallable(Protocol):
  """An eval step on the mesh."""

  def __call__(self, train_state: Any, batch: Batch) -> Metrics:
    """Returns the batch's metrics."""


class BaseTrainerConstructor(Protocol):
  """Makes a trainer."""

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
  """Makes a module's initial variables."""

  def __call__(
    self,
    rng: jax.Array,
    input_shapes: Mapping[str, tuple[int, ...]],
    input_types: Mapping[str, Any] | None,
  ) -> Mapping[str, PyTree]:
    """Returns them by collection."""
