"""Mesh, logical axis rules and partitioner; compilation cache and XLA flags."""

from rosetta_t5.parallel.axis_rules import standard_logical_axis_rules
from rosetta_t5.parallel.compilation_cache import enable_compilation_cache
from rosetta_t5.parallel.data_layout import DataLayout
from rosetta_t5.parallel.host_memory import keep_freed_memory
from rosetta_t5.parallel.mesh import default_mesh
from rosetta_t5.parallel.partitioner import (
  BasePartitioner,
  PartitionedFunction,
  PjitPartitioner,
)
