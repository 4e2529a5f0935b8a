"""Reads the scalars and texts of TensorBoard's event files: a million scalars take a few seconds."""

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


@dataclasses.dataclass(frozen=True)
class Series:
  """The values of one metric in the order in which they were written.

  Attributes:
    steps: the step of each value.
    times: when each value was written, in seconds since 1970.
    values: the values, which may be infinite or NaN.
  """

  steps: Int[np.ndarray, " n"]
  times: Float[np.ndarray, " n"]
  values: Float[np.ndarray, " n"]


class Text(NamedTuple):
  """A text that was written at a step."""

  step: int
  text: str


@dataclasses.dataclass(frozen=True)
class Events:
  """The content of an event file.

  Attributes:
    series: each metric's values, by tag.
    texts: each text summary, by tag.
    start_time: when the file was opened, in seconds since 1970; None for a file without events.
    problem: which part of the file cannot be read; None if all of it can be.
  """

  series: dict[str, Series]
  texts: dict[str, list[Text]]
  start_time: float | None
  problem: str | None


def read_event_file(path: str | os.PathLike[str]) -> Events:
  """Reads all scalars and texts of an event file; histograms, images and graphs are left out.

  A file that another process is writing may end within a record; that record is left out.

  Raises:
    OSError: the file cannot be read.
  """
  from google.protobuf.message import DecodeError
  from tensorboard.compat.proto.event_pb2 import Event

  data = pathlib.Path(path).read_bytes()
  rows: dict[str, list[tuple[int, float, float]]] = collections.defaultdict(list)
  texts: dict[str, list[Text]] = collections.defaultdict(list)
  start_time, damaged, end = None, 0, 0
  for begin, end in _records(data):
    try:
      event = Event.FromString(data[begin : end - _FOOTER])
    except DecodeError:
      damaged += 1
      continue
    start_time = event.wall_time if start_time is None else min(start_time, event.wall_time)
    for value in event.summary.value:
      content = _content(value)
      if isinstance(content, float):
        rows[value.tag].append((event.step, event.wall_time, content))
      elif content is not None:
        texts[value.tag].append(Text(event.step, content))
  return Events(
    {tag: _series(of_tag) for tag, of_tag in rows.items()},
    dict(texts),
    start_time,
    _describe_problem(damaged, len(data) - end),
  )


def _records(data: bytes) -> Iterator[tuple[int, int]]:
  """Yields where the event of each complete record begins, and where the record ends."""
  read_length = struct.Struct("<Q").unpack_from
  position, size = 0, len(data)
  while position + _HEADER + _FOOTER <= size:
    begin = position + _HEADER
    position = begin + read_length(data, position)[0] + _FOOTER
    if position > size:
      return
    yield begin, position


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


def _series(rows: list[tuple[int, float, float]]) -> Series:
  steps, times, values = zip(*rows, strict=True)
  return Series(np.array(steps, np.int64), np.array(times), np.array(values))


def _describe_problem(damaged: int, rest: int) -> str | None:
  problems = []
  if damaged:
    problems.append(f"{damaged:,} damaged record(s) left out")
  if rest:
    problems.append(
      f"the last {rest:,} bytes are an incomplete record, which a job may still be writing"
    )
  return "; ".join(problems) or None
