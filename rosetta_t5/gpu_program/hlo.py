"""Reads XLA's optimized programs (HLO, as text): computations, and their instructions in order."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import re
from typing import Any

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
  r"\b(?:calls|to_apply|body|true_computation|false_computation|branch_computations|called_computations)=(\{[^}]*\}|%[\w.\-]+)"
)


# The instructions of a computation by name, in the order of the schedule.
Computation = dict[str, "Instruction"]


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
    bits = re.search(r"\d+", self.dtype)  # such as 16 in bf16 and 8 in f8e4m3fn; `pred` has none
    return math.ceil(self.size * (int(bits[0]) if bits else 8) / 8)


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
  """One line of a program.

  Attributes:
    name: its name in its computation.
    opcode: what it does, such as `fusion`.
    arrays: its results.
    operands: the instructions whose results it uses.
    called: the computations that it calls.
    arguments: the text between the parentheses; for a parameter, its number.
    attributes: the text after the parentheses.
  """

  name: str
  opcode: str
  arrays: tuple[Array, ...]
  operands: tuple[Instruction, ...]
  called: tuple[Computation, ...]
  arguments: str
  attributes: str

  @property
  def bytes(self) -> int:
    """The bytes of all results."""
    return sum(array.bytes for array in self.arrays)

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
    """What the GPU backend decided; empty if it is absent."""
    _, found, text = self.attributes.partition("backend_config={")
    return json.JSONDecoder().raw_decode("{" + text)[0] if found else {}


def parse_program(text: str) -> Computation:
  """Returns the computation that is called first, of the text of `compiled.as_text()`."""
  computations: dict[str, Computation] = collections.defaultdict(dict)
  entry = ""
  for line in text.splitlines():
    if header := _COMPUTATION.match(line):
      current = computations[header[2]]
      entry = header[2] if header[1] else entry
    elif found := _INSTRUCTION.match(line):
      name, shapes, opcode, rest = found.groups()
      end = _closing_parenthesis(rest)
      arguments, attributes = rest[:end], rest[end + 1 :]
      arrays = tuple(
        Array(dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(shapes)
      )
      operands = tuple(current[x] for x in _NAME.findall(arguments) if x in current)
      names = _NAME.findall(" ".join(_CALLED.findall(attributes)))
      called = tuple(computations[x] for x in names)
      current[name] = Instruction(name, opcode, arrays, operands, called, arguments, attributes)
  return computations[entry]


def _closing_parenthesis(text: str) -> int:
  """Returns the position of the parenthesis that closes the list of operands."""
  depth = 1
  for position, character in enumerate(text):
    depth += (character == "(") - (character == ")")
    if depth == 0:
      return position
  return len(text)


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
