"""Registers the Pile's and GLUE's tasks when it is imported, as NVIDIA's module seqio_tasks did.

A run does not need it, because these tasks are registered when their names are used (`catalogue`).
"""

from __future__ import annotations

from rosetta_t5.data.local_copies import T5_VOCABULARY
from rosetta_t5.data.tasks.catalogue import TASKS, register
from rosetta_t5.data.tensorflow_import import seqio

TaskRegistry = seqio.TaskRegistry
_VOCABULARY = seqio.SentencePieceVocabulary(T5_VOCABULARY)
DEFAULT_OUTPUT_FEATURES = {
  "inputs": seqio.Feature(vocabulary=_VOCABULARY, add_eos=True, required=False),
  "targets": seqio.Feature(vocabulary=_VOCABULARY, add_eos=True),
}
for name in TASKS:
  if name.startswith("the_pile") or name.endswith("_v2"):
    register(name)
