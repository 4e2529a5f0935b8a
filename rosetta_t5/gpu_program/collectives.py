"""The collectives of a GPU program: which devices take part, and how many bytes they send."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from rosetta_t5.gpu_program.hlo import Instruction, Program
from rosetta_t5.gpu_program.kernels import short_source

# Kind → the bytes that one of n devices sends in a ring, for one byte of its operand.
_SENT = {
  "all-reduce": lambda n: 2 * (n - 1) / n,
  "all-gather": lambda n: n - 1,
  "reduce-scatter": lambda n: (n - 1) / n,
  "all-to-all": lambda n: (n - 1) / n,
  "collective-permute": lambda n: 1,
}
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(
  r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?\s*\{([^}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}]*\})\}")


@dataclasses.dataclass(frozen=True)
class CollectiveCall:
  """A collective of the program.

  Attributes:
    name: the instruction that starts it.
    kind: such as all-reduce.
    source: what in the model needs it.
    axes: the mesh axes whose devices take part.
    size: the bytes of its operands on one device.
    sent: the bytes that one device sends.
    arrays: the number of arrays that are sent together.
  """

  name: str
  kind: str
  source: str
  axes: tuple[str, ...]
  size: float
  sent: float
  arrays: int


def collective_of(
  program: Program, computation: str, instruction: Instruction, mesh: Mapping[str, int]
) -> CollectiveCall | None:
  """Returns the collective that an instruction starts; None if it starts none."""
  operands = list(program.operands(computation, instruction))
  if instruction.opcode == "async-start":
    inside = [i for name in instruction.called for i in program.computations[name].values()]
    instruction = next((i for i in inside if i.opcode in _SENT), instruction)
  kind = instruction.opcode.removesuffix("-start")
  if kind not in _SENT:
    return None
  group = _group(instruction.attributes, math.prod(mesh.values()))
  size = float(sum(operand.bytes for operand in operands))
  return CollectiveCall(
    name=instruction.name,
    kind=kind,
    source=short_source(instruction.source),
    axes=_axes(group, mesh),
    size=size,
    sent=size * _SENT[kind](max(len(group), 1)),
    arrays=sum(len(operand.arrays) for operand in operands),
  )


def _group(attributes: str, devices: int) -> list[int]:
  """Returns the first group of devices, as positions in the mesh; of pairs, the first that moves data."""
  if found := _LISTED.search(attributes):
    return [int(number) for number in found[1].split(",") if number]
  if found := _PAIRS.search(attributes):
    pairs = re.findall(r"(\d+),(\d+)", found[1])
    return next(([int(a), int(b)] for a, b in pairs if a != b), [0])
  if found := _IOTA.search(attributes):
    return _device_grid(found[3], found[4]).reshape(int(found[1]), int(found[2]))[0].tolist()
  if found := _NAMED.search(attributes):
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
    named = re.findall(r"'([^']+)'", found[4])
    grid = _device_grid(found[2] or ",".join(sizes.values()), found[3])
    grid = grid.reshape([int(size) for size in sizes.values()])
    return grid[tuple(slice(None) if name in named else 0 for name in sizes)].ravel().tolist()
  assert "replica_groups=" not in attributes or "replica_groups={}" in attributes, attributes[:300]
  return list(range(devices))


def _device_grid(shape: str, order: str | None) -> np.ndarray:
  """Returns the numbers of the devices in this shape, such as "4,2", with transposed dimensions."""
  sizes = [int(size) for size in shape.split(",")]
  axes = [int(axis) for axis in order.split(",")] if order else range(len(sizes))
  return np.arange(math.prod(sizes)).reshape(sizes).transpose(axes)


def _axes(group: list[int], mesh: Mapping[str, int]) -> tuple[str, ...]:
  """Returns the mesh axes along which the devices of a group differ."""
  coordinates = np.array(np.unravel_index(group, tuple(mesh.values())))
  differs = (coordinates != coordinates[:, :1]).any(axis=1)
  return tuple(name for name, is_different in zip(mesh, differs, strict=True) if is_different)
