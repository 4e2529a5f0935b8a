"""Meshes of eight devices, and those that cannot be."""

from __future__ import annotations

import re
import types

import jax
import pytest
from jax.sharding import AxisType

from rosetta_t5.parallel import PjitPartitioner, default_mesh
from rosetta_t5.parallel.mesh import hybrid_grid


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


@pytest.mark.parametrize(
  ("inside", "over_nodes", "needs", "possible"),
  [
    ((4, 4), None, "(4, 4) needs 16", "ici_mesh_shape = (2, 4)"),
    ((2, 2), (3, 1), "(6, 2) needs 12", "dcn_mesh_shape = (2, 1)"),
    ((4, 2), (2, 1), "(8, 2) needs 16", "dcn_mesh_shape = None"),
    ((3, 2), (2, 1), "(6, 2) needs 12", "ici_mesh_shape = (2, 2)"),
    ((3, 3), (3, 1), "(9, 3) needs 27", "ici_mesh_shape = (8, 1) and dcn_mesh_shape = None"),
  ],
)
def test_mesh_shape_of_another_number_of_devices_is_refused_with_one_that_fits(
  inside, over_nodes, needs, possible
):
  text = f"a mesh of shape {needs} devices, but there are 8: set PjitPartitioner.{possible}"
  with pytest.raises(ValueError, match=f"{re.escape(text)}$"):
    default_mesh(1, ici_mesh_shape=inside, dcn_mesh_shape=over_nodes)


@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    ({"num_partitions": 0}, "num_partitions = 0 is no number of devices that share a copy"),
    ({"num_partitions": "2"}, "num_partitions = '2' is no number of devices that share a copy"),
    (
      {"dcn_mesh_shape": (2, 1)},
      "dcn_mesh_shape = (2, 1) says how nodes are laid out, but ici_mesh",
    ),
    ({}, "given neither num_partitions nor model_parallel_submesh nor ici_mesh_shape nor mesh"),
    (
      {"model_parallel_submesh": (3, 1, 1, 1)},
      "model_parallel_submesh = (3, 1, 1, 1), which is 3, does not divide the 8 device(s) of this "
      "run: set its product to one of [1, 2, 4, 8]",
    ),
  ],
)
def test_a_partitioner_says_what_it_was_given_that_cannot_be(arguments, text):
  with pytest.raises(ValueError, match=re.escape(text)):
    _ = PjitPartitioner(**arguments).mesh


def fake_devices(nodes, each):
  """Returns devices as a cluster's GPUs say of themselves: node and process."""
  return [
    types.SimpleNamespace(
      id=n * each + i, slice_index=n, process_index=n * each + i, platform="gpu"
    )
    for n in range(nodes)
    for i in range(each)
  ]


def test_a_hybrid_mesh_keeps_a_nodes_devices_together():
  # Two nodes along data; within a node 2 of data, 2 of model.
  ids = [[d.id for d in row] for row in hybrid_grid(fake_devices(2, 4), (2, 2), (2, 1))]
  assert ids == [[0, 1], [2, 3], [4, 5], [6, 7]]
  # Along model: the nodes come first along it, so rows span both.
  ids = [[d.id for d in row] for row in hybrid_grid(fake_devices(2, 4), (2, 2), (1, 2))]
  assert ids == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_grid_that_would_cut_through_nodes_is_refused_with_those_that_would_not():
  text = "dcn_mesh_shape = (4, 1) is a grid of 4, but the devices are on 2 nodes: set it to sizes"
  with pytest.raises(ValueError, match=re.escape(text) + r".* one of \[1, 2\]"):
    hybrid_grid(fake_devices(2, 4), (1, 2), (4, 1))


def test_a_mesh_of_three_axes_is_no_pair_of_shapes():
  with pytest.raises(ValueError, match=r"must be \(data, model\) each"):
    default_mesh(1, ici_mesh_shape=(2, 2, 2))


@pytest.mark.parametrize(
  ("counts", "sizes"),
  [
    ({"data": 2, "fsdp": 2, "tensor": 2}, (2, 2, 2)),
    ({"tensor": 2}, (4, 1, 2)),
    ({"fsdp": -1}, (1, 8, 1)),
    ({"data": 2, "fsdp": -1}, (2, 4, 1)),
    ({"data": -1, "fsdp": 4}, (2, 4, 1)),
  ],
)
def test_counts_make_a_mesh_and_what_is_left_open_takes_the_rest(counts, sizes):
  mesh = default_mesh(1, counts=counts)
  assert mesh.shape == dict(zip(("data", "fsdp", "model"), sizes, strict=True))
  assert [device.id for device in mesh.devices.flat] == list(range(8))


@pytest.mark.parametrize(
  ("counts", "text"),
  [
    (
      {"data": 2, "fsdp": 3},
      "mesh = {'data': 2, 'fsdp': 3} needs 6 devices, but there are 8. Possible would be {'data': 2, "
      "'fsdp': 4, 'tensor': 1}; ",
    ),
    (
      {"tensor": 16},
      "needs a multiple of 16 devices, but there are 8. Possible would be {'data': 1, ",
    ),
    ({"fsdp": -1, "tensor": -1}, "leaves more than one axis open: only one may be -1"),
    (
      {"data": 8, "tensro": 1},
      "has the axis 'tensro' (did you mean 'tensor'?): the axes are data,",
    ),
    ({"model": 2}, "(T5X's axis `model` is counted by 'tensor')"),
    ({"fsdp": 0}, "gives 'fsdp' the size 0: a size is a whole number from 1 on, or -1"),
    ({"fsdp": 2.0}, "gives 'fsdp' the size 2.0"),
  ],
)
def test_impossible_counts_are_refused_with_possible_ones(counts, text):
  with pytest.raises(ValueError, match=re.escape(text)):
    default_mesh(1, counts=counts)
