"""Which part of each batch, and of any array, a process has."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from rosetta_t5.parallel.mesh import BATCH_AXES, CONTEXT_AXIS, DATA_AXIS, count_batch_shards


@dataclasses.dataclass(frozen=True)
class DataLayout:
  """Which part of each global batch this process reads.

  Attributes:
    batch_size: examples in the global batch.
    shard_id: the data shard that this process reads.
    num_shards: the number of data shards.
    is_first_host_in_replica_set: whether this process is the first one that reads its shard.
  """

  batch_size: int
  shard_id: int
  num_shards: int
  is_first_host_in_replica_set: bool


def multiples_near(number: int, divisor: int) -> str:
  """Returns the positive multiples next to a number as text, such as "8 or 16"."""
  below = number - number % divisor
  return " or ".join(str(multiple) for multiple in (below, below + divisor) if multiple)


def check_batch_size(batch_size: int, axis_sizes: Mapping[str, int]) -> None:
  """Raises ValueError unless a batch can be split over a mesh with these axis sizes."""
  shards = count_batch_shards(axis_sizes)
  if batch_size < 1 or batch_size % shards:
    names = [n for n in BATCH_AXES if n == DATA_AXIS or axis_sizes.get(n, 1) > 1]
    axes = f"axes {' and '.join(names)}" if len(names) > 1 else f"{DATA_AXIS} axis"
    raise ValueError(
      f"batch size {batch_size} cannot be split over the {shards} devices of the mesh's {axes} "
      f"(mesh {dict(axis_sizes)}): set BATCH_SIZE (in evaluation and inference "
      f"DatasetConfig.batch_size) to a multiple of {shards}, such as "
      f"{multiples_near(max(batch_size, 0), shards)}"
    )


def check_row_lengths(lengths: Mapping[str, int], axis_sizes: Mapping[str, int]) -> None:
  """Raises ValueError unless the positions of rows can be split over a mesh with these axis sizes.

  Args:
    lengths: the number of positions of each feature.
    axis_sizes: the size of each mesh axis.
  """
  shards = axis_sizes.get(CONTEXT_AXIS, 1)
  for name, length in lengths.items():
    if length % shards:
      raise ValueError(
        f"the {length} positions of {name} cannot be split over the {shards} devices of the mesh's "
        f"context axis (mesh {dict(axis_sizes)}): set TASK_FEATURE_LENGTHS to multiples of {shards}, "
        f"such as {multiples_near(length, shards)}, or another size of 'context' in partitioning.PjitPartitioner.mesh"
      )


def get_data_layout(mesh: Mesh, batch_size: int, process: int | None = None) -> DataLayout:
  """Returns which part of the data a process reads. It depends on the mesh rows of its devices.

  Args:
    mesh: the mesh; the devices of a row compute the same examples.
    batch_size: examples in the global batch.
    process: the index of the process; None for this one.
  """
  process = jax.process_index() if process is None else process
  rows_of: dict[int, list[int]] = collections.defaultdict(list)
  names = list(mesh.shape)
  batch_axes = [axis for axis in BATCH_AXES if axis in names]
  order = [*batch_axes, *(axis for axis in names if axis not in batch_axes)]
  grid = mesh.devices.transpose([names.index(axis) for axis in order])
  for row, devices in enumerate(grid.reshape(count_batch_shards(mesh.shape), -1)):
    for owner in {device.process_index for device in devices}:
      rows_of[owner].append(row)
  # Processes with devices in the same rows read the same shard.
  shards = sorted({tuple(rows) for rows in rows_of.values()})
  own_rows = rows_of[process]
  first_reader = min(owner for owner, rows in rows_of.items() if rows == own_rows)
  shard_id, is_first = shards.index(tuple(own_rows)), first_reader == process
  return DataLayout(batch_size, shard_id, len(shards), is_first)


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
    parts = [slice(None)] * len(global_shape)
    for dim, axis in enumerate(mesh_axes):
      if axis is not None:
        length = global_shape[dim] // self.num_chunks[axis]
        parts[dim] = slice(self.chunk_ids[axis] * length, (self.chunk_ids[axis] + 1) * length)
    return LocalChunkInfo(tuple(parts), self.get_replica_id(mesh_axes))

  def get_shard_id(self, sharded_mesh_axes: str | Sequence[str | None]) -> int:
    """Returns the index of this process's part of an array that is split over these axes."""
    return self._number(sharded_mesh_axes, True)

  def get_replica_id(self, sharded_mesh_axes: str | Sequence[str | None]) -> int:
    """Returns the index of this process among those that have the same part."""
    return self._number(sharded_mesh_axes, False)

  def _number(self, axes: str | Sequence[str | None], are_counted: bool) -> int:
    """Returns the index of this process's block along these axes, or along all others."""
    named, number = [axes] if isinstance(axes, str) else axes, 0
    for axis in self.mesh_axes:  # The last one varies fastest.
      if (axis in named) == are_counted:
        number = number * self.num_chunks[axis] + self.chunk_ids[axis]
    return number
