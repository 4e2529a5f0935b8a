"""Registers the tasks of the Pile and GLUE when it is imported (T5X's earlier path)."""

from t5x.contrib.gpu.scripts_gpu.seqio_tasks import DEFAULT_OUTPUT_FEATURES, TaskRegistry
