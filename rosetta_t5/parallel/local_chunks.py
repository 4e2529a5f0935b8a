"""Which part of an array is on this process's devices (T5X: LocalChunker)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh


@dataclasses.dataclass
class LocalChunkInfo:
  """This process's part of an array.

  Attributes:
    slice: a slice for each dimension.
    replica_id: numbers the processes that have the same part, from 0.
  """

  slice: tuple[slice, ...]
  replica_id: int


class LocalChunker:
  """Splits arrays into the parts that processes have, for a mesh where each process owns a block.

  Attributes:
    global_mesh: the mesh.
    num_chunks: for each mesh axis, the number of blocks along it.
    chunk_ids: for each mesh axis, the index of this process's block.
  """

  def __init__(self, global_mesh: Mesh):
    """Finds this process's block in the mesh."""
    self.global_mesh = global_mesh
    self.mesh_axes = list(global_mesh.shape)
    local = global_mesh.local_mesh
    (position,) = np.argwhere(global_mesh.devices == local.devices.flat[0])
    self.num_chunks = {a: global_mesh.shape[a] // local.shape[a] for a in self.mesh_axes}
    self.chunk_ids = {
      a: int(at) // local.shape[a] for a, at in zip(self.mesh_axes, position, strict=True)
    }

  def get_local_chunk_info(
    self, global_shape: tuple[int, ...], mesh_axes: Sequence[str | None]
  ) -> LocalChunkInfo:
    """Returns this process's part of an array.

    Args:
      global_shape: the shape of the whole array.
      mesh_axes: for each dimension, the mesh axis over which it is split, or None.
    """
    parts = [
      slice(None) if axis is None else self._part(axis, size)
      for axis, size in zip(mesh_axes, global_shape, strict=True)
    ]
    return LocalChunkInfo(tuple(parts), self.get_replica_id(mesh_axes))

  def get_shard_id(self, sharded_mesh_axes: str | Sequence[str | None]) -> int:
    """Returns the index of this process's part of an array that is split over these axes."""
    return self._number([a for a in self.mesh_axes if a in _names(sharded_mesh_axes)])

  def get_replica_id(self, sharded_mesh_axes: str | Sequence[str | None]) -> int:
    """Returns the index of this process among those that have the same part."""
    return self._number([a for a in self.mesh_axes if a not in _names(sharded_mesh_axes)])

  def _part(self, axis: str, size: int) -> slice:
    length = size // self.num_chunks[axis]
    return slice(self.chunk_ids[axis] * length, (self.chunk_ids[axis] + 1) * length)

  def _number(self, axes: Sequence[str]) -> int:
    """Returns the index of this process's block along several axes; the last one varies fastest."""
    number = 0
    for axis in axes:
      number = number * self.num_chunks[axis] + self.chunk_ids[axis]
    return number


def _names(axes: str | Sequence[str | None]) -> set[str | None]:
  return {axes} if isinstance(axes, str) else set(axes)
