"""Which part of each batch a process reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from rosetta_t5.parallel.mesh import batch_shards
from rosetta_t5.parallel.mesh_axes import DATA_AXIS, FSDP_AXIS


@dataclasses.dataclass(frozen=True)
class DataLayout:
  """Which part of each global batch this process reads.

  Attributes:
    batch_size: examples in the global batch.
    shard_id: this process's shard of the data.
    num_shards: shards that the data is read in.
    is_first_host_in_replica_set: whether this process is the first that reads its shard.
  """

  batch_size: int
  shard_id: int
  num_shards: int
  is_first_host_in_replica_set: bool


def check_batch_size(batch_size: int, mesh_sizes: Mapping[str, int]) -> None:
  """Raises ValueError unless a batch can be split over the batch's axes of a mesh of these sizes."""
  shards = batch_shards(mesh_sizes)
  if batch_size < 1:
    raise ValueError(
      f"batch size {batch_size} is no number of examples: set BATCH_SIZE (DatasetConfig.batch_size) to "
      f"a positive multiple of {shards}"
    )
  if batch_size % shards:
    below = batch_size - batch_size % shards
    near = " or ".join(str(size) for size in (below, below + shards) if size)
    raise ValueError(
      f"batch size {batch_size} cannot be split over the {shards} devices of the mesh's {_axes(mesh_sizes)} "
      f"(mesh {dict(mesh_sizes)}): set BATCH_SIZE (in evaluation and inference "
      f"DatasetConfig.batch_size) to a multiple of {shards}, such as {near}"
    )


def _axes(sizes: Mapping[str, int]) -> str:
  if sizes.get(FSDP_AXIS, 1) == 1:
    return f"{DATA_AXIS} axis"
  return f"axes {DATA_AXIS} and {FSDP_AXIS}"


def data_layout(mesh: Mesh, batch_size: int, process: int | None) -> DataLayout:
  """Returns which part of the data a process reads: by the rows of the mesh that its devices stand in.

  Args:
    mesh: the mesh; a row is the devices that work on the same examples.
    batch_size: examples in the global batch.
    process: its index; None for this process.
  """
  process = jax.process_index() if process is None else process
  # Processes whose devices stand in the same rows hold the same part of the batch.
  rows_of: dict[int, tuple[int, ...]] = {}
  for row, devices in enumerate(mesh.devices.reshape(batch_shards(mesh.shape), -1)):
    for owner in sorted({device.process_index for device in devices.flat}):
      rows_of[owner] = (*rows_of.get(owner, ()), row)
  shards = sorted(set(rows_of.values()))
  mine = rows_of[process]
  readers = [owner for owner, rows in sorted(rows_of.items()) if rows == mine]
  return DataLayout(
    batch_size=batch_size,
    shard_id=shards.index(mine),
    num_shards=len(shards),
    is_first_host_in_replica_set=readers[0] == process,
  )
