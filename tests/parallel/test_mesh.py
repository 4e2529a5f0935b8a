"""Meshes of eight devices, and those that cannot be."""

from __future__ import annotations

import re

import jax
import pytest
from jax.sharding import AxisType

from rosetta_t5.parallel import default_mesh


@pytest.mark.parametrize(
  ("arguments", "shape"),
  [
    ({"num_partitions": 1}, (8, 1)),
    ({"num_partitions": 2}, (4, 2)),
    ({"num_partitions": 8}, (1, 8)),
    ({"num_partitions": 1, "model_parallel_submesh": (2, 2, 1, 1)}, (2, 4)),
    ({"num_partitions": 1, "ici_mesh_shape": (4, 2)}, (4, 2)),
    ({"num_partitions": 1, "ici_mesh_shape": (2, 2), "dcn_mesh_shape": (2, 1)}, (4, 2)),
  ],
)
def test_devices_are_divided_over_data_and_model(arguments, shape):
  mesh = default_mesh(**arguments)
  assert dict(mesh.shape) == {"data": shape[0], "model": shape[1]}
  assert set(mesh.devices.flat) == set(jax.devices())
  assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)


def test_neighbouring_devices_share_a_copy_of_the_model():
  ids = [[device.id for device in row] for row in default_mesh(2).devices]
  assert ids == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("num_partitions", [3, 16, 0, -2])
def test_partitions_that_do_not_divide_the_devices_are_refused_with_those_that_do(num_partitions):
  text = (
    f"PjitPartitioner.num_partitions = {num_partitions} does not divide the 8 device(s) of this "
    "run: set it to one of [1, 2, 4, 8]"
  )
  with pytest.raises(ValueError, match=re.escape(text)):
    default_mesh(num_partitions)


def test_mesh_shape_of_another_number_of_devices_is_refused():
  with pytest.raises(
    ValueError, match=r"shape \(4, 4\) needs 16 devices, but there are 8: set Pjit"
  ):
    default_mesh(1, ici_mesh_shape=(4, 4))
