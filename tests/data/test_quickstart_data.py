"""The quickstart's dates, text and vocabulary: prose of Python files, split by hash, complete, never overwritten."""

from __future__ import annotations

import datetime
import json
import pathlib
from collections.abc import Iterator

import pytest

from rosetta_t5.data import quickstart_data
from rosetta_t5.data.quickstart_data import date_text, write_dates

SOURCE = '''
"""The module's docstring, long enough to be one paragraph of prose.

    >>> this_is_a_doctest("and no prose, however long it may be")

A second paragraph, over
two lines of the file and long enough.
"""

# A comment above the function which is
# continued on the line below it, in prose.
def function():
  """Too short."""
  text = """
  # This looks like a comment but is in a string literal.
  """
  return text  # A comment behind code is not a line of prose of its own.

# ======================= +++ ----- {} [] () ;;;; ====================
x = {0: 1, 2: 3}
# The module's docstring, long enough to be one paragraph of prose.
'''


def lines(folder: pathlib.Path, split: str) -> list[str]:
  return [line for f in sorted(folder.glob(f"{split}-*")) for line in f.read_text().splitlines()]


def test_text_is_split_by_hash_without_losses_and_written_once(
  corpus_folder: pathlib.Path, paragraphs: list[str]
) -> None:
  manifest = quickstart_data.prepare(corpus_folder)
  train, validation = lines(corpus_folder, "train"), lines(corpus_folder, "validation")
  assert sorted(train + validation) == sorted(paragraphs)
  assert 0 < len(validation) < 30
  assert (manifest["train_paragraphs"], manifest["validation_paragraphs"]) == (
    len(train),
    len(validation),
  )
  stamps = {path: path.stat().st_mtime_ns for path in corpus_folder.iterdir()}
  assert quickstart_data.prepare(corpus_folder, paragraphs=["another text"]) == manifest
  assert {path: path.stat().st_mtime_ns for path in corpus_folder.iterdir()} == stamps


def test_a_failure_leaves_no_incomplete_folder(corpus_folder: pathlib.Path) -> None:
  with pytest.raises(ValueError, match="No SentencePiece vocabulary"):
    quickstart_data.prepare(corpus_folder, paragraphs=["too little text"] * 3)
  assert list(corpus_folder.parent.iterdir()) == []


def test_a_process_that_finishes_second_uses_the_firsts_folder(
  corpus_folder: pathlib.Path, paragraphs: list[str]
) -> None:
  def meanwhile() -> Iterator[str]:
    quickstart_data.prepare(corpus_folder)
    yield from [*paragraphs, "This line is the second process's alone, and it is lost."]

  assert quickstart_data.prepare(corpus_folder, meanwhile())["train_paragraphs"] < 600
  assert len(lines(corpus_folder, "train") + lines(corpus_folder, "validation")) == 600
  assert list(corpus_folder.parent.iterdir()) == [corpus_folder]


def test_docstrings_and_comments_that_are_prose_are_extracted_once(tmp_path: pathlib.Path) -> None:
  (tmp_path / "module.py").write_text(SOURCE)
  (tmp_path / "broken.py").write_text("# A comment in a file that does not parse as Python\n(")
  (tmp_path / "latin.py").write_bytes(b"# \xe9 is no valid UTF-8 and so the file is left out.\n")
  (tmp_path / "test").mkdir()
  (tmp_path / "test" / "case.py").write_text("# Tests of the library are left out, all of them.\n")
  assert list(quickstart_data.stdlib_paragraphs(tmp_path)) == [
    "The module's docstring, long enough to be one paragraph of prose.",
    "A second paragraph, over two lines of the file and long enough.",
    "A comment above the function which is continued on the line below it, in prose.",
  ]


@pytest.mark.parametrize(
  ("day", "text"), [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (22, "22nd")]
)
def test_ordinals_are_english(day: int, text: str) -> None:
  date = datetime.date(1976, 7, day)
  assert date_text(date, "the {day}{ordinal} of {d:%B} {year}") == f"the {text} of July 1976"


def test_rows_are_different_repeatable_and_written_once(tmp_path: pathlib.Path) -> None:
  first, second = tmp_path / "new" / "first.jsonl", tmp_path / "second.jsonl"
  for path in (first, second):
    write_dates(path, count=300)
  rows = [json.loads(line) for line in first.read_text().splitlines()]
  assert len({row["date"] for row in rows}) == len(rows) == 300
  assert all(datetime.date.fromisoformat(row["iso"]).year >= 1900 for row in rows)
  assert second.read_text() == first.read_text()
  first.write_text("mine")
  write_dates(first)
  assert first.read_text() == "mine"
