"""T5X's `partitioning`: partitioners, meshes, logical axis rules, and each process's data."""

from rosetta_t5.compat.meshes import (
  AxisNames,
  PjittedFnWithContext,
  bounds_from_last_device,
  get_coords,
  get_cpu_mesh,
  get_gpu_mesh,
  get_mesh,
  global_mesh_defined,
  host_local_array_to_global_array,
  with_sharding_constraint,
)
from rosetta_t5.parallel import (
  BasePartitioner,
  DataLayout,
  PjitPartitioner,
  default_mesh,
  standard_logical_axis_rules,
)
from rosetta_t5.parallel import PjitPartitioner as ModelBasedPjitPartitioner
from rosetta_t5.parallel.axis_rules import LogicalAxisRules
from rosetta_t5.parallel.data_layout import LocalChunker, LocalChunkInfo
from rosetta_t5.parallel.partitioner import BasePjitPartitioner, PartitionSpec
