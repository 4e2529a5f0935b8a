"""Text and vocabulary as files: split by hash, complete or absent, never overwritten."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from rosetta_t5.data.local_files import stdlib_corpus


def lines(folder: pathlib.Path, split: str) -> list[str]:
  return [line for f in sorted(folder.glob(f"{split}-*")) for line in f.read_text().splitlines()]


def test_text_is_split_by_hash_without_losses(
  corpus_folder: pathlib.Path, paragraphs: list[str]
) -> None:
  manifest = stdlib_corpus.prepare(corpus_folder)
  train, validation = lines(corpus_folder, "train"), lines(corpus_folder, "validation")
  assert sorted(train + validation) == sorted(paragraphs)
  assert 0 < len(validation) < 30
  assert (manifest["train_paragraphs"], manifest["validation_paragraphs"]) == (
    len(train),
    len(validation),
  )


def test_preparing_again_changes_nothing(corpus_folder: pathlib.Path) -> None:
  first = stdlib_corpus.prepare(corpus_folder)
  stamps = {path: path.stat().st_mtime_ns for path in corpus_folder.iterdir()}
  assert stdlib_corpus.prepare(corpus_folder, paragraphs=["another text"]) == first
  assert {path: path.stat().st_mtime_ns for path in corpus_folder.iterdir()} == stamps


def test_the_same_text_gives_the_same_files(
  corpus_folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
  assert stdlib_corpus.prepare(corpus_folder) == stdlib_corpus.prepare(tmp_path / "again")


def test_a_failure_leaves_no_incomplete_folder(corpus_folder: pathlib.Path) -> None:
  with pytest.raises(ValueError, match="No SentencePiece vocabulary"):
    stdlib_corpus.prepare(corpus_folder, paragraphs=["too little text"] * 3)
  assert list(corpus_folder.parent.iterdir()) == []


def test_another_folder_is_not_touched(corpus_folder: pathlib.Path) -> None:
  corpus_folder.mkdir(parents=True)
  (corpus_folder / "thesis.txt").write_text("years of work")
  with pytest.raises(ValueError, match=r"has no manifest\.json.*ROSETTA_T5_STDLIB_DOCS"):
    stdlib_corpus.prepare(corpus_folder)
  assert (corpus_folder / "thesis.txt").read_text() == "years of work"


def test_a_process_that_finishes_second_uses_the_firsts_folder(
  corpus_folder: pathlib.Path, paragraphs: list[str]
) -> None:
  def meanwhile() -> Iterator[str]:
    stdlib_corpus.prepare(corpus_folder)
    yield from [*paragraphs, "This line is the second process's alone, and it is lost."]

  assert stdlib_corpus.prepare(corpus_folder, meanwhile())["train_paragraphs"] < 600
  assert len(lines(corpus_folder, "train") + lines(corpus_folder, "validation")) == 600
  assert list(corpus_folder.parent.iterdir()) == [corpus_folder]
