"""Mesh, logical axis rules and partitioner; compilation cache and XLA flags."""

from rosetta_t5.parallel.axis_rules import standard_logical_axis_rules
from rosetta_t5.parallel.data_layout import DataLayout
from rosetta_t5.parallel.mesh import default_mesh
from rosetta_t5.parallel.partitioner import BasePartitioner, PartitionedFunction, PjitPartitioner
