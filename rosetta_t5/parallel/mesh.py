"""The device mesh: a grid of devices with the axes `data` and `model`, and `fsdp` where it is asked for."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from rosetta_t5.parallel.mesh_axes import DATA_AXIS, FSDP_AXIS, MODEL_AXIS, axis_sizes

BATCH_AXES = (DATA_AXIS, FSDP_AXIS)


def default_mesh(
  num_partitions: int,
  model_parallel_submesh: tuple[int, ...] | None = None,
  backend: str | None = None,
  ici_mesh_shape: tuple[int, ...] | None = None,
  dcn_mesh_shape: tuple[int, ...] | None = None,
  counts: Mapping[str, int] | None = None,
) -> Mesh:
  """Returns a mesh of all devices, shaped [devices / num_partitions, num_partitions].

  Args:
    num_partitions: devices that share one copy of the model (the size of the axis `model`).
    model_parallel_submesh: T5X's TPU submesh; only its product counts here.
    backend: which backend's devices to take; None for the default one.
    ici_mesh_shape: (data, model) within one slice or node; overrides num_partitions.
    dcn_mesh_shape: (data, model) over slices or nodes; goes with ici_mesh_shape.
    counts: {"data": …, "fsdp": …, "tensor": …} instead of all the others; see `counts.axis_sizes`.

  Raises:
    ValueError: the devices cannot be divided so.
  """
  devices = jax.devices(backend)
  sizes = mesh_sizes(
    len(devices), num_partitions, model_parallel_submesh, ici_mesh_shape, dcn_mesh_shape, counts
  )
  # Axes are Auto: linen's logical constraints fail on jax's default, Explicit.
  types = (AxisType.Auto,) * len(sizes)
  if ici_mesh_shape and dcn_mesh_shape and counts is None:
    return Mesh(
      hybrid_grid(devices, ici_mesh_shape, dcn_mesh_shape), tuple(sizes), axis_types=types
    )
  # Neighbouring devices talk most within a model replica, so `model` is the fastest-moving axis.
  return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)


def mesh_sizes(
  num_devices: int,
  num_partitions: int,
  model_parallel_submesh: tuple[int, ...] | None = None,
  ici_mesh_shape: tuple[int, ...] | None = None,
  dcn_mesh_shape: tuple[int, ...] | None = None,
  counts: Mapping[str, int] | None = None,
) -> dict[str, int]:
  """Returns the size of each axis for so many devices; see `default_mesh`.

  Raises:
    ValueError: they cannot be divided so.
  """
  if counts is not None:
    return axis_sizes(counts, num_devices)
  if not ici_mesh_shape:
    if model_parallel_submesh:
      num_partitions = math.prod(model_parallel_submesh)
    _check_divides(num_partitions, num_devices, model_parallel_submesh)
    return {DATA_AXIS: num_devices // num_partitions, MODEL_AXIS: num_partitions}
  over_nodes = dcn_mesh_shape or (1,) * len(ici_mesh_shape)
  if (len(ici_mesh_shape), len(over_nodes)) != (2, 2):
    raise ValueError(
      f"ici_mesh_shape = {tuple(ici_mesh_shape)} and dcn_mesh_shape = {tuple(over_nodes)} must be "
      "(data, model) each: set both PjitPartitioner.ici_mesh_shape and dcn_mesh_shape to two numbers"
    )
  shape = tuple(int(i * d) for i, d in zip(ici_mesh_shape, over_nodes, strict=True))
  if math.prod(shape) != num_devices:
    raise ValueError(
      f"a mesh of shape {shape} needs {math.prod(shape)} devices, but there are {num_devices}: "
      f"set PjitPartitioner.{_near_shapes(ici_mesh_shape, over_nodes, num_devices)}"
    )
  return dict(zip((DATA_AXIS, MODEL_AXIS), shape, strict=True))


def mesh_reason(
  num_partitions: int,
  model_parallel_submesh: tuple[int, ...] | None,
  ici_mesh_shape: tuple[int, ...] | None,
  dcn_mesh_shape: tuple[int, ...] | None,
  counts: Mapping[str, int] | None,
) -> str:
  """Returns which of the settings the mesh is made of; see `default_mesh`."""
  if counts is not None:
    return f"mesh = {dict(counts)}"
  if ici_mesh_shape:
    over_nodes = f", dcn_mesh_shape = {tuple(dcn_mesh_shape)}" if dcn_mesh_shape else ""
    return f"ici_mesh_shape = {tuple(ici_mesh_shape)}{over_nodes}"
  if model_parallel_submesh:
    return f"model_parallel_submesh = {tuple(model_parallel_submesh)}"
  return f"num_partitions = {num_partitions}"


def _near_shapes(ici_mesh_shape: Sequence[int], over_nodes: Sequence[int], num_devices: int) -> str:
  """Returns settings for so many devices: other nodes if a node is right, else other nodes' insides."""
  nodes, rest = divmod(num_devices, math.prod(ici_mesh_shape))
  if not rest:
    return f"dcn_mesh_shape = ({nodes}, 1)" if nodes > 1 else "dcn_mesh_shape = None"
  each = num_devices // math.prod(over_nodes) if num_devices % math.prod(over_nodes) == 0 else 1
  model = math.gcd(each, ici_mesh_shape[1])
  shape = f"ici_mesh_shape = ({each // model}, {model})"
  return shape if each > 1 else f"ici_mesh_shape = ({num_devices}, 1) and dcn_mesh_shape = None"


