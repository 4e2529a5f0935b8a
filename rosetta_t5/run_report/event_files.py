"""Reads TensorBoard's event files with numpy: a million scalars take about a second.

An event file is a sequence of records: length, checksum, event, checksum. An event is a protocol
buffer. The events of one metric have the same bytes except for time, step and value, so one of them
is parsed, and all others with its layout are decoded together.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import mmap
import os
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8, UInt32

_HEADER = 12  # bytes of a record before its event: the length and its checksum
_FOOTER = 4  # the event's checksum
_FRAME = _HEADER + _FOOTER
_RECORDS_AT_ONCE = 1 << 16
_LATEST_TIME = 1e11  # seconds since 1970


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
  with open(path, "rb") as file:
    if not os.fstat(file.fileno()).st_size:
      return Events({}, {}, None, None)
    buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
  starts, lengths, end = _find_records(buffer)
  data = np.frombuffer(buffer, np.uint8)
  intact = _has_intact_header(data, starts)
  decoder = _Decoder()
  for length in np.unique(lengths[intact]):
    of_length = np.flatnonzero(intact & (lengths == length))
    windows = np.lib.stride_tricks.sliding_window_view(data, int(length) + _FOOTER)
    for first in range(0, of_length.size, _RECORDS_AT_ONCE):
      records = of_length[first : first + _RECORDS_AT_ONCE]
      decoder.decode(records, windows[starts[records]])
  damaged = starts.size - int(intact.sum()) + decoder.damaged
  return Events(
    decoder.series(),
    {tag: [text for _, text in sorted(found)] for tag, found in decoder.texts.items()},
    decoder.start_time,
    _describe_problem(damaged, len(buffer) - end),
  )


def _describe_problem(damaged: int, rest: int) -> str | None:
  problems = []
  if damaged:
    problems.append(f"{damaged:,} damaged record(s) left out")
  if rest:
    problems.append(
      f"the last {rest:,} bytes are an incomplete record, which a job may still be writing"
    )
  return "; ".join(problems) or None


def _find_records(buffer: mmap.mmap) -> tuple[np.ndarray, np.ndarray, int]:
  """Returns the offset and the length of each complete event, and where the last record ends."""
  read_length = struct.Struct("<Q").unpack_from
  starts: list[int] = []
  lengths: list[int] = []
  position, size = 0, len(buffer)
  while position + _FRAME <= size:
    (length,) = read_length(buffer, position)
    if position + length + _FRAME > size:
      break
    starts.append(position + _HEADER)
    lengths.append(length)
    position += length + _FRAME
  return np.array(starts, np.int64), np.array(lengths, np.int64), position


def _has_intact_header(data: UInt8[np.ndarray, " size"], starts: np.ndarray) -> np.ndarray:
  if not starts.size:
    return np.zeros(0, bool)
  return _is_intact(np.lib.stride_tricks.sliding_window_view(data, _HEADER)[starts - _HEADER])


@functools.cache
def _crc_table() -> UInt32[np.ndarray, " 65536"]:
  """Returns the table of CRC-32C for two bytes at a time."""
  table = np.arange(1 << 16, dtype=np.uint32)
  for _ in range(16):
    table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1)
  return table


def _is_intact(rows: UInt8[np.ndarray, "n length"]) -> Bool[np.ndarray, " n"]:
  """Returns whether the last four bytes of each row are TensorFlow's checksum of the others."""
  table = _crc_table()
  content = rows[:, :-4]
  crc = np.full(len(rows), 0xFFFFFFFF, np.uint32)
  if content.shape[1] % 2:
    # After a byte of zeros, which changes nothing, a single byte is the second of two.
    crc = table[((crc ^ content[:, 0]) & 0xFF) << 8] ^ (crc >> 8)
    content = content[:, 1:]
  for column in np.ascontiguousarray(content).view("<u2").T:
    crc = table[(crc ^ column) & 0xFFFF] ^ (crc >> 16)
  crc = ~crc
  masked = ((crc >> 15) | (crc << 17)) + np.uint32(0xA282EAD8)
  return masked == _decode_column(rows, len(rows[0]) - 4, "<u4")


def _decode_column(rows: np.ndarray, offset: int, dtype: str) -> np.ndarray:
  """Returns the numbers that begin at byte `offset` of each row."""
  width = np.dtype(dtype).itemsize
  return np.ascontiguousarray(rows[:, offset : offset + width]).view(dtype)[:, 0]


