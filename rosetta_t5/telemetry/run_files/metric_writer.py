"""Writes metrics to TensorBoard's files and to trackers, without ever ending the run."""

from __future__ import annotations

import errno
import functools
import glob
import logging
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

from rosetta_t5.telemetry.trackers import NullWriter
from rosetta_t5.terminal import lost_output

_FLUSH_INTERVAL_S = 10.0
_PROBE_BYTES = 1 << 16

_log = logging.getLogger(__name__)


def make_tensorboard_writer(name: str, summary_dir: str) -> Any:
  """Returns clu's writer for the folder `summary_dir/name`; without TensorFlow, one that does nothing.

  TensorFlow does not notice that its file was removed, so the writer's `flush` raises an error then.

  Raises:
    OSError: the folder cannot be written to. TensorFlow would leave an empty file there.
  """
  try:
    # TensorFlow must not allocate the accelerator's memory to write a few numbers.
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
    from clu import metric_writers
  except ImportError as error:
    _log.warning(
      "no TensorBoard files are written for %s: %s (pip install tensorflow tensorboard)",
      name,
      error,
    )
    return NullWriter(name)
  folder = os.path.join(summary_dir, name)
  if "://" in folder:
    return metric_writers.SummaryWriter(folder)

  class Writer(metric_writers.SummaryWriter):
    def flush(self) -> None:
      super().flush()
      if not glob.glob("events*", root_dir=folder):
        raise FileNotFoundError(errno.ENOENT, f"the files in {folder} were removed")

  if not os.path.isdir(summary_dir):  # It was moved during the run.
    raise FileNotFoundError(errno.ENOENT, f"{summary_dir} was moved or removed")
  os.makedirs(folder, exist_ok=True)
  with tempfile.NamedTemporaryFile(dir=folder) as probe:
    probe.write(bytes(_PROBE_BYTES))
  return Writer(folder)


class MetricWriter:
  """A clu MetricWriter that counts its errors as lost output, and is reopened after an error.

  What it writes counts as written once it is flushed, which happens every few seconds.
  """

  def __init__(self, make: Callable[[], Any], writer: Any = None):
    """Prepares a writer; nothing is opened before the first call.

    Args:
      make: opens a clu MetricWriter.
      writer: one that is open already.
    """
    self._make, self._writer = make, writer
    self._unflushed = 0  # the number of writes since the last flush
    self._flushed = time.monotonic()

  def __getattr__(self, name: str) -> Callable[..., None]:
    if name not in ("flush", "close") and not name.startswith("write_"):
      raise AttributeError(name)
    return functools.partial(self._call, name)

  def _call(self, method: str, *args: Any, **kwargs: Any) -> None:
    is_write = method.startswith("write_")
    self._unflushed += is_write
    try:
      if is_write and self._writer is None:
        self._writer = self._make()
      if self._writer is None:
        return
      is_due = time.monotonic() > self._flushed + _FLUSH_INTERVAL_S
      if is_due or not is_write:
        self._writer.flush()
        self._unflushed, self._flushed = int(is_write), time.monotonic()
      if method != "flush":
        getattr(self._writer, method)(*args, **kwargs)
    except Exception as error:
      lost_output.count("metric lines", error, self._unflushed)
      self._writer, self._unflushed = None, 0
