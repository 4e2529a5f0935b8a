"""Training on eight devices equals training on one, however arrays are split over them."""

from __future__ import annotations

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen.partitioning import with_sharding_constraint
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from scalable_trees import scalable
from tiny_models import T5_1_1, Bigram, make_batch, make_model, make_state

from rosetta_t5.networks.transformer import Transformer
from rosetta_t5.parallel import DataLayout, PjitPartitioner, standard_logical_axis_rules
from rosetta_t5.parallel.axis_rules import partition_specs_of
from rosetta_t5.parallel.placement import constrain
from rosetta_t5.telemetry.metrics_manager import as_floats
from rosetta_t5.training import Trainer

MODULE = Transformer(dataclasses.replace(T5_1_1, dropout_rate=0.1))
SCANNED = Transformer(scalable(dropout_rate=0.1, remat_policy="minimal"))
DATA, MODEL = "data", "model"


class OneDevice(PjitPartitioner):
  """A partitioner of the first device only."""

  @property
  def mesh(self):
    axis_types = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((1, 1), (DATA, MODEL), axis_types=axis_types, devices=jax.devices()[:1])


def place(state, partitioner):
  """Returns the state as the partitioner splits it, and its axes."""
  axes = partitioner.get_mesh_axes(state)
  shardings = jax.tree.map(
    lambda spec: NamedSharding(partitioner.mesh, spec),
    axes,
    is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
  )
  return jax.device_put(jax.tree.map(jnp.copy, state), shardings), axes


def three_steps(partitioner, module=MODULE, num_microbatches=None):
  """Returns the losses of three steps and the state after them."""
  state, axes = place(make_state(module), partitioner)
  trainer = Trainer(
    make_model(module, z_loss=1e-4),
    state,
    partitioner,
    (),
    None,
    axes,
    jax.random.PRNGKey(0),
    learning_rate_fn=lambda step: jnp.float32(0.01),
    num_microbatches=num_microbatches,
  )
  sharding = NamedSharding(partitioner.mesh, partitioner.data_partition_spec)
  batches = (jax.device_put(make_batch(8, seed=seed), sharding) for seed in range(3))
  losses = [as_floats(trainer.train(batches, 1).result())["loss"] for _ in range(3)]
  trainer.close()
  return losses, trainer.train_state


@pytest.fixture(scope="module")
def on_one_device():
  return three_steps(OneDevice(num_partitions=1))


# Name → the partitioner's arguments, the PartitionSpec of a kernel [embed=16, mlp=24], and the shapes
# of a device's part of it and of its optimizer state. The quick one has every axis.
LAYOUTS = {
  "data parallel": ({"num_partitions": 1}, (None, MODEL), (16, 24), (16, 24)),
  "tensor parallel": ({"num_partitions": 2}, (None, MODEL), (16, 12), (16, 12)),
  "parameters over data too": (
    {"num_partitions": 2, "logical_axis_rules": standard_logical_axis_rules(1, 2)},
    *((DATA, MODEL), (4, 12), (4, 12)),
  ),
  "activations over model too": (
    {"num_partitions": 2, "logical_axis_rules": standard_logical_axis_rules(2, 1)},
    *((None, MODEL), (16, 12), (16, 12)),
  ),
  "over two nodes": (
    {"num_partitions": 1, "ici_mesh_shape": (2, 2), "dcn_mesh_shape": (2, 1)},
    *((None, MODEL), (16, 12), (16, 12)),
  ),
  "counts of data, fsdp, tensor": (
    {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}},
    *(("fsdp", MODEL), (8, 12), (8, 12)),
  ),
  "fsdp alone": ({"mesh": {"fsdp": 8}}, ("fsdp", None), (2, 24), (2, 24)),
  "optimizer over data": ({"num_partitions": 2, "zero1": True}, (None, MODEL), (16, 12), (4, 12)),
  "optimizer over data and fsdp": (
    {"mesh": {"data": 4, "fsdp": 2}, "zero1": True},
    *(("fsdp", None), (8, 24), (2, 24)),
  ),
  "positions over tensor": (
    {"mesh": {"data": 4, "tensor": 2}, "sequence_parallel": True},
    *((None, MODEL), (16, 12), (16, 12)),
  ),
}
QUICK = "counts of data, fsdp, tensor"


@pytest.mark.parametrize(
  "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != QUICK)) for n in LAYOUTS]
)
def test_eight_devices_give_the_losses_and_parameters_of_one(name, on_one_device):
  arguments, spec, shape, optimizer_shape = LAYOUTS[name]
  losses, state = three_steps(PjitPartitioner(**arguments))
  np.testing.assert_allclose(losses, on_one_device[0], rtol=1e-5)
  expected = on_one_device[1].params
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.params, expected)
  # Parameters and the optimizer state are still split as intended.
  path = ("encoder", "layers_0", "mlp", "wi_0", "kernel")
  kernel, moment = state.params, state.param_states
  for key in path:
    kernel, moment = kernel[key], moment[key]
  wanted = NamedSharding(kernel.sharding.mesh, PartitionSpec(*spec))
  assert kernel.sharding.is_equivalent_to(wanted, 2)
  assert kernel.addressable_shards[0].data.shape == shape
  assert moment.v.addressable_shards[0].data.shape == optimizer_shape
  assert len(kernel.sharding.device_set) == len(moment.v.sharding.device_set) == 8


