"""The collectives that stand in a compiled program, by kind and mesh axes."""

from __future__ import annotations

import collections
import itertools
import math
import re

import numpy as np
from jax.sharding import Mesh

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_LINE = re.compile(rf"%\S+ = (\(.*?\)|\S+) ({_KINDS})\(")
_ARRAY = re.compile(r"(f32|bf16|s32|u32|pred)\[([\d,]*)\]")
_ITEMSIZE = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1}
# Losses, weights, norms: single numbers, whose sums every mesh needs.
_SCALARS = 128


def collective_bytes(text: str, mesh: Mesh) -> dict[tuple[str, tuple[str, ...]], int]:
  """Returns the bytes of a program's collectives by (kind, mesh axes).

  Args:
    text: the compiled program, in HLO.
    mesh: the mesh that it was compiled for.
  """
  found: dict[tuple[str, tuple[str, ...]], int] = collections.defaultdict(int)
  for line in text.splitlines():
    if match := _LINE.search(line):
      result, kind = match.groups()
      size = sum(
        math.prod(int(n) for n in shape.split(",") if n) * _ITEMSIZE[dtype]
        for dtype, shape in _ARRAY.findall(result)
      )
      found[kind, _axes(line, mesh)] += size
  return {key: size for key, size in found.items() if size > _SCALARS}


def _axes(line: str, mesh: Mesh) -> tuple[str, ...]:
  """The mesh axes whose devices take part."""
  groups = {frozenset(group) for group in _groups(line)}
  ids = np.arange(mesh.size).reshape(mesh.devices.shape)
  names = [name for name, size in mesh.shape.items() if size > 1]
  for count in range(1, len(names) + 1):
    for axes in itertools.combinations(names, count):
      places = [mesh.axis_names.index(axis) for axis in axes]
      width = math.prod(mesh.shape[axis] for axis in axes)
      rows = np.moveaxis(ids, places, range(-count, 0)).reshape(-1, width)
      if {frozenset(row.tolist()) for row in rows} == groups:
        return axes
  raise AssertionError(f"no axes of {mesh.shape} make the groups of {line[:300]}")


def _groups(line: str) -> list[list[int]]:
  if match := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}", line):
    sizes = {name: int(size) for name, size in re.findall(r"('\w+')=(\d+)", match[1])}
    inside = [list(sizes).index(name) for name in match[3].split(",")]
    ids = _ids(match[2] or f"[{math.prod(sizes.values())}]").reshape(list(sizes.values()))
    width = math.prod(ids.shape[place] for place in inside)
    return np.moveaxis(ids, inside, range(-len(inside), 0)).reshape(-1, width).tolist()
  if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=(\S+?\]\S*?),? ", line):
    return _ids(match[3]).reshape(int(match[1]), int(match[2])).tolist()
  match = re.search(r"replica_groups=\{\{(.*?)\}\}", line)
  assert match, line[:300]
  return [[int(n) for n in group.split(",")] for group in match[1].split("},{")]


def _ids(iota: str) -> np.ndarray:
  """Numbers as XLA writes them: [2,4]T(1,0), counted along [2,4], then transposed."""
  match = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?,?", iota)
  assert match, iota
  dims = [int(n) for n in match[1].split(",")]
  ids = np.arange(math.prod(dims)).reshape(dims)
  return ids.transpose([int(n) for n in match[2].split(",")]) if match[2] else ids
