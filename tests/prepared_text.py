"""The gin bindings for a run on prepared text."""

from __future__ import annotations

import os


def prepared_gin(tokens: str | os.PathLike[str]) -> str:
  """Returns the lines of a gin file for a folder that `prepare` wrote, with 100 extra ids."""
  return f"""
from __gin__ import dynamic_registration
import seqio
from rosetta_t5 import data
MIXTURE_OR_TASK_NAME = @data.prepared_task()
MIXTURE_OR_TASK_MODULE = None
data.prepared_task.folders = ['{tokens}']
seqio.SentencePieceVocabulary.sentencepiece_model_file = '{tokens}/vocabulary.model'
seqio.SentencePieceVocabulary.extra_ids = 100
"""
