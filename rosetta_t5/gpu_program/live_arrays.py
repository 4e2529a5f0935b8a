"""The arrays that exist when a compiled step uses most memory.

XLA reports where it puts each array (its buffer assignment) and when the array exists (its live ranges).
Its own list of the arrays at the peak counts the result of a loop beside the array that the loop writes, so
it can name another moment.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterator

from rosetta_t5.gpu_program.hlo import Program
from rosetta_t5.gpu_program.kernels import short_source

_ALLOCATION = re.compile(r"^allocation (\d+):", re.MULTILINE)
_PLACED = re.compile(
  r"^ value: <\d+ ([\w.\-]+)(?:\{([\d,]*)\})? @\d+> \(size=(\d+),offset=(\d+)\)", re.MULTILINE
)
_RANGE = re.compile(r"^\s+([\w.\-]+)\{([\d,]*)\}:(\d+)-(\d+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class LiveArray:
  """An array that exists when most memory is in use: its type and shape, its source, its bytes."""

  shape: str
  source: str
  bytes: int


@dataclasses.dataclass(frozen=True)
class _Buffer:
  """A piece of memory, which can hold several arrays one after the other."""

  allocation: str
  offset: int
  bytes: int


@dataclasses.dataclass(frozen=True)
class _LiveRange:
  """An array, and the first and last position in the schedule at which it is in its buffer."""

  start: int
  end: int
  name: str
  index: str


def live_arrays(assignment: str, live_ranges: str, program: Program) -> list[LiveArray]:
  """Returns the arrays that exist when most memory is in use, largest first.

  Args:
    assignment: XLA's report on its buffer assignment.
    live_ranges: XLA's report on live ranges.
    program: the same program.
  """
  ranges_of = _ranges_by_buffer(assignment, live_ranges, program)
  changes: collections.Counter[int] = collections.Counter()
  for buffer, members in ranges_of.items():
    for start, end in _merged(members):
      changes[start] += buffer.bytes
      changes[end + 1] -= buffer.bytes
  times = sorted(changes)
  sums = list(itertools.accumulate(changes[time] for time in times))
  peak = times[sums.index(max(sums))] if sums else 0
  found = []
  for buffer, members in ranges_of.items():
    # The last one to arrive, if one array overwrites another.
    present = [live for live in members if live.start <= peak <= live.end]
    if present:
      live = max(present, key=lambda live: live.start)
      found.append(_described(live, buffer, program))
  return sorted(found, key=lambda each: -each.bytes)


def _ranges_by_buffer(
  assignment: str, live_ranges: str, program: Program
) -> dict[_Buffer, list[_LiveRange]]:
  """Returns the arrays in each buffer."""
  buffers: dict[tuple[str, str], _Buffer] = {}
  parts = _ALLOCATION.split(assignment)
  for number, text in zip(parts[1::2], parts[2::2], strict=True):
    for name, index, size, offset in _PLACED.findall(text):
      buffers[name, index] = _Buffer(number, int(offset), int(size))
  ranges_of: dict[_Buffer, list[_LiveRange]] = collections.defaultdict(list)
  defined = {n: (i, body) for body in program.computations.values() for n, i in body.items()}
  ranges, _, _ = live_ranges.partition("(peak)")
  for name, index, start, end in _RANGE.findall(ranges):
    buffer = buffers.get((name, index))
    if buffer is None and name in defined and index.isdecimal():
      # A loop's result, and its body's parameter, are where its iterations write them.
      instruction, body = defined[name]
      if instruction.opcode == "while":
        body = program.computations[instruction.called[-1]]
      root = [*body.values()][-1]
      if instruction.opcode in ("while", "parameter") and root.opcode == "tuple":
        buffer = buffers.get((root.operands[int(index)], ""))
    if buffer is not None and name in defined:
      ranges_of[buffer].append(_LiveRange(int(start), int(end), name, index))
  return ranges_of


def _merged(ranges: list[_LiveRange]) -> Iterator[tuple[int, int]]:
  """Yields the periods in which a buffer is in use."""
  ordered = sorted((live.start, live.end) for live in ranges)
  start, end = ordered[0]
  for following, last in ordered[1:]:
    if following > end:
      yield start, end
      start = following
    end = max(end, last)
  yield start, end


def _described(live: _LiveRange, buffer: _Buffer, program: Program) -> LiveArray:
  instruction = next(body[live.name] for body in program.computations.values() if live.name in body)
  number = int(live.index.split(",")[0]) if live.index else 0
  array = instruction.arrays[min(number, len(instruction.arrays) - 1)]
  shape = f"{array.dtype}[{','.join(map(str, array.shape))}]"
  return LiveArray(shape, short_source(instruction.source) or instruction.name, buffer.bytes)
