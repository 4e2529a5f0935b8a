"""Importing it registers the Pile's and GLUE's tasks (T5X's earlier path of it)."""

from rosetta_t5.data.tasks.pile_and_glue import DEFAULT_OUTPUT_FEATURES, TaskRegistry
