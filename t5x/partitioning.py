"""T5X's `partitioning`: partitioners, meshes, logical axis rules, and each process's data."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, PartitionSpec

from rosetta_t5.parallel import BasePartitioner, DataLayout, PjitPartitioner, default_mesh
from rosetta_t5.parallel import BasePartitioner as BasePjitPartitioner
from rosetta_t5.parallel import PjitPartitioner as ModelBasedPjitPartitioner
from rosetta_t5.parallel.axis_rules import LogicalAxisRules, standard_logical_axis_rules
from rosetta_t5.parallel.data_layout import LocalChunker, LocalChunkInfo
from rosetta_t5.parallel.mesh import DATA_AXIS, MODEL_AXIS
from rosetta_t5.parallel.partitioner import PartitionedFunction

PyTree = Any


class AxisNames(tuple):
  """Axis names that are one leaf of a tree for jax, which treats a plain tuple as a subtree (T5X)."""

  def __new__(cls, *names: Any) -> AxisNames:
    """Returns the names as one tuple."""
    return tuple.__new__(cls, names)

  def __repr__(self) -> str:
    """Returns the names after the name of the class."""
    return f"AxisNames{tuple(self)!r}"


class PjittedFnWithContext(PartitionedFunction):
  """A function that runs under its mesh, as a user's partitioner returns it (T5X).

  The function may be made by `jax.experimental.pjit.pjit`, which reads the mesh of an older context.
  """

  @contextlib.contextmanager
  def _context(self) -> Iterator[None]:
    with super()._context(), contextlib.ExitStack() as stack:
      with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        stack.enter_context(self._mesh)
      yield


def global_mesh_defined() -> bool:
  """Returns whether the calling code runs or is traced within a mesh context."""
  return not jax.sharding.get_abstract_mesh().empty


def with_sharding_constraint(x: PyTree, axis_resources: Any) -> PyTree:
  """Constrains the sharding of `x` within a mesh context; returns `x` unchanged outside of one."""
  return jax.lax.with_sharding_constraint(x, axis_resources) if global_mesh_defined() else x


def bounds_from_last_device(last_device: Any) -> tuple[int, ...]:
  """Returns the size of the grid of devices: (x, y, z, core) on TPUs, else (processes, devices each)."""
  if hasattr(last_device, "coords"):
    return (*(int(c) + 1 for c in last_device.coords), last_device.core_on_chip + 1)
  return (jax.process_count(), jax.local_device_count())


def get_coords(device: Any) -> tuple[int, ...]:
  """Returns a device's position in the grid of `bounds_from_last_device`."""
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
  """Returns a mesh of shape [devices / model size, model size] with the axes `data` and `model`.

  Args:
    model_parallel_submesh: T5X's TPU submesh; the product of its sizes is the model size.
    input_devices: the devices; empty for all devices.
    input_local_devices: ignored; T5X tiles TPUs with it.
    tile_by_host_if_needed: ignored; T5X tiles TPUs with it.
    backend: the backend whose devices are used if `input_devices` is empty; None for the default.

  Raises:
    ValueError: the number of devices is not a multiple of the model size.
  """
  if not input_devices:
    return default_mesh(1, tuple(model_parallel_submesh), backend)
  size = int(np.prod(model_parallel_submesh))
  devices = sorted(input_devices, key=get_coords)
  grid = np.array(devices, dtype=object).reshape(-1, size)
  return Mesh(grid, (DATA_AXIS, MODEL_AXIS), axis_types=(AxisType.Auto,) * 2)


def host_local_array_to_global_array(arr_tree: PyTree, mesh: Mesh, pspecs: PyTree) -> PyTree:
  """Returns global arrays assembled from each process's part; None in `pspecs` means replicated."""
  specs = jax.tree.map(lambda spec: spec or PartitionSpec(), pspecs, is_leaf=lambda x: x is None)
  return multihost_utils.host_local_array_to_global_array(arr_tree, mesh, specs)
