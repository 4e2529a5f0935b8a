"""Tasks on Python's own documentation: T5's span corruption, and a language model of bytes.

The text and the vocabulary are made on first use, in ./quickstart/data or in the folder named by the
environment variable ROSETTA_T5_STDLIB_DOCS.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

from rosetta_t5.data import quickstart_data
from rosetta_t5.data.objectives import objective_preprocessors, span_corruption
from rosetta_t5.data.tensorflow_import import seqio

TASK = "stdlib_docs_span_corruption"
BYTES_TASK = "stdlib_docs_bytes"

_prepare_once = functools.cache(quickstart_data.prepare)


class StdlibDocsVocabulary(seqio.SentencePieceVocabulary):
  """The SentencePiece vocabulary, which is trained on the text when it is first used."""

  @property
  def tokenizer(self) -> Any:
    """The loaded model."""
    _prepare_once(pathlib.Path(self.sentencepiece_model_file).parent)
    return super().tokenizer

  @property
  def sp_model(self) -> bytes | None:
    """The serialized model."""
    _prepare_once(pathlib.Path(self.sentencepiece_model_file).parent)
    return super().sp_model


class StdlibDocsSource(seqio.TextLineDataSource):
  """The text files, one paragraph per line, which are written when they are first listed."""

  def __init__(self, folder: pathlib.Path):
    super().__init__({split: str(folder / f"{split}-*.txt") for split in ("train", "validation")})
    self._folder = folder

  def list_shards(self, split: str) -> Sequence[str]:
    """Returns the files of a split."""
    _prepare_once(self._folder)
    return super().list_shards(split)


def vocabulary(folder: pathlib.Path | None = None) -> seqio.Vocabulary:
  """Returns the task's vocabulary, for gin: `VOCABULARY = @stdlib_docs.vocabulary()`."""
  path = (folder or quickstart_data.data_folder()) / quickstart_data.VOCABULARY_FILE
  return StdlibDocsVocabulary(str(path), extra_ids=quickstart_data.EXTRA_IDS)


def register(name: str = TASK, folder: pathlib.Path | None = None) -> None:
  """Registers the task of span corruption, which reads `folder` (by default `data_folder()`)."""
  feature = seqio.Feature(vocabulary(folder), add_eos=True)
  preprocessors = [seqio.preprocessors.tokenize, span_corruption, seqio.preprocessors.append_eos]
  _add(name, folder, preprocessors, {"inputs": feature, "targets": feature})


def register_bytes(name: str = BYTES_TASK, folder: pathlib.Path | None = None) -> None:
  """Registers the task of a decoder that predicts each byte of the text; it has targets only."""
  feature = seqio.Feature(seqio.ByteVocabulary(), add_eos=False)
  _add(name, folder, objective_preprocessors("causal_lm"), {"targets": feature})


def _add(name: str, folder: pathlib.Path | None, preprocessors: Any, features: Any) -> None:
  seqio.TaskRegistry.add(
    name,
    source=StdlibDocsSource(folder or quickstart_data.data_folder()),
    preprocessors=[lambda lines: lines.map(lambda line: {"targets": line}), *preprocessors],
    output_features=features,
  )


register()
register_bytes()
