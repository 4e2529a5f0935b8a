"""Computes what a run will need from shapes alone. Nothing runs, and no device is used.

In all modules, `state` and `params` are trees of shapes, `specs` the same trees with a PartitionSpec for
each array, `mesh` the size of each mesh axis, outermost first, and `work` what a step computes.

`description`, `inputs` and `plan_command` use gin. The other modules do not, and so the benchmarks can
use them on machines that lack it.
"""
