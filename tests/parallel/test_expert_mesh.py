"""T5X's partitioner, trainer and functions for experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from rosetta_t5.parallel import PjitPartitioner
from t5x.contrib.moe import adafactor_utils, partitioning


@pytest.mark.parametrize(
  ("experts", "model", "sizes"),
  [
    (4, 1, {"data": 2, "expert": 4, "model": 1}),
    (128, 1, {"data": 1, "expert": 8, "model": 1}),
    (3, 1, {"data": 4, "expert": 2, "model": 1}),
    (4, 4, {"data": 1, "expert": 2, "model": 4}),
  ],
)
def test_the_axis_expert_is_the_largest_divisor_of_t5x_s_data_axis(experts, model, sizes):
  partitioner = partitioning.MoePjitPartitioner(experts, num_partitions=model)
  assert dict(partitioner.mesh.shape) == partitioner.mesh_config.axis_sizes(8) == sizes
  assert partitioner.data_partition_spec == PartitionSpec(("expert", "data"))
  assert partitioner.data_mesh_size == 8 // model


def test_t5x_s_rules_split_the_batch_over_experts_and_data():
  rules = dict(reversed(partitioning.standard_logical_axis_rules(1)))
  assert rules["batch"] == ("expert", "data")
  assert rules["expert"] == "expert"
  assert (rules["expert_mlp"], rules["expert_replicas"], rules["unmodeled"]) == (
    "model",
    "data",
    None,
  )


def test_our_mesh_has_the_axis_only_if_it_is_named():
  assert dict(PjitPartitioner(mesh={"expert": 2, "fsdp": 2}).mesh.shape) == {
    "data": 2,
    "expert": 2,
    "fsdp": 2,
    "model": 1,
  }
  assert "expert" not in PjitPartitioner(mesh={"data": 8}).mesh.shape
  with pytest.raises(ValueError, match="needs a multiple of 3 devices"):
    PjitPartitioner(mesh={"expert": 3}).mesh_config.axis_sizes(8)


def test_a_process_reads_the_rows_of_its_devices():
  # Devices along `expert` have the first half and the second half of the batch.
  partitioner = PjitPartitioner(mesh={"data": 4, "expert": 2})
  batch = jax.device_put(
    jnp.arange(8), jax.sharding.NamedSharding(partitioner.mesh, partitioner.data_partition_spec)
  )
  rows = {shard.device.id: int(shard.data[0]) for shard in batch.addressable_shards}
  grid = partitioner.mesh.devices.reshape(4, 2)
  assert [rows[device.id] for device in grid[:, 0]] == [0, 1, 2, 3]
  assert partitioner.get_data_layout(8).num_shards == 1


def test_adafactor_treats_experts_as_separate_parameters():
  rules = adafactor_utils.logical_factor_rules()
  names = ("expert", "expert_mlp", "unmodeled", "mlp_embed")
  assert [rules[name].name for name in names] == ["BATCH", "COLUMN", "NONE", "ROW"]
