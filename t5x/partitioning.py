"""T5X's `partitioning`."""

from rosetta_t5.parallel import (
  BasePartitioner,
  DataLayout,
  PjitPartitioner,
  default_mesh,
  standard_logical_axis_rules,
)
from rosetta_t5.parallel.partitioner import (
  PartitionedFunction as PjittedFnWithContext,
)

__all__ = [
  "BasePartitioner",
  "DataLayout",
  "PjitPartitioner",
  "PjittedFnWithContext",
  "default_mesh",
  "standard_logical_axis_rules",
]
