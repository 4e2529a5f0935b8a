"""Registers the tasks of the Pile and GLUE when it is imported (T5X's contrib.gpu.scripts_gpu.seqio_tasks).

A run does not need it, because these tasks are registered when their names are used.
"""

from rosetta_t5.data.tasks.catalogue import TASKS, register, text_features
from rosetta_t5.data.tensorflow_import import seqio

TaskRegistry = seqio.TaskRegistry
DEFAULT_OUTPUT_FEATURES = text_features()
for _name in TASKS:
  if _name.startswith("the_pile") or _name.endswith("_v2"):
    register(_name)