class _Decoder:
  """Collects the content of records, of which those with one layout are decoded together."""

  def __init__(self) -> None:
    self.texts: dict[str, list[tuple[int, Text]]] = collections.defaultdict(list)
    self.start_time: float | None = None
    self.damaged = 0
    # For each tag: arrays of (record number, step, time, value).
    self._parts: dict[str, list[tuple[Any, ...]]] = collections.defaultdict(list)

  def decode(self, numbers: np.ndarray, rows: UInt8[np.ndarray, "n length"]) -> None:
    """Decodes records of one length, given as rows of an event and its checksum."""
    intact = _is_intact(rows)
    self.damaged += int(rows.shape[0] - intact.sum())
    numbers, rows = numbers[intact], rows[intact, :-_FOOTER]
    while rows.shape[0]:
      layout = _parse_layout(rows[0].tobytes())
      if layout is None:
        self._decode_other(int(numbers[0]), rows[0].tobytes())
        numbers, rows = numbers[1:], rows[1:]
        continue
      differs = ((rows ^ rows[0]) & layout.fixed_bits).any(axis=1)
      self._add(layout, numbers[~differs], rows[~differs])
      numbers, rows = numbers[differs], rows[differs]

  def _add(self, layout: _Layout, numbers: np.ndarray, rows: np.ndarray) -> None:
    times = _decode_column(rows, layout.time, "<f8")
    plausible = (times >= 0) & (times < _LATEST_TIME)  # false for NaN
    if not plausible.all():
      self.damaged += int(times.size - plausible.sum())
      numbers, rows, times = numbers[plausible], rows[plausible], times[plausible]
    steps = np.zeros(len(rows), np.int64)
    for n, column in enumerate(range(*layout.step)):
      steps |= (rows[:, column].astype(np.int64) & 0x7F) << (7 * n)
    for tag, offset, dtype in layout.values:
      values = _decode_column(rows, offset, dtype).astype(np.float64)
      self._parts[tag].append((numbers, steps, times, values))

  def _decode_other(self, number: int, event_bytes: bytes) -> None:
    """Decodes an event that is not made of floating-point scalars."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto import event_pb2
    from tensorboard.util import tensor_util

    try:
      event = event_pb2.Event.FromString(event_bytes)
      if not 0 <= event.wall_time < _LATEST_TIME:
        raise ValueError(event.wall_time)
      if self.start_time is None or event.wall_time < self.start_time:
        self.start_time = event.wall_time
      for value in event.summary.value:
        if value.WhichOneof("value") != "tensor":
          continue
        array = tensor_util.make_ndarray(value.tensor)
        if array.size == 1 and array.dtype.kind in "OS":
          text = bytes(array.item()).decode("utf-8", errors="replace")
          self.texts[value.tag].append((number, Text(event.step, text)))
        elif array.size == 1 and array.dtype.kind in "biuf":
          entry = ([number], [event.step], [event.wall_time], [float(array.item())])
          self._parts[value.tag].append(entry)
    except (DecodeError, TypeError, ValueError):
      self.damaged += 1

  def series(self) -> dict[str, Series]:
    """Returns the scalars by tag, in the order of their records."""
    result = {}
    for tag, parts in self._parts.items():
      numbers, steps, times, values = map(np.concatenate, zip(*parts, strict=True))
      order = np.argsort(numbers, kind="stable")
      result[tag] = Series(steps[order], times[order], values[order])
    return result


class _Layout(NamedTuple):
  """Where an event's numbers are.

  Attributes:
    time: the offset of the time, 8 bytes.
    step: the first byte of the step, and the byte after its last. Both are 0 for step 0.
    values: (tag, offset, dtype) of each scalar.
    fixed_bits: the bits that every event of this layout has in common.
  """

  time: int
  step: tuple[int, int]
  values: list[tuple[str, int, str]]
  fixed_bits: UInt8[np.ndarray, " length"]


def _parse_layout(event: bytes) -> _Layout | None:
  """Returns the layout of an event whose values are all floating-point scalars, else None."""
  time, step, values = None, (0, 0), []
  try:
    for number, begin, end in _fields(event, 0, len(event)):
      if number == 1:
        time = begin
      elif number == 2:
        step = (begin, end)
      elif number == 5:  # Summary, whose only field is a list of values
        values += [_parse_value(event, *value) for _, *value in _fields(event, begin, end)]
  except IndexError:
    return None
  found = [value for value in values if value is not None]
  if time is None or not values or len(found) < len(values):
    return None
  fixed = np.full(len(event), 0xFF, np.uint8)
  fixed[time : time + 8] = 0
  fixed[slice(*step)] = 0x80  # the bit that says whether another byte of the number follows
  for _, offset, dtype in found:
    fixed[offset : offset + np.dtype(dtype).itemsize] = 0
  return _Layout(time, step, found, fixed)


def _parse_value(event: bytes, begin: int, end: int) -> tuple[str, int, str] | None:
  """Returns the tag, the offset and the dtype of a Summary.Value; None unless it is one float."""
  tag, scalar = "", None
  for number, first, last in _fields(event, begin, end):
    if number == 1:
      tag = event[first:last].decode("utf-8", errors="replace")
    elif number == 2:  # simple_value
      scalar = (first, "<f4")
    elif number == 8:  # tensor
      scalar = _parse_tensor(event, first, last)
  return None if scalar is None else (tag, *scalar)


def _parse_tensor(event: bytes, begin: int, end: int) -> tuple[int, str] | None:
  """Returns the offset and the dtype of a TensorProto; None unless it is one float."""
  fields = {number: (first, last) for number, first, last in _fields(event, begin, end)}
  dtype = {1: "<f4", 2: "<f8"}.get(event[fields[1][0]]) if 1 in fields else None
  for number in (4, 5, 6):  # tensor_content, float_val, double_val
    first, last = fields.get(number, (0, 0))
    if dtype is not None and last - first == np.dtype(dtype).itemsize:
      return first, dtype
  return None


def _fields(data: bytes, position: int, end: int) -> Iterator[tuple[int, int, int]]:
  """Yields the number of each field of a message, and the range of its bytes.

  Raises:
    IndexError: the bytes are not a message.
  """
  while position < end:
    key, begin = _varint(data, position)
    kind = key & 7
    if kind == 2:
      length, begin = _varint(data, begin)
      position = begin + length
    elif kind in (1, 5):
      position = begin + (8 if kind == 1 else 4)
    else:
      _, position = _varint(data, begin)
    if position > end:
      raise IndexError
    yield key >> 3, begin, position


def _varint(data: bytes, position: int) -> tuple[int, int]:
  """Returns a number of variable length, and the position after it."""
  number = 0
  for shift in range(0, 70, 7):
    byte, position = data[position], position + 1
    number |= (byte & 0x7F) << shift
    if byte < 0x80:
      return number, position
  raise IndexError
