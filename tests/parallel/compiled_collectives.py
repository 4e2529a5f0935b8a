"""Finds the collectives in a compiled program, by kind and mesh axes."""

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


def collectives(text: str, mesh: Mesh) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
  """Returns (number of arrays, bytes) that a program's collectives move, by (kind, mesh axes).

  Scalars (losses, weights, norms) are not counted, because every mesh needs their sums. Arrays that XLA
  has combined into one operation are counted separately.

  Args:
    text: the compiled program, in HLO.
    mesh: the mesh for which it was compiled.
  """
  counts: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
  sizes: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
  for line in text.splitlines():
    if match := _LINE.search(line):
      result, kind = match.groups()
      arrays = [
        math.prod(int(n) for n in shape.split(",")) * _ITEMSIZE[dtype]
        for dtype, shape in _ARRAY.findall(result)
        if shape
      ]
      axes = _axes(line, mesh) if arrays else ()
      if axes:
        if kind == "reduce-scatter":
          # Counted like the all-reduce that XLA on CPUs writes elsewhere: by the whole array.
          kind, arrays = (
            "all-reduce",
            [size * math.prod(mesh.shape[a] for a in axes) for size in arrays],
          )
        # The result of an all-to-all is one array with one part per device.
        counts[kind, axes] += 1 if kind == "all-to-all" else len(arrays)
        sizes[kind, axes] += sum(arrays)
  return {key: (counts[key], sizes[key]) for key in counts}


def _axes(line: str, mesh: Mesh) -> tuple[str, ...]:
  """Returns the mesh axes whose devices take part; () if each device is alone."""
  if match := re.search(r"source_target_pairs=\{\{(.*?)\}\}", line):
    pairs = np.array([pair.split(",") for pair in match[1].split("},{")], int)
    places = np.unravel_index(pairs, mesh.devices.shape)
    return tuple(
      a for a, at in zip(mesh.axis_names, places, strict=True) if (at[:, 0] != at[:, 1]).any()
    )
  groups = {frozenset(group) for group in _groups(line)}
  if all(len(group) == 1 for group in groups):
    return ()
  ids = np.arange(mesh.size).reshape(mesh.devices.shape)
  names = [name for name, size in mesh.shape.items() if size > 1]
  for count in range(1, len(names) + 1):
    for axes in itertools.combinations(names, count):
      positions = [mesh.axis_names.index(axis) for axis in axes]
      width = math.prod(mesh.shape[axis] for axis in axes)
      rows = np.moveaxis(ids, positions, range(-count, 0)).reshape(-1, width)
      if {frozenset(row.tolist()) for row in rows} == groups:
        return axes
  raise AssertionError(f"no axes of {mesh.shape} make the groups of {line[:300]}")


def _groups(line: str) -> list[list[int]]:
  if match := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}", line):
    sizes = {name: int(size) for name, size in re.findall(r"('\w+')=(\d+)", match[1])}
    inside = [list(sizes).index(name) for name in match[3].split(",")]
    ids = _ids(match[2] or f"[{math.prod(sizes.values())}]").reshape(list(sizes.values()))
    width = math.prod(ids.shape[axis] for axis in inside)
    return np.moveaxis(ids, inside, range(-len(inside), 0)).reshape(-1, width).tolist()
  if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=(\S+?\]\S*?),? ", line):
    return _ids(match[3]).reshape(int(match[1]), int(match[2])).tolist()
  match = re.search(r"replica_groups=\{\{(.*?)\}\}", line)
  assert match, line[:300]
  return [[int(n) for n in group.split(",")] for group in match[1].split("},{")]


def _ids(iota: str) -> np.ndarray:
  """Returns device ids from XLA's notation: [2,4]T(1,0) is an iota of shape [2,4], transposed."""
  match = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?,?", iota)
  assert match, iota
  dims = [int(n) for n in match[1].split(",")]
  ids = np.arange(math.prod(dims)).reshape(dims)
  return ids.transpose([int(n) for n in match[2].split(",")]) if match[2] else ids
