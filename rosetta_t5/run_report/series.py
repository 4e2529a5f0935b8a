"""The series of TensorBoard's event files, and their reduction to as many points as a screen can show."""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

_HEADER = 12  # bytes of a record before its event: the length and its checksum
_FOOTER = 4  # the event's checksum


class Series(NamedTuple):
  """The values of one metric in the order in which they were written.

  Attributes:
    steps: the step of each value.
    times: when each value was written, in seconds since 1970.
    values: the values, which may be infinite or NaN.
  """

  steps: Int[np.ndarray, " n"]
  times: Float[np.ndarray, " n"]
  values: Float[np.ndarray, " n"]

  def take(self, selection: np.ndarray) -> Series:
    """Returns the values at these indices, or where this mask is True."""
    return Series(*(field[selection] for field in self))


@dataclasses.dataclass(frozen=True)
class Events:
  """The content of an event file.

  Attributes:
    series: each metric's values, by tag.
    texts: the last text summary of each tag.
    start_time: when the file was opened, in seconds since 1970; None for a file without events.
    problem: which part of the file cannot be read; None if all of it can be.
  """

  series: dict[str, Series]
  texts: dict[str, str]
  start_time: float | None
  problem: str | None


class Curve(NamedTuple):
  """What a chart shows of a series.

  Attributes:
    points: all finite values, or the smallest and largest of each of n equal parts, in their order.
    means: the mean of each part, at its middle; None if no value was left out.
    nonfinite_steps: the steps whose value is infinite or NaN.
  """

  points: Series
  means: Series | None
  nonfinite_steps: Int[np.ndarray, " k"]


def read_event_file(path: str | os.PathLike[str]) -> Events:
  """Reads all scalars and texts of an event file; histograms, images and graphs are left out.

  A million scalars take a few seconds. A file that another process is writing may end within a record,
  which is left out.

  Raises:
    OSError: the file cannot be read.
  """
  from google.protobuf.message import DecodeError
  from tensorboard.compat.proto.event_pb2 import Event

  data = pathlib.Path(path).read_bytes()
  rows: dict[str, list[tuple[int, float, float]]] = collections.defaultdict(list)
  texts: dict[str, str] = {}
  start_time, damaged, end = None, 0, 0
  for begin, end in _records(data):
    try:
      event = Event.FromString(data[begin : end - _FOOTER])
    except DecodeError:
      damaged += 1
      continue
    start_time = min(start_time or event.wall_time, event.wall_time)
    for value in event.summary.value:
      content = _content(value)
      if isinstance(content, float):
        rows[value.tag].append((event.step, event.wall_time, content))
      elif content is not None:
        texts[value.tag] = content
  problems = [f"{damaged:,} damaged record(s) left out"] * bool(damaged)
  if rest := len(data) - end:
    text = "are an incomplete record, which a job may still be writing"
    problems.append(f"the last {rest:,} bytes {text}")
  series = {}
  for tag, of_tag in rows.items():
    steps, times, values = zip(*of_tag, strict=True)
    series[tag] = Series(np.array(steps, np.int64), np.array(times), np.array(values))
  return Events(series, texts, start_time, "; ".join(problems) or None)


def _records(data: bytes) -> Iterator[tuple[int, int]]:
  """Yields where the event of each complete record begins, and where the record ends."""
  read_length = struct.Struct("<Q").unpack_from
  end, size = 0, len(data)
  while end + _HEADER + _FOOTER <= size:
    begin = end + _HEADER
    end = begin + read_length(data, end)[0] + _FOOTER
    if end > size:
      return
    yield begin, end


def _content(value: Any) -> float | str | None:
  """Returns the number or the text of a Summary.Value; None if it is neither."""
  kind = value.WhichOneof("value")
  if kind == "simple_value":
    return float(value.simple_value)
  if kind != "tensor":
    return None
  if len(value.tensor.float_val) == 1:  # faster than an array
    return float(value.tensor.float_val[0])
  from tensorboard.util.tensor_util import make_ndarray

  array = make_ndarray(value.tensor)
  if array.size != 1 or array.dtype.kind not in "OSbiuf":
    return None
  item = array.item()
  return item.decode("utf-8", errors="replace") if isinstance(item, bytes) else float(item)


def without_repeated_steps(series: Series) -> Series:
  """Returns a series in the order of its steps, with the value that was written last for each.

  A run that restarts repeats the steps after its last checkpoint.
  """
  _, from_end = np.unique(series.steps[::-1], return_index=True)
  return series.take(series.steps.size - 1 - from_end)


def decimate(series: Series, max_points: int) -> Curve:
  """Reduces a series without repeated steps to about `max_points` points."""
  finite = np.isfinite(series.values)
  nonfinite_steps, series = series.steps[~finite], series.take(finite)
  count = series.steps.size
  if count <= max_points:
    return Curve(series, None, nonfinite_steps)
  per_part = -(-count // max(1, max_points // 2))
  # The last part is filled up with the last value.
  padded = np.pad(series.values, (0, -count % per_part), mode="edge").reshape(-1, per_part)
  firsts = np.arange(0, count, per_part)
  extremes = np.concatenate([padded.argmin(axis=1), padded.argmax(axis=1)])
  positions = np.minimum(extremes + np.tile(firsts, 2), count - 1)
  points = series.take(np.unique([0, *positions, count - 1]))
  sizes = np.diff(firsts, append=count)
  means = np.add.reduceat(series.values, firsts) / sizes
  middles = series.take(firsts + sizes // 2)
  return Curve(points, middles._replace(values=means), nonfinite_steps)
