"""Registers the Pile's and GLUE's tasks on import, as NVIDIA's seqio_tasks did: all that are not there.

A run needs no such import: it finds these tasks by their names (`rosetta_t5.data.tasks.catalogue`).
"""

from __future__ import annotations

from rosetta_t5.data.tasks.catalogue import register_all
from rosetta_t5.data.tasks.file_task import T5_VOCABULARY
from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio

seqio = import_seqio()

TaskRegistry = seqio.TaskRegistry
_VOCABULARY = seqio.SentencePieceVocabulary(T5_VOCABULARY)
DEFAULT_OUTPUT_FEATURES = {
  "inputs": seqio.Feature(vocabulary=_VOCABULARY, add_eos=True, required=False),
  "targets": seqio.Feature(vocabulary=_VOCABULARY, add_eos=True),
}
register_all()
