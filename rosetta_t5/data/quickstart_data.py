"""Writes the quickstart's data: text and vocabulary from Python's standard library, and rows of dates.

The library's docstrings and comments are about 2 MB of English about code, which every machine has, for runs that need
real text without a download. Text and vocabulary are written once, and kept when the library changes, because
a checkpoint can only be used with the vocabulary that it was trained with.
"""

import ast
import contextlib
import datetime
import hashlib
import itertools
import json
import os
import pathlib
import platform
import random
import re
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rosetta_t5.data.vocabularies.sentencepiece_models import train_sentencepiece
from rosetta_t5.files import write_atomically

EXTRA_IDS = 100
VOCAB_SIZE = 4096  # rows of the embedding table, including the extra ids
VOCABULARY_FILE = "vocabulary.model"
FOLDER_VARIABLE = "ROSETTA_T5_STDLIB_DOCS"
_TRAIN_FILES = 8
_VALIDATION_PERCENT = 2
_MANIFEST = "manifest.json"
_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_MIN_CHARACTERS = 40
# A paragraph with a smaller share of letters and spaces is a table, a listing or a drawing.
_MIN_LETTERS = 0.8
_FIRST_DATE = datetime.date(1900, 1, 1)
_DAYS = 73048  # to the last day of 2099
_DATE_FORMATS = (
  "{d:%B} {day}, {year}",
  "{d:%b} {day}, {year}",
  "{d:%A}, {day} {d:%B} {year}",
  "{d:%B} {day}{ordinal}, {year}",
  "the {day}{ordinal} of {d:%B} {year}",
  "{day} {d:%b} {year}",
  "{day}.{d.month}.{year}",
)


def data_folder() -> pathlib.Path:
  """Returns the folder of the text and vocabulary, which may not exist yet."""
  return pathlib.Path(os.environ.get(FOLDER_VARIABLE, "quickstart/data")).absolute()


def prepare(
  folder: pathlib.Path | None = None, paragraphs: Iterable[str] | None = None
) -> dict[str, Any]:
  """Writes the text and the vocabulary unless they exist, and returns their manifest.

  The folder is filled under a temporary name and then renamed, so it is always complete. If several
  processes do this at the same time, the folder of the first one to finish is used.

  Args:
    folder: `data_folder()` by default.
    paragraphs: the text; by default that of the standard library.
  """
  folder = folder or data_folder()
  manifest = folder / _MANIFEST
  if not manifest.exists():
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
      unfinished = pathlib.Path(scratch) / folder.name
      unfinished.mkdir()
      _write(unfinished, list(stdlib_paragraphs() if paragraphs is None else paragraphs))
      with contextlib.suppress(OSError):  # Another process has already written the same folder.
        unfinished.rename(folder)
  return json.loads(manifest.read_text())


def _write(folder: pathlib.Path, paragraphs: Sequence[str]) -> None:
  """Writes the text files, the vocabulary and the manifest."""
  splits: dict[str, list[str]] = {"train": [], "validation": []}
  for text in paragraphs:
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 100
    splits["validation" if number < _VALIDATION_PERCENT else "train"].append(text)
  train, validation = splits.values()
  size = -(-len(train) // _TRAIN_FILES)
  parts = [train[index * size : (index + 1) * size] for index in range(_TRAIN_FILES)]
  files = {f"train-{n:05}-of-{_TRAIN_FILES:05}.txt": part for n, part in enumerate(parts)}
  for name, lines in {**files, "validation-00000-of-00001.txt": validation}.items():
    (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
  (folder / VOCABULARY_FILE).write_bytes(train_sentencepiece(train, VOCAB_SIZE - EXTRA_IDS))
  manifest = {
    "source": f"docstrings and comments of the standard library of Python {platform.python_version()}",
    "train_paragraphs": len(train),
    "validation_paragraphs": len(validation),
    "characters": sum(map(len, paragraphs)),
  }
  (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def stdlib_paragraphs(root: pathlib.Path | None = None) -> Iterator[str]:
  """Yields the paragraphs of a folder's Python files, without duplicates, in the files' sorted order.

  Args:
    root: the folder; by default the running Python's standard library. Tests and installed packages
      are excluded.
  """
  root = root or pathlib.Path(sysconfig.get_path("stdlib"))
  files = (
    path
    for path in sorted(root.rglob("*.py"))
    if not _EXCLUDED_FOLDERS & set(path.relative_to(root).parts)
  )
  yield from dict.fromkeys(p for path in files for text in _texts(path) for p in _paragraphs(text))


def _texts(path: pathlib.Path) -> Iterator[str]:
  """Yields a file's docstrings, then its blocks of comments. Files that do not parse yield nothing."""
  try:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
  except (SyntaxError, ValueError, OSError):
    return  # The library contains broken files on purpose, for example as test data of lib2to3.
  documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
  for node in ast.walk(tree):
    if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
      yield docstring
  yield from _comment_blocks(source, tree)


def _comment_blocks(source: str, tree: ast.Module) -> Iterator[str]:
  """Yields runs of comment lines.

  The syntax tree shows which lines are inside strings; on all other lines, `#` starts a comment. For
  whole lines this gives the same result as the tokenizer, ten times faster.
  """
  in_strings: set[int] = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Constant | ast.JoinedStr):
      in_strings.update(range(node.lineno + 1, (node.end_lineno or node.lineno) + 1))

  def is_comment(line: tuple[int, str]) -> bool:
    return line[1].strip().startswith("#") and line[0] not in in_strings

  for are_comments, lines in itertools.groupby(enumerate(source.split("\n"), 1), is_comment):
    if are_comments:
      yield "\n".join(line.strip().lstrip("#!: ") for _, line in lines)


def _paragraphs(text: str) -> Iterator[str]:
  """Yields a text's paragraphs of prose, each on one line."""
  for raw in re.split(r"\n\s*\n", text):
    paragraph = " ".join(raw.split())
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    is_prose = letters >= _MIN_LETTERS * len(paragraph) and ">>>" not in paragraph
    if is_prose and len(paragraph) >= _MIN_CHARACTERS:
      yield paragraph


def write_dates(path: pathlib.Path, count: int = 10_000, seed: int = 0) -> None:
  """Writes `count` different rows such as {"date": "the 4th of July 1776", "iso": "1776-07-04"}.

  Nothing is written if the file exists. The dates are between 1900 and 2099, in English.
  """
  if path.exists():
    return
  rng = random.Random(seed)
  rows: dict[str, str] = {}
  while len(rows) < count:
    date = _FIRST_DATE + datetime.timedelta(days=rng.randint(0, _DAYS))
    rows[date_text(date, rng.choice(_DATE_FORMATS))] = date.isoformat()
  lines = (json.dumps({"date": text, "iso": iso}) + "\n" for text, iso in rows.items())
  path.parent.mkdir(parents=True, exist_ok=True)
  write_atomically(path, "".join(lines))


def date_text(date: datetime.date, template: str) -> str:
  """Returns a date in a format, in which {ordinal} is the st, nd, rd or th of the day."""
  day = date.day
  ordinal = "th" if day in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
  return template.format(d=date, day=day, year=date.year, ordinal=ordinal)
