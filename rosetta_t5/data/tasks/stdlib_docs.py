"""The task `stdlib_docs_span_corruption`: T5's objective on Python's own documentation.

Text and vocabulary are made on first use, in ./quickstart/data or the folder that
ROSETTA_T5_STDLIB_DOCS names, and stay: a vocabulary belongs to the checkpoints trained with it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import platform
import tempfile
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rosetta_t5.data.sentencepiece_training import train_sentencepiece
from rosetta_t5.data.span_corruption import span_corruption
from rosetta_t5.data.stdlib_text import stdlib_paragraphs
from rosetta_t5.data.tensorflow_import import import_seqio

if TYPE_CHECKING:
  import seqio
else:
  seqio = import_seqio()

TASK = "stdlib_docs_span_corruption"
EXTRA_IDS = 100
VOCAB_SIZE = 4096  # With the extra ids: the embedding table's rows.
_TRAIN_FILES = 8
_VALIDATION_PERCENT = 2
_VOCABULARY_FILE = "vocabulary.model"
_MANIFEST = "manifest.json"


def data_folder() -> pathlib.Path:
  """Returns the folder of text and vocabulary, which need not exist yet."""
  return pathlib.Path(os.environ.get("ROSETTA_T5_STDLIB_DOCS", "quickstart/data")).absolute()


def prepare(folder: pathlib.Path | None = None, paragraphs: Iterable[str] | None = None) -> dict:
  """Writes text and vocabulary if they are not there, and returns their manifest.

  The folder appears at once and complete: it is filled under another name, then renamed. Several
  processes may do so together; one wins.

  Args:
    folder: `data_folder()` by default.
    paragraphs: the text; the standard library's by default.
  """
  folder = data_folder() if folder is None else folder
  manifest = folder / _MANIFEST
  if manifest.exists():
    return json.loads(manifest.read_text())
  if folder.exists():
    raise ValueError(
      f"The folder {folder} exists, but holds no {_MANIFEST}: it is not one of this task's. Move "
      "it away, or name another folder in the environment variable ROSETTA_T5_STDLIB_DOCS."
    )
  folder.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
    made = pathlib.Path(scratch) / folder.name
    made.mkdir()
    _write(made, list(stdlib_paragraphs() if paragraphs is None else paragraphs))
    with contextlib.suppress(OSError):  # Another process was first: its folder is as good.
      made.rename(folder)
  return json.loads(manifest.read_text())


def _write(folder: pathlib.Path, paragraphs: Sequence[str]) -> None:
  """Writes text files, vocabulary and manifest."""
  is_validation = [_hash(text) % 100 < _VALIDATION_PERCENT for text in paragraphs]
  train = [text for text, held_out in zip(paragraphs, is_validation, strict=True) if not held_out]
  validation = [text for text, held_out in zip(paragraphs, is_validation, strict=True) if held_out]
  per_file = -(-len(train) // _TRAIN_FILES)
  for index in range(_TRAIN_FILES):
    part = train[index * per_file : (index + 1) * per_file]
    _write_lines(folder / f"train-{index:05}-of-{_TRAIN_FILES:05}.txt", part)
  _write_lines(folder / "validation-00000-of-00001.txt", validation)
  model = train_sentencepiece(train, VOCAB_SIZE - EXTRA_IDS)
  (folder / _VOCABULARY_FILE).write_bytes(model)
  facts = {
    "source": f"docstrings and comments of the standard library of Python {platform.python_version()}",
    "train_paragraphs": len(train),
    "validation_paragraphs": len(validation),
    "characters": sum(map(len, paragraphs)),
    "vocabulary_sha256": hashlib.sha256(model).hexdigest(),
  }
  (folder / _MANIFEST).write_text(json.dumps(facts, indent=2) + "\n")


def _write_lines(path: pathlib.Path, lines: Sequence[str]) -> None:
  path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _hash(text: str) -> int:
  return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@functools.cache
def _prepare_once(folder: pathlib.Path) -> None:
  prepare(folder)


class StdlibDocsVocabulary(seqio.SentencePieceVocabulary):
  """A SentencePiece vocabulary that is trained when it is first looked into."""

  @property
  def tokenizer(self) -> Any:
    """The loaded model."""
    _prepare_once(pathlib.Path(self.sentencepiece_model_file).parent)
    return super().tokenizer

  @property
  def sp_model(self) -> bytes | None:
    """The model's bytes."""
    _prepare_once(pathlib.Path(self.sentencepiece_model_file).parent)
    return super().sp_model


class StdlibDocsSource(seqio.TextLineDataSource):
  """The text files, written when they are first listed."""

  def __init__(self, folder: pathlib.Path):
    super().__init__({split: str(folder / f"{split}-*.txt") for split in ("train", "validation")})
    self._folder = folder

  def list_shards(self, split: str) -> Sequence[str]:
    """Returns the files of a split."""
    _prepare_once(self._folder)
    return super().list_shards(split)


def vocabulary(folder: pathlib.Path | None = None) -> seqio.Vocabulary:
  """Returns the task's vocabulary, for gin: `VOCABULARY = @stdlib_docs.vocabulary()`."""
  path = (folder or data_folder()) / _VOCABULARY_FILE
  return StdlibDocsVocabulary(str(path), extra_ids=EXTRA_IDS)


def register(name: str = TASK, folder: pathlib.Path | None = None) -> None:
  """Registers the task, reading from `folder` (by default `data_folder()`)."""
  folder = folder or data_folder()
  feature = seqio.Feature(vocabulary(folder), add_eos=True)
  seqio.TaskRegistry.add(
    name,
    source=StdlibDocsSource(folder),
    preprocessors=[
      _lines_as_targets,
      seqio.preprocessors.tokenize,
      span_corruption,
      seqio.preprocessors.append_eos,
    ],
    output_features={"inputs": feature, "targets": feature},
  )


def _lines_as_targets(dataset: Any) -> Any:
  return dataset.map(lambda line: {"targets": line})


register()
