"""Registers the tasks of the Pile and GLUE when it is imported (T5X's contrib.gpu.scripts_gpu.seqio_tasks)."""

from rosetta_t5.data.tasks.pile_and_glue import DEFAULT_OUTPUT_FEATURES, TaskRegistry
