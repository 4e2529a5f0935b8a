"""T5X's `contrib.moe.partitioning`: the partitioner, mesh and axis rules of experts."""

from rosetta_t5.compat.moe.partitioner import (
  MoePjitPartitioner,
  compute_num_model_partitions,
  default_moe_mesh,
  get_cpu_mesh,
  get_gpu_mesh,
  override_partition_specs,
  standard_logical_axis_rules,
)
