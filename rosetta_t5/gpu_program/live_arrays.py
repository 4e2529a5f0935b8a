"""The arrays that are live at a compiled step's peak memory.

XLA reports where it puts each array (its buffer assignment) and when the array exists (its live ranges).
Its own list of the arrays at the peak counts the result of a loop beside the array that the loop writes, so
it can name another moment.
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterator

from rosetta_t5.gpu_program.hlo import Instruction, Program
from rosetta_t5.gpu_program.kernels import short_source

_ALLOCATION = re.compile(r"^allocation (\d+):", re.MULTILINE)
_PLACED = re.compile(
  r"^ value: <\d+ ([\w.\-]+)(?:\{([\d,]*)\})? @\d+> \(size=(\d+),offset=(\d+)\)", re.MULTILINE
)
_RANGE = re.compile(r"^\s+([\w.\-]+)\{([\d,]*)\}:(\d+)-(\d+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class LiveArray:
  """An array that is live at the peak: its type and shape, its source, its bytes."""

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
  instruction: Instruction
  index: str


def live_arrays(assignment: str, live_ranges: str, program: Program) -> list[LiveArray]:
  """Returns the arrays that are live at peak memory, largest first."""
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
      found.append(_described(live, buffer))
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
  defined = {name: i for body in program.computations.values() for name, i in body.items()}
  written_by = _written_by_loops(program)
  ranges, _, _ = live_ranges.partition("(peak)")
  for name, index, start, end in _RANGE.findall(ranges):
    buffer, written = buffers.get((name, index)), written_by.get(name, ())
    if buffer is None and index.isdecimal() and int(index) < len(written):
      buffer = buffers.get((written[int(index)], ""))
    if buffer is not None and name in defined:
      ranges_of[buffer].append(_LiveRange(int(start), int(end), defined[name], index))
  return ranges_of


def _written_by_loops(program: Program) -> dict[str, tuple[str, ...]]:
  """Returns the arrays that an iteration writes, for each loop and for the parameter of its body.

  They share the buffers of the loop's results and of the parameter's parts.
  """
  written = {}
  for computation in program.computations.values():
    for loop in computation.values():
      if loop.opcode != "while":
        continue
      body = [*program.computations[loop.called[-1]].values()]
      names = [loop.name, *(each.name for each in body if each.opcode == "parameter")]
      if body[-1].opcode == "tuple":
        written.update(dict.fromkeys(names, body[-1].operands))
  return written


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


def _described(live: _LiveRange, buffer: _Buffer) -> LiveArray:
  instruction = live.instruction
  number = int(live.index.split(",")[0]) if live.index else 0
  array = instruction.arrays[min(number, len(instruction.arrays) - 1)]
  shape = f"{array.dtype}[{','.join(map(str, array.shape))}]"
  return LiveArray(shape, short_source(instruction.source) or instruction.name, buffer.bytes)
