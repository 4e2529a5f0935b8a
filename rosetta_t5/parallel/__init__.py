"""Mesh, logical axis rules, partitioner and processes."""

from rosetta_t5.parallel.compilation import cache_compiled_programs
from rosetta_t5.parallel.host_memory import keep_freed_memory
from rosetta_t5.parallel.interruption import Interrupted, Interruption
from rosetta_t5.parallel.layout import DataLayout
from rosetta_t5.parallel.mesh import default_mesh
from rosetta_t5.parallel.partitioner import (
  BasePartitioner,
  PartitionedFunction,
  PjitPartitioner,
)
from rosetta_t5.parallel.processes import drawn_seed, join_processes
from rosetta_t5.parallel.rules import standard_logical_axis_rules
from rosetta_t5.parallel.watchdog import Watchdog

__all__ = [
  "BasePartitioner",
  "DataLayout",
  "Interrupted",
  "Interruption",
  "PartitionedFunction",
  "PjitPartitioner",
  "Watchdog",
  "cache_compiled_programs",
  "default_mesh",
  "drawn_seed",
  "join_processes",
  "keep_freed_memory",
  "standard_logical_axis_rules",
]
