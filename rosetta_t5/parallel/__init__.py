"""Mesh, logical axis rules, partitioner and processes."""

from rosetta_t5.distributed.join import drawn_seed, join_processes
from rosetta_t5.distributed.signals import Interrupted, Interruption
from rosetta_t5.distributed.watchdog import Watchdog
from rosetta_t5.parallel.axis_rules import standard_logical_axis_rules
from rosetta_t5.parallel.compilation_cache import cache_compiled_programs
from rosetta_t5.parallel.data_layout import DataLayout
from rosetta_t5.parallel.host_memory import keep_freed_memory
from rosetta_t5.parallel.mesh import default_mesh
from rosetta_t5.parallel.partitioner import (
  BasePartitioner,
  PartitionedFunction,
  PjitPartitioner,
)