@pytest.fixture(scope="module")
def scanned_on_one_device():
  return three_steps(OneDevice(num_partitions=1), SCANNED, num_microbatches=2)


# Name → the shape of a device's part of the decoder's query kernel [embed=16, layers=2, heads=4, kv=4].
@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "shape"), [("data parallel", (16, 2, 4, 4)), ("parameters over data too", (4, 2, 2, 4))]
)
def test_scanned_layers_on_eight_devices_train_as_on_one(name, shape, scanned_on_one_device):
  partitioner = PjitPartitioner(**LAYOUTS[name][0])
  losses, state = three_steps(partitioner, SCANNED, num_microbatches=2)
  np.testing.assert_allclose(losses, scanned_on_one_device[0], rtol=1e-5)
  expected = scanned_on_one_device[1].params
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.params, expected)
  kernel = state.params["decoder"]["decoder"]["self_attention"]["query"]["kernel"]
  assert kernel.addressable_shards[0].data.shape == shape
  assert len(kernel.sharding.device_set) == 8


def test_logical_constraints_take_effect_on_the_mesh():
  partitioner = PjitPartitioner(num_partitions=2)

  def double(x):
    return with_sharding_constraint(x * 2, ("batch", "mlp"))

  x = jnp.ones((8, 8))
  split = partitioner.partition(double, (None,), None)(x)
  assert split.sharding.is_equivalent_to(
    NamedSharding(partitioner.mesh, PartitionSpec(DATA, MODEL)), 2
  )
  assert double(x).sharding.device_set == {jax.devices()[0]}


def test_positions_are_split_unless_another_axis_is_or_there_is_only_one():
  partitioner = PjitPartitioner(mesh={"data": 2, "fsdp": 2, "tensor": 2}, sequence_parallel=True)

  def placed(shape, *names):
    function = partitioner.partition(lambda x: constrain(x, names), (None,), None)
    return function(jnp.ones(shape)).sharding.spec

  assert placed((4, 6, 8), "batch", "length", "embed") == PartitionSpec((DATA, "fsdp"), MODEL)
  assert placed((4, 6, 8), "batch", "length", "mlp") == PartitionSpec((DATA, "fsdp"), None, MODEL)
  assert placed((4, 1, 8), "batch", "length", "embed") == PartitionSpec((DATA, "fsdp"))
  assert constrain(jnp.ones((2, 3)), ("batch", "length")).sharding.device_set == {jax.devices()[0]}


def test_partition_splits_results_and_arguments_can_be_bound_and_donated():
  partitioner = PjitPartitioner(num_partitions=1)
  add = partitioner.partition(
    lambda x, times, y: x * times + y,
    (PartitionSpec(DATA), PartitionSpec()),
    PartitionSpec(DATA),
    static_argnums=(1,),
    donate_argnums=(0,),
  )
  x = jax.device_put(jnp.ones(8), NamedSharding(partitioner.mesh, PartitionSpec(DATA)))
  result = add.bind_last(jnp.float32(2.0))(x, 3)
  np.testing.assert_array_equal(result, np.full(8, 5.0))
  assert result.addressable_shards[0].data.shape == (1,)
  assert x.is_deleted()


@pytest.mark.parametrize("without_jit", [False, True])
def test_a_compiled_function_keeps_its_bound_arguments(without_jit):
  partitioner = PjitPartitioner(num_partitions=1)
  add = partitioner.partition(lambda x, y: x + y, None, None).bind_last(jnp.float32(1.0))
  with jax.disable_jit(without_jit):
    compiled = partitioner.compile(add, jax.ShapeDtypeStruct((8,), jnp.float32))
    np.testing.assert_array_equal(compiled(jnp.zeros(8)), np.ones(8))


def test_a_batch_that_cannot_be_split_is_an_error_that_gives_the_nearest_sizes():
  partitioner = PjitPartitioner(num_partitions=2)
  text = (
    "batch size 10 cannot be split over the 4 devices of the mesh's data axis (mesh {'data': 4, "
    "'model': 2}): set BATCH_SIZE (in evaluation and inference DatasetConfig.batch_size) to a "
    "multiple of 4, such as 8 or 12"
  )
  with pytest.raises(ValueError, match=re.escape(text)):
    partitioner.get_data_layout(10)
  with pytest.raises(ValueError, match=r"such as 4$"):
    partitioner.get_data_layout(3)


