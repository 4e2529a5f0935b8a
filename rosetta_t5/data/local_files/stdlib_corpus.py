"""Writes the quickstart's text and vocabulary, made from the running Python's standard library.

They are written once, and kept when the library changes, because checkpoints depend on the vocabulary they
were trained with.
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
VOCAB_SIZE = 4096  # rows of the embedding table, including the extra ids
VOCABULARY_FILE = "vocabulary.model"
FOLDER_VARIABLE = "ROSETTA_T5_STDLIB_DOCS"
_TRAIN_FILES = 8
_VALIDATION_PERCENT = 2
_MANIFEST = "manifest.json"


def data_folder() -> pathlib.Path:
  """Returns the folder of the text and vocabulary, which may not exist yet."""
  return pathlib.Path(os.environ.get(FOLDER_VARIABLE, "quickstart/data")).absolute()


def prepare(
  folder: pathlib.Path | None = None, paragraphs: Iterable[str] | None = None
) -> dict[str, Any]:
  """Writes the text and the vocabulary unless they exist, and returns their manifest.

  The folder is filled under a temporary name and then renamed, so it is always complete. If several
  processes do this at once, the first one to finish wins.

  Args:
    folder: `data_folder()` by default.
    paragraphs: the text; by default that of the standard library.

  Raises:
    ValueError: the folder exists and has other contents.
  """
  folder = data_folder() if folder is None else folder
  manifest = folder / _MANIFEST
  if manifest.exists():
    return json.loads(manifest.read_text())
  if folder.exists():
    raise ValueError(
      f"The folder {folder} exists but has no {_MANIFEST}, so this task did not write it. Move it "
      f"away, or set the environment variable {FOLDER_VARIABLE} to another folder."
    )
  folder.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
    unfinished = pathlib.Path(scratch) / folder.name
    unfinished.mkdir()
    _write(unfinished, list(stdlib_paragraphs() if paragraphs is None else paragraphs))
    with contextlib.suppress(OSError):  # Another process has already written the same folder.
      unfinished.rename(folder)
  return json.loads(manifest.read_text())


def _write(folder: pathlib.Path, paragraphs: Sequence[str]) -> None:
  """Writes text files, vocabulary and manifest."""
  validation = [text for text in paragraphs if _hash(text) % 100 < _VALIDATION_PERCENT]
  train = [text for text in paragraphs if _hash(text) % 100 >= _VALIDATION_PERCENT]
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