def hybrid_grid(
  devices: Sequence[Any], ici_mesh_shape: Sequence[int], dcn_mesh_shape: Sequence[int]
) -> np.ndarray:
  """Returns the devices in a grid whose axes are, each, nodes first and then devices of one node.

  Args:
    devices: all of them.
    ici_mesh_shape: the grid within a node, or within several that are taken together.
    dcn_mesh_shape: the grid of these.

  Raises:
    ValueError: the devices of a node would not stay together.
  """
  nodes: dict[Any, list[Any]] = {}
  for device in sorted(devices, key=lambda d: (node_of(d), d.process_index, d.id)):
    nodes.setdefault(node_of(device), []).append(device)
  blocks = math.prod(dcn_mesh_shape)
  if len(nodes) % blocks and len(nodes) > 1:
    possible = [n for n in range(1, len(nodes) + 1) if len(nodes) % n == 0]
    raise ValueError(
      f"PjitPartitioner.dcn_mesh_shape = {tuple(dcn_mesh_shape)} is a grid of {blocks}, but the devices "
      f"are on {len(nodes)} nodes: set it to sizes whose product is one of {possible}"
    )
  in_order = np.empty(len(devices), dtype=object)
  in_order[:] = [device for node in nodes.values() for device in node]
  ranks = len(ici_mesh_shape)
  pairs = [axis for each in range(ranks) for axis in (each, ranks + each)]
  shape = [i * d for i, d in zip(ici_mesh_shape, dcn_mesh_shape, strict=True)]
  return in_order.reshape(*dcn_mesh_shape, *ici_mesh_shape).transpose(pairs).reshape(shape)


def node_of(device: Any) -> tuple[int, int]:
  """Returns which node a device is in: jax's slice on TPUs and GPUs, on CPUs its process."""
  on_cpu = getattr(device, "platform", "cpu") == "cpu"
  return (getattr(device, "slice_index", 0) or 0, device.process_index if on_cpu else 0)


def batch_shards(sizes: Mapping[str, int]) -> int:
  """Returns how many parts a batch is split in, over the axes `data` and `fsdp`."""
  return math.prod(sizes.get(axis, 1) for axis in BATCH_AXES)


def check_asked(
  num_partitions: int | None,
  model_parallel_submesh: Sequence[int] | None,
  ici_mesh_shape: Sequence[int] | None,
  dcn_mesh_shape: Sequence[int] | None,
  mesh: Mapping[str, int] | None,
) -> None:
  """Checks what a partitioner is given, as far as that can be without devices.

  Raises:
    ValueError: it says nothing, or not one thing.
  """
  if num_partitions is not None and not (
    isinstance(num_partitions, numbers.Integral) and num_partitions > 0
  ):
    raise ValueError(
      f"PjitPartitioner.num_partitions = {num_partitions!r} is no number of devices that share a "
      "copy of the model: set it to a whole number from 1 on"
    )
  if dcn_mesh_shape and not ici_mesh_shape:
    raise ValueError(
      f"PjitPartitioner.dcn_mesh_shape = {tuple(dcn_mesh_shape)} says how nodes are laid out, but "
      "ici_mesh_shape, the devices of each, is not set: set both, each (data, model), or neither"
    )
  described = (num_partitions, model_parallel_submesh, ici_mesh_shape, mesh)
  if not any(described):
    raise ValueError(
      "the partitioner was given neither num_partitions nor model_parallel_submesh nor "
      "ici_mesh_shape nor mesh: set partitioning.PjitPartitioner.num_partitions = 1 for data "
      'parallelism, or mesh = {"data": -1}'
    )
  # T5X's runs set num_partitions = 1, whatever else is set.
  if mesh and (model_parallel_submesh or ici_mesh_shape or num_partitions not in (None, 1)):
    raise ValueError(
      f"PjitPartitioner was given mesh = {dict(mesh)} and num_partitions = {num_partitions}, "
      f"model_parallel_submesh = {model_parallel_submesh}, ici_mesh_shape = {ici_mesh_shape}: set "
      "the last three to None, mesh says everything"
    )
  # T5X's runs set num_partitions = 1, and some of its recipes a submesh besides: that one counts.
  asked = math.prod(model_parallel_submesh or ())
  if model_parallel_submesh and num_partitions not in (None, 1, asked):
    raise ValueError(
      f"PjitPartitioner was given both num_partitions = {num_partitions} and "
      f"model_parallel_submesh = {model_parallel_submesh}, which is {asked}: set one of them to None"
    )


def _check_divides(
  num_partitions: int, num_devices: int, submesh: Sequence[int] | None = None
) -> None:
  if num_partitions < 1 or num_devices % num_partitions:
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    given = f"num_partitions = {num_partitions}"
    if submesh:
      given = f"model_parallel_submesh = {tuple(submesh)}, which is {num_partitions},"
    what = "set its product to" if submesh else "set it to"
    raise ValueError(
      f"PjitPartitioner.{given} does not divide the {num_devices} device(s) of this run: {what} "
      f"one of {divisors}"
    )
