"""The device mesh: a grid of devices with the axes `data` and `model`, and optionally others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from rosetta_t5.argument_types import near_hint

Shape = tuple[int, ...]

PIPELINE_AXIS = "pipeline"
DATA_AXIS = "data"
EXPERT_AXIS = "expert"
FSDP_AXIS = "fsdp"
CONTEXT_AXIS = "context"
MODEL_AXIS = "model"
# The mesh axes that a batch is split over, in the order in which they split its rows.
BATCH_AXES = (PIPELINE_AXIS, EXPERT_AXIS, DATA_AXIS, FSDP_AXIS)
# The axes that a mesh has only if a user's setting names them.
OPTIONAL_AXES = (PIPELINE_AXIS, EXPERT_AXIS, CONTEXT_AXIS)
# The names of the axes in `PjitPartitioner.mesh`, outermost first. Tensor parallelism keeps T5X's name for
# the mesh axis, `model`, which users' axis rules and models refer to.
_COUNTED = (PIPELINE_AXIS, DATA_AXIS, EXPERT_AXIS, FSDP_AXIS, CONTEXT_AXIS, "tensor")


def default_mesh(
  num_partitions: int,
  model_parallel_submesh: Shape | None = None,
  backend: str | None = None,
  ici_mesh_shape: Shape | None = None,
  dcn_mesh_shape: Shape | None = None,
) -> Mesh:
  """Returns a mesh of all devices, by default of shape [devices / num_partitions, num_partitions].

  Args:
    num_partitions: the devices that share one copy of the model (the size of the axis `model`).
    model_parallel_submesh: T5X's TPU submesh; only the product of its sizes is used.
    backend: the backend whose devices are used; None for the default one.
    ici_mesh_shape: (data, model) within one slice or node; overrides num_partitions.
    dcn_mesh_shape: (data, model) over slices or nodes; requires ici_mesh_shape.

  Raises:
    ValueError: the settings contradict each other, or the number of devices does not fit.
  """
  shapes = (model_parallel_submesh, ici_mesh_shape, dcn_mesh_shape)
  return mesh_config(num_partitions, *shapes).build(jax.devices(backend))


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """The axes of a mesh; see `mesh_config`, which makes it from the settings of a partitioner.

  Attributes:
    sizes: the size of each axis, outermost first; -1 for all remaining devices.
    setting: the settings of `PjitPartitioner` that define the sizes.
    grids: the grids (data, model) within a node and over nodes, if both are set.
    max_experts: if set, T5X's axis `data` is factored: the size of `expert` is the largest divisor of
      it that is at most this.
  """

  sizes: Mapping[str, int]
  setting: str
  grids: tuple[Shape, Shape] | None = None
  max_experts: int | None = None

  @property
  def axes(self) -> tuple[str, ...]:
    """The names of all mesh axes."""
    return (*self.sizes, *([EXPERT_AXIS] if self.max_experts else []))

  @property
  def batch_axes(self) -> tuple[str, ...]:
    """The mesh axes that a batch is split over, in the order in which they split its rows."""
    return tuple(axis for axis in BATCH_AXES if axis in self.axes)

  def build(self, devices: Sequence[Any]) -> Mesh:
    """Returns the mesh of these devices.

    Raises:
      ValueError: the number of devices does not fit.
    """
    sizes = self.axis_sizes(len(devices))
    # Axes are Auto: linen's logical constraints fail on jax's default, Explicit.
    types = (AxisType.Auto,) * len(sizes)
    if self.grids:
      grid = hybrid_grid(devices, *self.grids).reshape(tuple(sizes.values()))
      return Mesh(grid, tuple(sizes), axis_types=types)
    # `model` is usually the innermost axis: neighboring devices communicate most within a model replica.
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)

  def axis_sizes(self, num_devices: int) -> dict[str, int]:
    """Returns the size of each axis of a mesh of `num_devices` devices.

    Raises:
      ValueError: the number of devices does not fit.
    """
    given = abs(math.prod(self.sizes.values()))
    is_open = -1 in self.sizes.values()
    if num_devices % given or (not is_open and given != num_devices):
      raise ValueError(
        f"partitioning.PjitPartitioner.{self.setting} needs {'a multiple of ' * is_open}{given} devices, "
        f"but there are {num_devices}: set sizes whose product divides {num_devices}"
      )
    sizes = {axis: num_devices // given if n == -1 else n for axis, n in self.sizes.items()}
    if not self.max_experts:
      return sizes
    data = sizes[DATA_AXIS]
    experts = max(n for n in range(1, min(data, self.max_experts) + 1) if data % n == 0)
    return {DATA_AXIS: data // experts, EXPERT_AXIS: experts, MODEL_AXIS: sizes[MODEL_AXIS]}


def mesh_config(
  num_partitions: int | None = None,
  model_parallel_submesh: Shape | None = None,
  ici_mesh_shape: Shape | None = None,
  dcn_mesh_shape: Shape | None = None,
  mesh: Mapping[str, int] | None = None,
  mesh_order: Sequence[str] = (),
) -> MeshConfig:
  """Returns the mesh that the settings of a partitioner define; see `PjitPartitioner`.

  Raises:
    ValueError: no mesh is defined, or several are, or a setting is impossible.
  """
  if (dcn_mesh_shape and not ici_mesh_shape) or (mesh_order and not mesh):
    raise ValueError(
      f"PjitPartitioner.dcn_mesh_shape = {dcn_mesh_shape} requires ici_mesh_shape, and mesh_order = "
      f"{tuple(mesh_order)} requires mesh: set both, or neither"
    )
  if ici_mesh_shape and not mesh:  # As in T5X, it takes precedence.
    return _hybrid_config(ici_mesh_shape, dcn_mesh_shape)
  # T5X's runs set num_partitions = 1 together with any other setting, which then takes precedence.
  submesh_size = math.prod(model_parallel_submesh or ())
  settings = {
    "num_partitions": num_partitions if num_partitions not in (1, submesh_size) else None,
    "model_parallel_submesh": model_parallel_submesh,
    "ici_mesh_shape": ici_mesh_shape,
    "mesh": mesh,
  }
  given = dict(filter(lambda setting: setting[1], settings.items()))
  if len(given) > 1 or not (given or num_partitions):
    raise ValueError(
      f"PjitPartitioner needs one of {', '.join(settings)}, got {given}: set "
      "partitioning.PjitPartitioner.num_partitions = 1 for data parallelism, or mesh = "
      '{"data": -1}, and the others to None'
    )
  [(name, value)] = (given or {"num_partitions": num_partitions}).items()
  # One of the two numbers is 1, or they are equal.
  sizes = {DATA_AXIS: -1, MODEL_AXIS: max(submesh_size, num_partitions or 1)}
  return MeshConfig(_counted_sizes(mesh, mesh_order) if mesh else sizes, f"{name} = {value}")


def _hybrid_config(ici: Shape, dcn: Shape | None) -> MeshConfig:
  if {len(ici), len(dcn or ici)} != {2}:
    raise ValueError(
      "PjitPartitioner.ici_mesh_shape and dcn_mesh_shape must each be two integers (data, model), got "
      f"{tuple(ici)} and {dcn}"
    )
  data, model = (i * d for i, d in zip(ici, dcn or (1, 1), strict=True))
  setting = f"ici_mesh_shape = {tuple(ici)}" + (f", dcn_mesh_shape = {tuple(dcn)}" if dcn else "")
  return MeshConfig({DATA_AXIS: data, MODEL_AXIS: model}, setting, (ici, dcn) if dcn else None)


def _counted_sizes(counts: Mapping[str, int], order: Sequence[str]) -> dict[str, int]:
  """Returns the sizes of the mesh axes, outermost first; the axis of `tensor` is called `model`.

  Args:
    counts: the size of each axis by name. One of them may be -1, which means all remaining devices; so
      is `data` by default. The others are 1 by default, and the `OPTIONAL_AXES` do not exist.
    order: the names of the outermost axes.
  """
  names = ", ".join(_COUNTED)
  for name, size in counts.items():
    if name not in _COUNTED or type(size) is not int or size < -1 or size == 0:
      raise ValueError(
        f"PjitPartitioner.mesh = {dict(counts)}: {name!r} must be one of {names}"
        f"{near_hint(str(name), _COUNTED, 0.5)}, and its size a positive integer, or -1 for all remaining "
        f"devices, got {size!r}"
      )
  if list(counts.values()).count(-1) > 1:
    raise ValueError(f"PjitPartitioner.mesh = {dict(counts)}: only one axis may be -1")
  if not set(order) <= set(_COUNTED) or len(set(order)) < len(order):
    raise ValueError(
      f"PjitPartitioner.mesh_order must be different axes among {names}, got {tuple(order)}"
    )
  default = {DATA_AXIS: 1 if -1 in counts.values() else -1, FSDP_AXIS: 1, "tensor": 1}
  sizes = default | dict(counts)
  in_order = sorted(sizes, key=[*order, *_COUNTED].index)
  return {MODEL_AXIS if name == "tensor" else name: sizes[name] for name in in_order}


def hybrid_grid(
  devices: Sequence[Any], ici_mesh_shape: Sequence[int], dcn_mesh_shape: Sequence[int]
) -> np.ndarray:
  """Returns the devices as a grid; along each axis the nodes come first, then the devices of a node.

  Args:
    devices: all devices.
    ici_mesh_shape: (data, model) within a node, or within several nodes that form one block.
    dcn_mesh_shape: (data, model) over these blocks.
  """
  # jax's slice is the node of a TPU or GPU; on CPUs it is the process.
  in_order = sorted(
    devices, key=lambda d: (getattr(d, "slice_index", 0) or 0, d.process_index, d.id)
  )
  grid = np.array(in_order, dtype=object).reshape(*dcn_mesh_shape, *ici_mesh_shape)
  shape = [i * d for i, d in zip(ici_mesh_shape, dcn_mesh_shape, strict=True)]
  return grid.transpose(0, 2, 1, 3).reshape(shape)


def count_batch_shards(axis_sizes: Mapping[str, int]) -> int:
  """Returns how many parts a batch is split into, over the axes `BATCH_AXES`."""
  return math.prod(axis_sizes.get(axis, 1) for axis in BATCH_AXES)


def axis_names(entry: str | Sequence[str] | None) -> tuple[str, ...]:
  """Returns the mesh axes in an entry of a PartitionSpec, which is None, one name or several."""
  return (entry,) if isinstance(entry, str) else tuple(entry or ())
