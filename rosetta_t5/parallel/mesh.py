"""The device mesh: a grid of devices with the axes `data` and `model`, and optionally others."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from rosetta_t5.parallel.mesh_axes import (
  BATCH_AXES,
  CONTEXT_AXIS,
  DATA_AXIS,
  EXPERT_AXIS,
  FSDP_AXIS,
  MODEL_AXIS,
  OPTIONAL_AXES,
  sizes_from_counts,
)

Shape = tuple[int, ...]


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
    ValueError: the number of devices does not fit.
  """
  config = MeshConfig(num_partitions, model_parallel_submesh, ici_mesh_shape, dcn_mesh_shape)
  return config.build(jax.devices(backend))


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """The settings of a partitioner that define its mesh; see `PjitPartitioner`.

  With `expert_partitions`, T5X's axis `data` is factored: the size of `expert` is the largest divisor that
  is at most `expert_partitions`.
  """

  num_partitions: int | None = None
  model_parallel_submesh: Shape | None = None
  ici_mesh_shape: Shape | None = None
  dcn_mesh_shape: Shape | None = None
  counts: Mapping[str, int] | None = None
  expert_partitions: int | None = None
  order: tuple[str, ...] = ()

  @property
  def batch_axes(self) -> tuple[str, ...]:
    """The mesh axes that a batch is split over, outermost first."""
    if self.counts:
      absent = {axis for axis in OPTIONAL_AXES if axis not in self.counts}
    else:
      absent = {FSDP_AXIS, *OPTIONAL_AXES} - ({EXPERT_AXIS} if self.expert_partitions else set())
    return tuple(axis for axis in BATCH_AXES if axis not in absent)

  @property
  def ruled_axes(self) -> tuple[str, ...]:
    """The mesh axes for which `extend_axis_rules` adds rules: those of the batch, and `context`."""
    has_context = CONTEXT_AXIS in (self.counts or ())
    return (*self.batch_axes, *([CONTEXT_AXIS] if has_context else []))

  def build(self, devices: Sequence[Any]) -> Mesh:
    """Returns the mesh of these devices.

    Raises:
      ValueError: the number of devices does not fit.
    """
    sizes = self.axis_sizes(len(devices))
    # Axes are Auto: linen's logical constraints fail on jax's default, Explicit.
    types = (AxisType.Auto,) * len(sizes)
    if self.ici_mesh_shape and self.dcn_mesh_shape and not self.counts:
      grid = hybrid_grid(devices, self.ici_mesh_shape, self.dcn_mesh_shape)
      grid = grid.reshape(tuple(sizes.values()))
      return Mesh(grid, tuple(sizes), axis_types=types)
    # `model` is usually the innermost axis: neighboring devices communicate most within a model replica.
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)

  def axis_sizes(self, num_devices: int) -> dict[str, int]:
    """Returns the size of each axis of a mesh of `num_devices` devices.

    Raises:
      ValueError: the number of devices does not fit.
    """
    if self.counts:
      return sizes_from_counts(self.counts, num_devices, self.order)
    sizes = self._t5x_sizes(num_devices)
    if not self.expert_partitions:
      return sizes
    data = sizes[DATA_AXIS]
    experts = max(n for n in range(1, min(data, self.expert_partitions) + 1) if data % n == 0)
    return {DATA_AXIS: data // experts, EXPERT_AXIS: experts, MODEL_AXIS: sizes[MODEL_AXIS]}

  def _t5x_sizes(self, num_devices: int) -> dict[str, int]:
    """Returns the sizes of the axes `data` and `model` from T5X's settings."""
    if self.ici_mesh_shape:
      return self._hybrid_sizes(self.ici_mesh_shape, num_devices)
    submesh = self.model_parallel_submesh
    size = math.prod(submesh) if submesh else self.num_partitions
    size = 1 if size is None else size
    if size < 1 or num_devices % size:
      divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
      product = f", whose product is {size}," if submesh else ""
      raise ValueError(
        f"PjitPartitioner.{self.description}{product} does not divide the {num_devices} device(s) of "
        f"this run: set {'its product' if submesh else 'it'} to one of {divisors}"
      )
    return {DATA_AXIS: num_devices // size, MODEL_AXIS: size}

  def _hybrid_sizes(self, ici_mesh_shape: Shape, num_devices: int) -> dict[str, int]:
    dcn_mesh_shape = self.dcn_mesh_shape or (1,) * len(ici_mesh_shape)
    if (len(ici_mesh_shape), len(dcn_mesh_shape)) != (2, 2):
      raise ValueError(
        "PjitPartitioner.ici_mesh_shape and dcn_mesh_shape must each be two integers (data, model), got "
        f"{tuple(ici_mesh_shape)} and {tuple(dcn_mesh_shape)}"
      )
    shape = tuple(int(i * d) for i, d in zip(ici_mesh_shape, dcn_mesh_shape, strict=True))
    if math.prod(shape) != num_devices:
      raise ValueError(
        f"a mesh of shape {shape} needs {math.prod(shape)} devices, but there are {num_devices}: "
        f"set PjitPartitioner.{_suggest_shapes(ici_mesh_shape, dcn_mesh_shape, num_devices)}"
      )
    return dict(zip((DATA_AXIS, MODEL_AXIS), shape, strict=True))

  @property
  def description(self) -> str:
    """The settings that decide the shape of the mesh."""
    if self.counts:
      return f"mesh = {dict(self.counts)}"
    if self.ici_mesh_shape:
      dcn = f", dcn_mesh_shape = {tuple(self.dcn_mesh_shape)}" if self.dcn_mesh_shape else ""
      return f"ici_mesh_shape = {tuple(self.ici_mesh_shape)}{dcn}"
    if self.model_parallel_submesh:
      return f"model_parallel_submesh = {tuple(self.model_parallel_submesh)}"
    return f"num_partitions = {1 if self.num_partitions is None else self.num_partitions}"

  def check(self) -> None:
    """Checks the settings, as far as that is possible without devices.

    Raises:
      ValueError: no mesh is defined, or several are.
    """
    partitions = self.num_partitions
    is_positive = isinstance(partitions, numbers.Integral) and partitions > 0
    if partitions is not None and not is_positive:
      raise ValueError(
        "PjitPartitioner.num_partitions, the number of devices that share one copy of the model, must "
        f"be a positive integer, got {partitions!r}"
      )
    if self.dcn_mesh_shape and not self.ici_mesh_shape:
      raise ValueError(
        f"PjitPartitioner.dcn_mesh_shape = {tuple(self.dcn_mesh_shape)} requires ici_mesh_shape, the "
        "mesh within a node. Set both, each (data, model), or neither."
      )
    if self.order and not self.counts:
      raise ValueError(
        f"PjitPartitioner.mesh_order = {self.order} requires mesh, whose axes it orders: set mesh, or "
        "remove mesh_order"
      )
    self._check_one_definition()

  def _check_one_definition(self) -> None:
    """Raises ValueError if no setting defines the mesh, or several that disagree."""
    partitions, submesh = self.num_partitions, self.model_parallel_submesh
    shape = submesh or self.ici_mesh_shape
    if not (partitions or shape or self.counts):
      raise ValueError(
        "PjitPartitioner needs one of num_partitions, model_parallel_submesh, ici_mesh_shape and mesh: "
        "set partitioning.PjitPartitioner.num_partitions = 1 for data parallelism, or "
        'mesh = {"data": -1}'
      )
    # T5X's runs set num_partitions = 1 together with any other setting, which then takes precedence.
    if self.counts and (shape or partitions not in (None, 1)):
      raise ValueError(
        f"PjitPartitioner has mesh = {dict(self.counts)} and also num_partitions = {partitions}, "
        f"model_parallel_submesh = {submesh}, ici_mesh_shape = {self.ici_mesh_shape}: set the last "
        "three to None, because mesh defines every axis"
      )
    if submesh and partitions not in (None, 1, math.prod(submesh)):
      raise ValueError(
        f"PjitPartitioner has num_partitions = {partitions} and also model_parallel_submesh = "
        f"{submesh}, whose product is {math.prod(submesh)}: set one of them to None"
      )


def _suggest_shapes(
  ici_mesh_shape: Sequence[int], dcn_mesh_shape: Sequence[int], num_devices: int
) -> str:
  """Returns settings that fit: another dcn_mesh_shape if that is enough, else another ici_mesh_shape."""
  nodes, rest = divmod(num_devices, math.prod(ici_mesh_shape))
  if not rest:
    return f"dcn_mesh_shape = ({nodes}, 1)" if nodes > 1 else "dcn_mesh_shape = None"
  on_node, rest = divmod(num_devices, math.prod(dcn_mesh_shape))
  if rest or on_node == 1:
    return f"ici_mesh_shape = ({num_devices}, 1) and dcn_mesh_shape = None"
  model = math.gcd(on_node, ici_mesh_shape[1])
  return f"ici_mesh_shape = ({on_node // model}, {model})"


def hybrid_grid(
  devices: Sequence[Any], ici_mesh_shape: Sequence[int], dcn_mesh_shape: Sequence[int]
) -> np.ndarray:
  """Returns the devices as a grid; along each axis the nodes come first, then the devices of a node.

  Args:
    devices: all devices.
    ici_mesh_shape: the grid within a node, or within several nodes that form one block.
    dcn_mesh_shape: the grid of these blocks.

  Raises:
    ValueError: the blocks would split a node.
  """
  nodes = len({_node_of(device) for device in devices})
  if nodes % math.prod(dcn_mesh_shape) and nodes > 1:
    possible = [n for n in range(1, nodes + 1) if nodes % n == 0]
    raise ValueError(
      f"the product of PjitPartitioner.dcn_mesh_shape = {tuple(dcn_mesh_shape)} must divide the number "
      f"of nodes, {nodes}: set it to sizes whose product is one of {possible}"
    )
  in_order = np.empty(len(devices), dtype=object)
  in_order[:] = sorted(devices, key=lambda d: (_node_of(d), d.process_index, d.id))
  # Bring both parts of an axis together: (nodes, nodes, devices, devices) → (nodes, devices) twice.
  ndim = len(ici_mesh_shape)
  pairs = [part for axis in range(ndim) for part in (axis, ndim + axis)]
  shape = [i * d for i, d in zip(ici_mesh_shape, dcn_mesh_shape, strict=True)]
  return in_order.reshape(*dcn_mesh_shape, *ici_mesh_shape).transpose(pairs).reshape(shape)


def _node_of(device: Any) -> tuple[int, int]:
  """Returns the node of a device: jax's slice on TPUs and GPUs, the process on CPUs."""
  on_cpu = getattr(device, "platform", "cpu") == "cpu"
  return (getattr(device, "slice_index", 0) or 0, device.process_index if on_cpu else 0)
