"""Computes metrics and writes them to TensorBoard, in the background, on the first process only."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from clu import values as clu_values

from rosetta_t5.telemetry.metrics import set_step_metrics_num_steps, set_time_metrics_duration

PyTree = Any
Values = Mapping[str, clu_values.Value]
MakeWriter = Callable[[str, str], Any]

_log = logging.getLogger(__name__)


class MetricsManager:
  """Turns the metrics of some steps into values and writes them under a name (T5X's class).

  Device work is waited for in one thread and files are written in another, so the training loop
  never waits for either. TensorBoard's writer is made at the first write: it imports TensorFlow.
  """

  def __init__(
    self,
    name: str,
    summary_dir: str | os.PathLike[str] | None = None,
    extra_writers: Sequence[MakeWriter] = (),
  ):
    """Builds a manager.

    Args:
      name: the folder under `summary_dir` ("train", "training_eval/TASK").
      summary_dir: where TensorBoard's files go; None computes values and writes none.
      extra_writers: called with name and folder, each makes a writer of clu's methods, which gets
        all that TensorBoard gets (see `telemetry.trackers`).
    """
    self._name = name
    self._summary_dir = summary_dir if jax.process_index() == 0 else None
    self._writer: Any = None
    folder = self._summary_dir
    # Made here and not at the first write: what is not installed is to be told before training.
    self._extra = [make(name, os.fspath(folder)) for make in extra_writers] if folder else []
    self._clock = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="metrics-clock")
    self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="metrics-writer")
    self._started: concurrent.futures.Future[float] | None = None
    self._last: concurrent.futures.Future[Any] | None = None

  @property
  def summary_writer(self) -> Any:
    """A clu.metric_writers writer of this name; what it is told is written in the background, in order."""
    return _Queue(self)

  def _open_writer(self) -> Any:
    """Returns the writer itself, for the one thread that writes."""
    if self._writer is None:
      own = _create_writer(self._name, self._summary_dir)
      self._writer = _Writers([own, *self._extra]) if self._extra else own
    return self._writer

  def write_scalar(self, key: str, val: Any, step: int) -> None:
    """Writes one number."""
    self.write_scalars(step, {key: val})

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes numbers (arrays on devices are fetched in the background)."""
    if self._summary_dir is None:
      return
    fetch = {key: _fenced(value) for key, value in scalars.items()}
    self._submit(
      lambda: self._open_writer().write_scalars(
        step, {key: float(np.asarray(value)) for key, value in fetch.items()}
      )
    )

  def start_duration_timer(self, block_on: PyTree = ()) -> None:
    """Starts the clock that the next `write_metrics_summary` reads, once `block_on` is computed."""
    self._started = self._clock.submit(_time_when_ready, jax.tree.map(_fenced, block_on))

  def write_metrics_summary(
    self, metrics: Mapping[str, Any], step: int, num_steps: int
  ) -> concurrent.futures.Future[dict[str, clu_values.Value]]:
    """Computes the values of merged `metrics` and writes them, all in the background.

    Args:
      metrics: clu metrics by name, over `num_steps` steps.
      step: the step they are written at.
      num_steps: what per-step metrics are divided by.

    Returns:
      A future of the values by name.

    Raises:
      Exception: whatever an earlier write failed with.
    """
    step, started = int(step), self._started
    ended = self._clock.submit(_time_when_ready, metrics)

    def compute_and_write() -> dict[str, clu_values.Value]:
      duration = ended.result() - started.result() if started is not None else None
      values = _compute(metrics, duration, num_steps)
      if self._summary_dir is not None:
        _write_values(self._open_writer(), step, values)
      return values

    self._started = None
    return self._submit(compute_and_write)

  def flush(self) -> None:
    """Waits until everything is computed and on disk.

    Raises:
      Exception: whatever a write failed with.
    """
    self._submit(lambda: self._writer.flush() if self._writer is not None else None).result()

  def close(self) -> None:
    """Writes what is still to be written and ends the threads."""
    try:
      self.flush()
    finally:
      self._clock.shutdown()
      self._worker.shutdown()
      if self._writer is not None:
        self._writer.close()

  def _submit(self, task: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    """Queues `task` behind the earlier ones; raises what the last of them failed with."""
    last = self._last
    if last is not None and last.done():
      last.result()
    self._last = self._worker.submit(task)
    return self._last


def as_floats(values: Values) -> dict[str, float]:
  """Returns the plain numbers among metric values."""
  return {
    name: float(np.asarray(value.value))
    for name, value in values.items()
    if isinstance(value, clu_values.Scalar)
  }


def _fenced(leaf: Any) -> Any:
  """Returns a copy of a scalar: the step after may take (donate) the original's memory."""
  return jnp.copy(leaf) if isinstance(leaf, jax.Array) and leaf.size == 1 else leaf


def _time_when_ready(tree: PyTree) -> float:
  try:
    jax.block_until_ready(tree)
  except RuntimeError:
    # Deleted: given to a later step, which means that it had been computed.
    if not any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(tree)):
      raise
  return time.monotonic()


def _compute(
  metrics: Mapping[str, Any], duration: float | None, num_steps: int
) -> dict[str, clu_values.Value]:
  fetched = jax.device_get(dict(metrics))
  if duration is not None:
    fetched = set_time_metrics_duration(fetched, duration)
  fetched = set_step_metrics_num_steps(fetched, num_steps)
  return {name: metric.compute_value() for name, metric in fetched.items()}


def _write_values(writer: Any, step: int, values: Values) -> None:
  scalars = as_floats(values)
  writer.write_scalars(step, scalars)
  others = {name: value for name, value in values.items() if name not in scalars}
  if others:
    from clu import metric_writers

    metric_writers.write_values(writer, step, others)


class _Queue:
  """A writer whose calls wait for their turn in the manager's thread: a clu writer takes one at a time."""

  def __init__(self, manager: MetricsManager):
    self._manager = manager

  def __getattr__(self, name: str) -> Callable[..., None]:
    def call(*args: Any, **kwargs: Any) -> None:
      self._manager._submit(lambda: getattr(self._manager._open_writer(), name)(*args, **kwargs))

    return call


class _Writers:
  """Gives to several writers what it is given."""

  def __init__(self, writers: Sequence[Any]):
    self._writers = writers

  def __getattr__(self, name: str) -> Callable[..., None]:
    methods = [getattr(writer, name) for writer in self._writers]

    def call(*args: Any, **kwargs: Any) -> None:
      for method in methods:
        method(*args, **kwargs)

    return call


class _NoWriter:
  """Drops whatever is written."""

  def __getattr__(self, name: str) -> Callable[..., None]:
    return lambda *args, **kwargs: None


def _create_writer(name: str, summary_dir: str | os.PathLike[str] | None) -> Any:
  if summary_dir is None:
    return _NoWriter()
  try:
    # TensorFlow must not take the accelerator's memory for writing a few numbers.
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
    from clu import metric_writers
  except ImportError as error:
    _log.warning(
      "no TensorBoard files are written for %s: %s (pip install tensorflow tensorboard)",
      name,
      error,
    )
    return _NoWriter()
  return metric_writers.SummaryWriter(os.path.join(os.fspath(summary_dir), name))
