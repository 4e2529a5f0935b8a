"""Reads XLA's optimized programs (HLO, as text): instructions, and the arrays that are live at the peak.

XLA reports where it puts each array (its buffer assignment) and when the array exists (its live ranges).
Its own list of the arrays at the peak counts the result of a loop beside the array that the loop writes, so
it can name another moment.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
  r"\b(?:calls|to_apply|body|true_computation|false_computation|branch_computations|called_computations)=(\{[^}]*\}|%[\w.\-]+)"
)
_BITS = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Array:
  """The type and shape of an array."""

  dtype: str
  shape: tuple[int, ...]

  @property
  def size(self) -> int:
    """The number of elements."""
    return math.prod(self.shape)

  @property
  def bytes(self) -> int:
    """The bytes of the array; types of less than a byte are rounded up."""
    bits = _BITS.search(self.dtype)  # such as 16 in bf16 and 8 in f8e4m3fn; `pred` has none
    return math.ceil(self.size * (int(bits[0]) if bits else 8) / 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a program.

  Attributes:
    name: its name in its computation.
    opcode: what it does, such as `fusion`.
    arrays: its results.
    operands: the names of its operands; for a parameter, its number.
    attributes: the text after the operands.
  """

  name: str
  opcode: str
  arrays: tuple[Array, ...]
  operands: tuple[str, ...]
  attributes: str

  @property
  def bytes(self) -> int:
    """The bytes of all results."""
    return sum(array.bytes for array in self.arrays)

  @property
  def source(self) -> str:
    """Where the user's program computes it: the path of modules and the primitive, or ""."""
    return self.text("op_name")

  @property
  def called(self) -> tuple[str, ...]:
    """The names of the computations that it calls."""
    return tuple(
      name for found in _CALLED.findall(self.attributes) for name in _NAME.findall(found)
    )

  def text(self, attribute: str) -> str:
    """Returns the value of an attribute that is a string in quotes; "" if it has none."""
    found = re.search(rf'\b{attribute}="([^"]*)"', self.attributes)
    return found[1] if found else ""

  def dimensions(self, attribute: str) -> tuple[int, ...]:
    """Returns the value of an attribute that lists dimensions, such as {0,1}."""
    found = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", self.attributes)
    return tuple(int(number) for number in found[1].split(",") if number) if found else ()

  @functools.cached_property
  def backend_config(self) -> dict[str, Any]:
    """What the GPU backend decided; empty if it is absent or not JSON."""
    start = self.attributes.find("backend_config={")
    if start < 0:
      return {}
    try:
      return json.JSONDecoder().raw_decode(self.attributes, start + len("backend_config="))[0]
    except json.JSONDecodeError:
      return {}


@dataclasses.dataclass(frozen=True)
class Program:
  """A program: its computations, each with its instructions in the order of the schedule.

  Attributes:
    computations: name → {name of the instruction: the instruction}.
    entry: the name of the computation that is called first.
  """

  computations: dict[str, dict[str, Instruction]]
  entry: str

  def operands(self, computation: str, instruction: Instruction) -> Iterator[Instruction]:
    """Yields the instructions whose results an instruction uses."""
    defined = self.computations[computation]
    return (defined[name] for name in instruction.operands if name in defined)


def parse_program(text: str) -> Program:
  """Returns the program of `compiled.as_text()`.

  Raises:
    ValueError: the text is not a program.
  """
  computations: dict[str, dict[str, Instruction]] = {}
  entry = ""
  current: dict[str, Instruction] = {}
  for line in text.splitlines():
    if header := _COMPUTATION.match(line):
      current = computations.setdefault(header[2], {})
      entry = header[2] if header[1] else entry
    elif found := _INSTRUCTION.match(line):
      current[found[1]] = _instruction(*found.groups())
  if not entry:
    raise ValueError(f"XLA's program has no ENTRY computation; it begins with {text[:200]!r}")
  return Program(computations, entry)


def _instruction(name: str, shape: str, opcode: str, rest: str) -> Instruction:
  end = _closing_parenthesis(rest)
  arrays = tuple(
    Array(dtype, tuple(int(size) for size in sizes.split(",") if size))
    for dtype, sizes in _ARRAY.findall(shape)
  )
  operands = (rest[:end],) if opcode == "parameter" else tuple(_NAME.findall(rest[:end]))
  return Instruction(name, opcode, arrays, operands, rest[end + 1 :])


def _closing_parenthesis(text: str) -> int:
  """Returns the position of the parenthesis that closes the list of operands."""
  depth = 1
  for position, character in enumerate(text):
    depth += (character == "(") - (character == ")")
    if depth == 0:
      return position
  return len(text)


_ALLOCATION = re.compile(r"^allocation (\d+):", re.MULTILINE)
_PLACED = re.compile(
  r"^ value: <\d+ ([\w.\-]+)(?:\{([\d,]*)\})? @\d+> \(size=(\d+),offset=(\d+)\)", re.MULTILINE
)
_RANGE = re.compile(r"^\s+([\w.\-]+)\{([\d,]*)\}:(\d+)-(\d+)$", re.MULTILINE)
_INDEX = re.compile(r"\bindex=(\d+)")


