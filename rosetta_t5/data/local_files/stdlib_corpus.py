"""The text and the vocabulary of the quickstart, as files: written once, complete or not at all.

Both come from the running Python's standard library. They stay when that changes, for a vocabulary
belongs to the checkpoints trained with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import platform
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

from rosetta_t5.data.local_files.stdlib_text import stdlib_paragraphs
from rosetta_t5.data.vocabularies.sentencepiece_training import train_sentencepiece

EXTRA_IDS = 100
VOCAB_SIZE = 4096  # With the extra ids: the embedding table's rows.
VOCABULARY_FILE = "vocabulary.model"
FOLDER_VARIABLE = "ROSETTA_T5_STDLIB_DOCS"
_TRAIN_FILES = 8
_VALIDATION_PERCENT = 2
_MANIFEST = "manifest.json"


def data_folder() -> pathlib.Path:
  """Returns the folder of text and vocabulary, which need not exist yet."""
  return pathlib.Path(os.environ.get(FOLDER_VARIABLE, "quickstart/data")).absolute()


def prepare(
  folder: pathlib.Path | None = None, paragraphs: Iterable[str] | None = None
) -> dict[str, Any]:
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
      f"it away, or name another folder in the environment variable {FOLDER_VARIABLE}."
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
  (folder / VOCABULARY_FILE).write_bytes(model)
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
