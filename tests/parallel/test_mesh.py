"""Meshes of eight devices, and the errors for impossible ones."""

from __future__ import annotations

import re
import types

import jax
import pytest
from jax.sharding import AxisType

from rosetta_t5.parallel import PjitPartitioner, default_mesh
from rosetta_t5.parallel.mesh import hybrid_grid, mesh_config
from rosetta_t5.plan.estimate import describe_placement


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


def test_partitions_that_do_not_divide_the_devices_are_an_error():
  text = (
    "PjitPartitioner.num_partitions = 3 needs a multiple of 3 devices, but there are 8: set sizes "
    "whose product divides 8"
  )
  with pytest.raises(ValueError, match=re.escape(text)):
    default_mesh(3)


@pytest.mark.parametrize(
  ("inside", "over_nodes", "needs"),
  [
    ((4, 4), None, "(4, 4) needs 16"),
    ((2, 2), (3, 1), "(2, 2), dcn_mesh_shape = (3, 1) needs 12"),
  ],
)
def test_a_mesh_shape_for_another_number_of_devices_is_an_error(inside, over_nodes, needs):
  text = f"ici_mesh_shape = {needs} devices, but there are 8: set"
  with pytest.raises(ValueError, match=re.escape(text)):
    default_mesh(1, ici_mesh_shape=inside, dcn_mesh_shape=over_nodes)


@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    ({"num_partitions": 0}, "got {}: set"),
    (
      {"dcn_mesh_shape": (2, 1)},
      "dcn_mesh_shape = (2, 1) requires ici_mesh_shape",
    ),
    (
      {"num_partitions": 1, "mesh_order": ("data",)},
      "mesh_order = ('data',) requires mesh: set both, or neither",
    ),
    (
      {},
      "needs one of num_partitions, model_parallel_submesh, ici_mesh_shape, mesh, got {}: set",
    ),
    (
      {"model_parallel_submesh": (3, 1, 1, 1)},
      "model_parallel_submesh = (3, 1, 1, 1) needs a multiple of 3 devices, but there are 8",
    ),
  ],
)
def test_an_impossible_setting_of_a_partitioner_is_an_error(arguments, text):
  with pytest.raises(ValueError, match=re.escape(text)):
    _ = PjitPartitioner(**arguments).mesh


def fake_devices(nodes, each):
  """Returns devices with the attributes of a cluster's GPUs: node and process."""
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


def test_mesh_shapes_must_have_two_axes():
  with pytest.raises(
    ValueError, match=r"must each be two integers \(data, model\), got \(2, 2, 2\)"
  ):
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
def test_counts_define_a_mesh_and_the_open_axis_takes_the_remaining_devices(counts, sizes):
  mesh = mesh_config(mesh=counts).build(jax.devices())
  assert mesh.shape == dict(zip(("data", "fsdp", "model"), sizes, strict=True))
  assert [device.id for device in mesh.devices.flat] == list(range(8))


@pytest.mark.parametrize(
  ("counts", "text"),
  [
    (
      {"data": 2, "fsdp": 3},
      "mesh = {'data': 2, 'fsdp': 3} needs 6 devices, but there are 8: set sizes whose product",
    ),
    (
      {"tensor": 16},
      "needs a multiple of 16 devices, but there are 8",
    ),
    ({"fsdp": -1, "tensor": -1}, "only one axis may be -1"),
    (
      {"data": 8, "tensro": 1},
      "'tensro' must be one of pipeline, data, expert, fsdp, context, tensor (did you mean 'tensor'?)",
    ),
    ({"fsdp": 0}, "and its size a positive integer, or -1 for all remaining devices, got 0"),
    ({"fsdp": 2.0}, "remaining devices, got 2.0"),
  ],
)
def test_impossible_counts_are_an_error(counts, text):
  with pytest.raises(ValueError, match=re.escape(text)):
    mesh_config(mesh=counts).build(jax.devices())


def test_the_order_of_the_axes_can_be_set():
  mesh = {"pipeline": 2, "data": 2, "tensor": 2}
  usual = PjitPartitioner(mesh=mesh).mesh
  assert usual.axis_names == ("pipeline", "data", "fsdp", "model")
  changed = PjitPartitioner(mesh=mesh, mesh_order=("data", "tensor")).mesh
  assert changed.axis_names == ("data", "model", "pipeline", "fsdp")
  assert [device.id for device in changed.devices[0, 0].flat] == [0, 1]
  with pytest.raises(
    ValueError, match=r"mesh_order must be different axes among .*got \('model',\)"
  ):
    PjitPartitioner(mesh=mesh, mesh_order=("model",)).mesh_config.axis_sizes(8)


def test_outer_axes_are_between_nodes():
  mesh = {"pipeline": 4, "data": 2, "fsdp": 1, "model": 8}
  text = "within a node of 8 GPUs: model 8; between nodes: pipeline 4, data 2"
  assert describe_placement(mesh) == text
  assert describe_placement({"data": 4, "model": 4}) == (
    "within a node of 8 GPUs: data 2, model 4; between nodes: data 2"
  )