class LiveArray(NamedTuple):
  """An array that is live at the peak: its type and shape, its source, its bytes."""

  shape: str
  source: str
  bytes: int


class _LiveRange(NamedTuple):
  """A part of an instruction's result, and when in the schedule it is in its buffer."""

  start: int
  end: int
  instruction: Instruction
  part: str


def live_arrays(assignment: str, live_ranges: str, program: Program) -> list[LiveArray]:
  """Returns the arrays that are live at peak memory, largest first.

  Args:
    assignment: XLA's report on its buffer assignment.
    live_ranges: XLA's report on live ranges.
    program: the same program.
  """
  ranges_of = _ranges_by_buffer(assignment, live_ranges, program)
  used = np.zeros(
    1 + max((live.end for members in ranges_of.values() for live in members), default=0)
  )
  for (_, _, size), members in ranges_of.items():
    is_used = np.zeros(used.shape, bool)
    for live in members:
      is_used[live.start : live.end + 1] = True
    used += size * is_used
  peak = used.argmax()
  found = []
  for (_, _, size), members in ranges_of.items():
    if present := [live for live in members if live.start <= peak <= live.end]:
      # The last one to arrive, if one array overwrites another.
      live = max(present, key=lambda live: live.start)
      number = int(live.part.split(",")[0]) if live.part else 0
      arrays = live.instruction.arrays
      array = arrays[min(number, len(arrays) - 1)]
      shape = f"{array.dtype}[{','.join(map(str, array.shape))}]"
      source = short_source(live.instruction.source) or live.instruction.name
      found.append(LiveArray(shape, source, size))
  return sorted(found, key=lambda each: -each.bytes)


def _ranges_by_buffer(
  assignment: str, live_ranges: str, program: Program
) -> dict[tuple[str, int, int], list[_LiveRange]]:
  """Returns the arrays in each buffer: (allocation, offset, bytes), which can hold one after the other."""
  buffers: dict[tuple[str, str], tuple[str, int, int]] = {}
  parts = _ALLOCATION.split(assignment)
  for number, text in zip(parts[1::2], parts[2::2], strict=True):
    for name, index, size, offset in _PLACED.findall(text):
      buffers[name, index] = number, int(offset), int(size)
  ranges_of = collections.defaultdict(list)
  aliases = _Aliases(program)
  ranges, _, _ = live_ranges.partition("(peak)")
  for name, index, start, end in _RANGE.findall(ranges):
    buffer = next((buffers[a] for a in aliases.of(name, index) if a in buffers), None)
    if buffer is not None:
      live = _LiveRange(int(start), int(end), aliases.defined[name], index)
      ranges_of[buffer].append(live)
  return ranges_of


class _Aliases:
  """Finds the names that instructions have for one array.

  The result of a loop, the parameter of its body and the array that an iteration writes, which can be one
  of several results of a fusion, share a buffer, which XLA reports for one of them.

  Attributes:
    defined: name → instruction.
  """

  def __init__(self, program: Program) -> None:
    self.defined = {n: i for body in program.computations.values() for n, i in body.items()}
    # The root of a loop's body by the loop, and the loop's operands by the parameters of its body.
    self._same: dict[str, str] = {}
    for caller in [*self.defined.values()]:
      if caller.opcode not in ("while", "call"):
        continue
      body = [*program.computations[caller.called[-1]].values()]
      self._same[caller.name] = body[-1].name
      for parameter in body:
        if parameter.opcode == "parameter":
          self._same[parameter.name] = caller.operands[int(parameter.operands[0])]

  def of(self, name: str, index: str) -> Iterator[tuple[str, str]]:
    """Yields (name, index) of the array itself, and of what it is a part or the result of."""
    path = tuple(index.split(",")) if index else ()
    seen: set[tuple[str, tuple[str, ...]]] = set()
    while name in self.defined and (name, path) not in seen:
      seen.add((name, path))
      yield name, ",".join(path)
      name, path = self._source(self.defined[name], path)

  def _source(self, instruction: Instruction, path: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Returns what an array, a part `path` of an instruction's result, is the same as; ("", ()) if nothing."""
    if instruction.name in self._same:
      return self._same[instruction.name], path
    if instruction.opcode == "tuple" and path:
      return instruction.operands[int(path[0])], path[1:]
    if instruction.opcode == "get-tuple-element":
      return instruction.operands[0], (*_INDEX.findall(instruction.attributes), *path)
    if instruction.opcode in ("bitcast", "opt-barrier", "copy-done"):
      return instruction.operands[0], path
    return "", ()


def short_source(op_name: str) -> str:
  """Returns XLA's `op_name` without the parts that are the same in all steps, for one line of a table.

  The layers of a stack have the same source, so that their kernels can be added up.
  """
  direction = "backward" if "transpose(" in op_name else "forward" if "jvp(" in op_name else ""
  parts: list[str] = []
  for part in op_name.split("/"):
    if "(" in part or "." in part:
      continue
    part = re.sub(r"_\d+$", "", part) if part.startswith("layers_") else part
    if not parts or parts[-1] != part:
      parts.append(part)
  return " ".join(word for word in (direction, "/".join(parts)) if word)