def test_a_batch_is_split_over_data_and_fsdp_together():
  partitioner = PjitPartitioner(mesh={"data": 2, "fsdp": 2, "tensor": 2})
  assert partitioner.data_partition_spec == PartitionSpec((DATA, "fsdp"))
  assert partitioner.data_mesh_size == 4
  with pytest.raises(
    ValueError, match=r"over the 4 devices of the mesh's axes data and fsdp \(mesh"
  ):
    partitioner.get_data_layout(6)


def test_a_single_process_reads_the_whole_batch():
  layout = PjitPartitioner(num_partitions=2).get_data_layout(16)
  assert layout == DataLayout(16, shard_id=0, num_shards=1, is_first_host_in_replica_set=True)
  assert PjitPartitioner(num_partitions=2).get_data_layout().batch_size == 4


class Grid(PjitPartitioner):
  """A partitioner of a mesh whose devices belong to the processes that `owners` names."""

  owners: tuple = ()

  @property
  def mesh(self):
    devices = np.array(
      [[types.SimpleNamespace(process_index=owner) for owner in row] for row in self.owners]
    )
    return types.SimpleNamespace(
      devices=devices, shape={DATA: len(self.owners), MODEL: len(self.owners[0])}
    )


@pytest.mark.parametrize(
  ("owners", "expected"),
  [
    # Each row its own process: four shards.
    (((0,), (1,), (2,), (3,)), [(0, 4, True), (1, 4, True), (2, 4, True), (3, 4, True)]),
    # Each process has two rows.
    (((0,), (0,), (1,), (1,)), [(0, 2, True), (1, 2, True)]),
    # Each row is shared by two processes, which read the same shard.
    (((0, 1), (2, 3)), [(0, 2, True), (0, 2, False), (1, 2, True), (1, 2, False)]),
    # One copy of the model over all: all processes read everything.
    (((0, 0, 1, 1),), [(0, 1, True), (0, 1, False)]),
  ],
)
def test_processes_that_share_rows_of_the_mesh_read_the_same_shard(owners, expected):
  partitioner = Grid(num_partitions=1)
  partitioner.owners = owners
  layouts = [partitioner.get_data_layout(8, host_index=index) for index in range(len(expected))]
  assert [
    (layout.shard_id, layout.num_shards, layout.is_first_host_in_replica_set) for layout in layouts
  ] == expected


def test_an_axis_without_a_rule_is_an_error_that_gives_the_rule_to_add():
  rules = [rule for rule in standard_logical_axis_rules() if rule[0] != "vocab"]
  partitioner = PjitPartitioner(num_partitions=1, logical_axis_rules=rules)
  with pytest.raises(
    ValueError, match=r"logical axis 'vocab' has no rule: add \('vocab', None\) or"
  ):
    partitioner.get_mesh_axes(make_state(Bigram()))


def test_a_mesh_that_does_not_divide_the_heads_is_an_error_that_lists_those_that_do():
  state = jax.eval_shape(lambda: make_state(MODULE))
  text = (
    "of shape (4, 32) cannot be split over model into 8 parts, because 4 is not a multiple of 8. Set "
    "partitioning.PjitPartitioner.num_partitions (or mesh's 'tensor') so that the number of parts is "
    "one of 1, 2, 4."
  )
  with pytest.raises(ValueError, match=re.escape(text)):
    partition_specs_of(PjitPartitioner(num_partitions=8), state)


@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    (
      {"num_partitions": 2, "mesh": {"data": 8}},
      r"needs one of .*, got {'num_partitions': 2, 'mesh': {'data': 8}}: set",
    ),
    (
      {"num_partitions": 4, "model_parallel_submesh": (1, 1, 1, 2)},
      r"got {'num_partitions': 4, 'model_parallel_submesh': \(1, 1, 1, 2\)}: set",
    ),
  ],
)
def test_two_meshes_are_errors(arguments, text):
  with pytest.raises(ValueError, match=text):
    PjitPartitioner(**arguments)


@pytest.mark.parametrize("num_partitions", [None, 1, 2])
def test_a_submesh_overrides_the_single_partition_that_runs_set(num_partitions):
  partitioner = PjitPartitioner(num_partitions, model_parallel_submesh=(1, 1, 1, 2))
  assert partitioner.mesh_config.axis_sizes(8) == {"data": 4, "model": 2}


def test_an_empty_submesh_is_ignored():
  partitioner = PjitPartitioner(num_partitions=2, model_parallel_submesh=())
  assert partitioner.mesh_config.axis_sizes(8) == {"data": 4, "model": 2}


def test_a_backend_that_this_machine_lacks_is_an_error_that_names_the_setting():
  partitioner = PjitPartitioner(num_partitions=1, backend="tpu")
  with pytest.raises(ValueError, match=r"'tpu'.*Set PjitPartitioner\.backend = None"):
    partitioner.mesh  # noqa: B018


def test_building_a_partitioner_touches_no_device(monkeypatch):
  monkeypatch.setattr(jax, "devices", lambda *_: pytest.fail("asked for devices"))
  PjitPartitioner(num_partitions=3)
