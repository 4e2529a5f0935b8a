"""Computes what a run will need from shapes alone. Nothing runs, and no device is used.

`description`, `inputs` and `plan_command` use gin. The other modules do not, and so the benchmarks can
use them on machines that lack it.
"""
