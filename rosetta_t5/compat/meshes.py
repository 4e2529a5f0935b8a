"""T5X's functions for meshes, for users' code that calls them; runs use `default_mesh`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from rosetta_t5.parallel.mesh import default_mesh
from rosetta_t5.parallel.mesh_axes import DATA_AXIS, MODEL_AXIS

PyTree = Any


class AxisNames(tuple):
  """Axis names that jax treats as one leaf of a tree, unlike a tuple (T5X)."""

  def __new__(cls, *names: Any) -> AxisNames:
    """Returns the names as one object."""
    return tuple.__new__(cls, names)

  def __repr__(self) -> str:
    """Returns the names with the name of the class."""
    return f"AxisNames{tuple(self)!r}"


def global_mesh_defined() -> bool:
  """Returns whether this code runs, or is traced, under a mesh."""
  return not jax.sharding.get_abstract_mesh().empty


def with_sharding_constraint(x: PyTree, axis_resources: Any) -> PyTree:
  """Constrains the sharding of the arrays; without a mesh, returns them unchanged."""
  if not global_mesh_defined():
    return x
  return jax.lax.with_sharding_constraint(x, axis_resources)


def bounds_from_last_device(last_device: Any) -> tuple[int, ...]:
  """Returns the size of the grid of devices: (x, y, z, core) on TPUs, else (processes, devices each)."""
  if hasattr(last_device, "coords"):
    return (*(int(c) + 1 for c in last_device.coords), last_device.core_on_chip + 1)
  return (jax.process_count(), jax.local_device_count())


def get_coords(device: Any) -> tuple[int, ...]:
  """Returns the coordinates of a device in that grid."""
  if hasattr(device, "coords"):
    return (*device.coords, device.core_on_chip)
  return (device.process_index, device.id % jax.local_device_count())


def get_mesh(
  model_parallel_submesh: Sequence[int],
  input_devices: Sequence[Any] = (),
  input_local_devices: Sequence[Any] = (),
  tile_by_host_if_needed: bool = True,
  backend: str | None = None,
) -> Mesh:
  """Returns a mesh whose axis `model` has the size of the submesh; `data` has the remaining factor.

  Args:
    model_parallel_submesh: T5X's TPU submesh; only the product of its sizes is used.
    input_devices: the devices; empty for all.
    input_local_devices: ignored; T5X uses it for tiling on TPUs.
    tile_by_host_if_needed: ignored, for the same reason.
    backend: the backend whose devices are used if none are given.

  Raises:
    ValueError: the product does not divide the number of devices.
  """
  del input_local_devices, tile_by_host_if_needed
  if not input_devices:
    return default_mesh(1, tuple(model_parallel_submesh), backend)
  size = int(np.prod(model_parallel_submesh))
  devices = sorted(input_devices, key=get_coords)
  if len(devices) % size:
    raise ValueError(
      f"get_mesh with model_parallel_submesh = {tuple(model_parallel_submesh)} needs a multiple of {size} "
      f"devices, got {len(devices)}"
    )
  grid = np.array(devices, dtype=object).reshape(-1, size)
  return Mesh(grid, (DATA_AXIS, MODEL_AXIS), axis_types=(AxisType.Auto,) * 2)


def get_cpu_mesh() -> Mesh:
  """Returns a mesh with a row of `data` for each process, its devices along `model`."""
  grid = np.empty((jax.process_count(), jax.local_device_count()), dtype=object)
  for device in jax.devices():
    grid[get_coords(device)] = device
  return Mesh(grid, (DATA_AXIS, MODEL_AXIS), axis_types=(AxisType.Auto,) * 2)


def get_gpu_mesh(num_partitions: int) -> Mesh:
  """Returns a mesh whose axis `model` stays within a node, where links are fast, if possible."""
  return default_mesh(num_partitions)


def host_local_array_to_global_array(arr_tree: PyTree, mesh: Mesh, pspecs: PyTree) -> PyTree:
  """Returns global arrays from each process's part of them; a spec of None replicates."""
  from jax.experimental import multihost_utils

  specs = jax.tree.map(
    lambda spec: PartitionSpec() if spec is None else spec, pspecs, is_leaf=lambda x: x is None
  )
  return multihost_utils.host_local_array_to_global_array(arr_tree, mesh, specs)
