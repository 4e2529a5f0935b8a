"""Which part of an array lies on this process's devices (T5X: LocalChunker)."""

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
    replica_id: counts the processes that hold the same part, from 0.
  """

  slice: tuple[slice, ...]
  replica_id: int


class LocalChunker:
  """Cuts arrays into the parts that processes hold, for a mesh whose processes own blocks of it.

  Attributes:
    global_mesh: the mesh.
    num_chunks: for each mesh axis, how many blocks of processes there are along it.
    chunk_ids: for each mesh axis, which of them this process is.
  """

  def __init__(self, global_mesh: Mesh):
    """Finds this process's place in the mesh."""
    self.global_mesh = global_mesh
    local = global_mesh.local_mesh
    first = local.devices.flat[0]
    (place,) = np.argwhere(global_mesh.devices == first)
    self.mesh_axes = list(global_mesh.shape)
    self.num_chunks = {a: global_mesh.shape[a] // local.shape[a] for a in self.mesh_axes}
    self.chunk_ids = {
      a: int(at) // local.shape[a] for a, at in zip(self.mesh_axes, place, strict=True)
    }

  def get_local_chunk_info(
    self, global_shape: tuple[int, ...], mesh_axes: Sequence[str | None]
  ) -> LocalChunkInfo:
    """Returns this process's part of an array.

    Args:
      global_shape: the whole array's shape.
      mesh_axes: for each dimension, the mesh axis that it is split over, or None.
    """
    parts = [
      slice(None) if axis is None else self._part(axis, size)
      for axis, size in zip(mesh_axes, global_shape, strict=True)
    ]
    return LocalChunkInfo(tuple(parts), self.get_replica_id(mesh_axes))

  def get_shard_id(self, sharded_mesh_axes: str | Sequence[str | None]) -> int:
    """Returns which of the parts of an array, split over these axes, is this process's."""
    return self._number([a for a in self.mesh_axes if a in _names(sharded_mesh_axes)])

  def get_replica_id(self, sharded_mesh_axes: str | Sequence[str | None]) -> int:
    """Returns which of the processes that hold the same part this is."""
    return self._number([a for a in self.mesh_axes if a not in _names(sharded_mesh_axes)])

  def _part(self, axis: str, size: int) -> slice:
    length = size // self.num_chunks[axis]
    return slice(self.chunk_ids[axis] * length, (self.chunk_ids[axis] + 1) * length)

  def _number(self, axes: Sequence[str]) -> int:
    """Counts the blocks along several axes, the last one fastest."""
    number = 0
    for axis in axes:
      number = number * self.num_chunks[axis] + self.chunk_ids[axis]
    return number


def _names(axes: str | Sequence[str | None]) -> set[str | None]:
  return {axes} if isinstance(axes, str) else set(axes)
