"""Computes metrics and writes them to TensorBoard in the background, on the first process only."""

import collections
import concurrent.futures
import functools
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


def make_tensorboard_writer(name: str, summary_dir: str) -> Any:
  """Returns clu's writer for the folder `summary_dir/name`."""
  import tensorflow as tf
  from clu import metric_writers

  # TensorFlow must not allocate the accelerator's memory to write a few numbers.
  tf.config.set_visible_devices([], "GPU")
  return metric_writers.SummaryWriter(os.path.join(summary_dir, name))


class MetricsManager:
  """Computes the values of metrics and writes them under one name (T5X: MetricsManager).

  One thread waits for the devices and another computes values and writes files, so the training loop
  waits for neither. clu's AsyncWriter is not used: it would import TensorFlow before the first step.

  Attributes:
    summary_dir: the folder of this name's files, on every process; None if none are written.
  """

  def __init__(
    self,
    name: str,
    summary_dir: str | os.PathLike[str] | None = None,
    extra_writers: Sequence[MakeWriter] = (),
  ):
    """Builds a manager.

    Args:
      name: the folder under `summary_dir`, such as "train" or "training_eval/TASK".
      summary_dir: the folder of TensorBoard's files; None computes values and writes none.
      extra_writers: functions (name, summary_dir) → a writer with the methods of clu's MetricWriter;
        each writer gets everything that TensorBoard gets (see `telemetry.trackers`).
    """
    self.summary_dir = None if summary_dir is None else os.path.join(summary_dir, name)
    self._writers: list[_Writer] = []
    if summary_dir is not None and jax.process_index() == 0:
      root = os.fspath(summary_dir)
      # Opened at the first write, in the background, because it imports TensorFlow.
      self._writers.append(_Writer(functools.partial(make_tensorboard_writer, name, root)))
      for make in extra_writers:
        writer = make(name, root)  # now: a missing package is reported before training
        self._writers.append(_Writer(functools.partial(make, name, root), writer))
    self._clock_started: concurrent.futures.Future[float] | None = None
    self._clock_thread = concurrent.futures.ThreadPoolExecutor(1, "metrics-clock")
    self._writer_thread = concurrent.futures.ThreadPoolExecutor(1, "metrics-writer")
    self._pending: collections.deque[concurrent.futures.Future[Any]] = collections.deque()

  @property
  def summary_writer(self) -> Any:
    """A clu MetricWriter whose calls run in the background, in order with the manager's writes."""
    return _AllMethods(functools.partial(self._submit, self._call_writers))

  def write_scalar(self, key: str, val: Any, step: int) -> None:
    """Writes one number."""
    self.write_scalars(step, {key: val})

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes numbers. Arrays on devices are fetched in the background."""
    copies = {key: _copy_if_scalar(value) for key, value in scalars.items()}

    def fetch_and_write() -> None:
      fetched = {key: float(np.asarray(value)) for key, value in copies.items()}
      self._call_writers("write_scalars", step, fetched)

    self._submit(fetch_and_write)

  def start_duration_timer(self, block_on: PyTree = ()) -> None:
    """Starts the clock that the next `write_metrics_summary` reads, once `block_on` is computed."""
    copies = jax.tree.map(_copy_if_scalar, block_on)
    self._clock_started = self._clock_thread.submit(_time_when_ready, copies)

  def write_metrics_summary(
    self, metrics: Mapping[str, Any], step: int, num_steps: int
  ) -> concurrent.futures.Future[dict[str, clu_values.Value]]:
    """Computes the values of merged `metrics` and writes them, all in the background.

    Args:
      metrics: clu metrics by name, merged over `num_steps` steps.
      step: the step that the values are written for.
      num_steps: the divisor of metrics that are averaged per step.

    Returns:
      A future of the values by name.

    Raises:
      Exception: a metric of an earlier call could not be computed.
    """
    started, self._clock_started = self._clock_started, None
    ended = self._clock_thread.submit(_time_when_ready, metrics)

    def compute_and_write() -> dict[str, clu_values.Value]:
      fetched = set_step_metrics_num_steps(jax.device_get(dict(metrics)), num_steps)
      if started:
        fetched = set_time_metrics_duration(fetched, ended.result() - started.result())
      values = {name: metric.compute_value() for name, metric in fetched.items()}
      scalars = as_floats(values)
      self._call_writers("write_scalars", int(step), scalars)
      others = {name: value for name, value in values.items() if name not in scalars}
      if others and self._writers:
        from clu import metric_writers

        metric_writers.write_values(_AllMethods(self._call_writers), int(step), others)
      self._call_writers("flush")
      return values

    return self._submit(compute_and_write)

  def flush(self) -> None:
    """Waits until all values are computed and written to disk.

    Raises:
      Exception: a metric could not be computed.
    """
    self._submit(self._call_writers, "flush")
    while self._pending:
      self._pending.popleft().result()

  def close(self) -> None:
    """Writes the remaining values and ends the threads."""
    try:
      self.flush()
    finally:
      self._clock_thread.shutdown()
      self._writer_thread.shutdown()
      self._call_writers("close")

  def _submit(self, task: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Queues `task` behind the earlier ones, and raises the error of one that has failed."""
    while self._pending and self._pending[0].done():
      self._pending.popleft().result()
    self._pending.append(self._writer_thread.submit(task, *args, **kwargs))
    return self._pending[-1]

  def _call_writers(self, method: str, *args: Any, **kwargs: Any) -> None:
    for writer in self._writers:
      writer.call(method, *args, **kwargs)


class _Writer:
  """A clu MetricWriter that is opened at its first write. An error does not end the run."""

  def __init__(self, make: Callable[[], Any], writer: Any = None):
    self._make, self._writer = make, writer

  def call(self, method: str, *args: Any, **kwargs: Any) -> None:
    """Calls a method of the writer; after an error, the next write opens it again."""
    try:
      if self._writer is None and method.startswith("write_"):
        self._writer = self._make()
      if self._writer is not None:
        getattr(self._writer, method)(*args, **kwargs)
    except Exception as error:
      _log.warning("metrics cannot be written: %s", error)
      self._writer = None


class _AllMethods:
  """Has every method of a clu MetricWriter, and passes the calls on with the method's name first."""

  def __init__(self, call_method: Callable[..., Any]):
    self._call_method = call_method

  def __getattr__(self, name: str) -> Callable[..., Any]:
    return functools.partial(self._call_method, name)


def as_floats(values: Values) -> dict[str, float]:
  """Returns the scalars among clu values as floats."""
  return {
    name: float(np.asarray(value.value))
    for name, value in values.items()
    if isinstance(value, clu_values.Scalar)
  }


def _copy_if_scalar(leaf: Any) -> Any:
  """Copies a scalar array, because the next step may donate the original's memory."""
  is_scalar = isinstance(leaf, jax.Array) and leaf.size == 1
  return jnp.copy(leaf) if is_scalar and not leaf.is_deleted() else leaf


def _time_when_ready(tree: PyTree) -> float:
  try:
    jax.block_until_ready(tree)
  except RuntimeError:
    # An array that a later step has deleted (by donation) must have been computed before.
    if not any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(tree)):
      raise
  return now()


def now() -> float:
  """Returns the time in seconds from an arbitrary start."""
  return time.monotonic()
