"""The device mesh: a grid of devices with the axes `data` and `model`."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

DATA_AXIS = "data"
MODEL_AXIS = "model"


def default_mesh(
  num_partitions: int,
  model_parallel_submesh: tuple[int, ...] | None = None,
  backend: str | None = None,
  ici_mesh_shape: tuple[int, ...] | None = None,
  dcn_mesh_shape: tuple[int, ...] | None = None,
) -> Mesh:
  """Returns a mesh of all devices, shaped [devices / num_partitions, num_partitions].

  Args:
    num_partitions: devices that share one copy of the model (the size of the axis `model`).
    model_parallel_submesh: T5X's TPU submesh; only its product counts here.
    backend: which backend's devices to take; None for the default one.
    ici_mesh_shape: (data, model) within one slice or node; overrides num_partitions.
    dcn_mesh_shape: (data, model) over slices or nodes; goes with ici_mesh_shape.

  Raises:
    ValueError: the devices cannot be divided so.
  """
  devices = jax.devices(backend)
  shape = mesh_shape(
    len(devices), num_partitions, model_parallel_submesh, ici_mesh_shape, dcn_mesh_shape
  )
  # Neighbouring devices talk most within a model replica, so `model` is the fastest-moving axis.
  # Axes are Auto: linen's logical constraints fail on jax's default, Explicit.
  return jax.make_mesh(
    shape, (DATA_AXIS, MODEL_AXIS), axis_types=(AxisType.Auto,) * 2, devices=devices
  )


def mesh_shape(
  num_devices: int,
  num_partitions: int,
  model_parallel_submesh: tuple[int, ...] | None = None,
  ici_mesh_shape: tuple[int, ...] | None = None,
  dcn_mesh_shape: tuple[int, ...] | None = None,
) -> tuple[int, ...]:
  """Returns the sizes of the axes `data` and `model` for so many devices; see `default_mesh`.

  Raises:
    ValueError: they cannot be divided so.
  """
  if not ici_mesh_shape:
    if model_parallel_submesh:
      num_partitions = int(np.prod(model_parallel_submesh))
    _check_divides(num_partitions, num_devices)
    return (num_devices // num_partitions, num_partitions)
  over_nodes = dcn_mesh_shape or (1,) * len(ici_mesh_shape)
  shape = tuple(int(i * d) for i, d in zip(ici_mesh_shape, over_nodes, strict=True))
  if int(np.prod(shape)) != num_devices:
    raise ValueError(
      f"a mesh of shape {shape} needs {int(np.prod(shape))} devices, but there are {num_devices}: "
      "set PjitPartitioner.ici_mesh_shape and dcn_mesh_shape to sizes whose product is that"
    )
  return shape


def _check_divides(num_partitions: int, num_devices: int) -> None:
  if num_partitions < 1 or num_devices % num_partitions:
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    raise ValueError(
      f"PjitPartitioner.num_partitions = {num_partitions} does not divide the {num_devices} "
      f"device(s) of this run: set it to one of {divisors}"
    )
