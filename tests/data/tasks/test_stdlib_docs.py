"""The task on Python's own documentation, on a small text."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from rosetta_t5.data import DatasetConfig, get_dataset, verify_matching_vocabs
from rosetta_t5.data.tensorflow_import import import_seqio

TASK = "stdlib_docs_of_tests"
PARAGRAPHS = [
  f"Paragraph {number} tells that {number * number} is the square of {number} and of {-number}."
  for number in range(600)
]


@pytest.fixture(scope="module")
def stdlib_docs() -> Any:
  from rosetta_t5.data.tasks import stdlib_docs

  return stdlib_docs


@pytest.fixture
def folder(
  stdlib_docs: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pathlib.Path]:
  """A folder that is not there yet; text and vocabulary that go into it are small."""
  folder = tmp_path / "run" / "data"
  monkeypatch.setattr(stdlib_docs, "stdlib_paragraphs", lambda: iter(PARAGRAPHS))
  monkeypatch.setattr(stdlib_docs, "VOCAB_SIZE", 180)
  stdlib_docs.register(TASK, folder)
  yield folder
  import_seqio().TaskRegistry.remove(TASK)


def lines(folder: pathlib.Path, split: str) -> list[str]:
  return [line for f in sorted(folder.glob(f"{split}-*")) for line in f.read_text().splitlines()]


def test_text_is_split_by_hash_and_none_is_lost(stdlib_docs: Any, folder: pathlib.Path) -> None:
  manifest = stdlib_docs.prepare(folder)
  train, validation = lines(folder, "train"), lines(folder, "validation")
  assert sorted(train + validation) == sorted(PARAGRAPHS)
  assert 0 < len(validation) < 30
  assert (manifest["train_paragraphs"], manifest["validation_paragraphs"]) == (
    len(train),
    len(validation),
  )


def test_preparing_again_changes_nothing(stdlib_docs: Any, folder: pathlib.Path) -> None:
  first = stdlib_docs.prepare(folder)
  stamps = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
  assert stdlib_docs.prepare(folder, paragraphs=["another text"]) == first
  assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == stamps


def test_the_same_text_gives_the_same_files(
  stdlib_docs: Any, folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
  assert stdlib_docs.prepare(folder) == stdlib_docs.prepare(tmp_path / "again")


def test_a_failure_leaves_no_half_of_a_folder(stdlib_docs: Any, folder: pathlib.Path) -> None:
  with pytest.raises(ValueError, match="No SentencePiece vocabulary"):
    stdlib_docs.prepare(folder, paragraphs=["too little text"] * 3)
  assert list(folder.parent.iterdir()) == []


def test_another_folder_is_not_touched(stdlib_docs: Any, folder: pathlib.Path) -> None:
  folder.mkdir(parents=True)
  (folder / "thesis.txt").write_text("years of work")
  with pytest.raises(ValueError, match=r"holds no manifest\.json.*ROSETTA_T5_STDLIB_DOCS"):
    stdlib_docs.prepare(folder)
  assert (folder / "thesis.txt").read_text() == "years of work"


def test_a_process_that_comes_second_takes_the_firsts_folder(
  stdlib_docs: Any, folder: pathlib.Path
) -> None:
  def meanwhile() -> Iterator[str]:
    stdlib_docs.prepare(folder)
    yield from [*PARAGRAPHS, "This line is the second process's alone, and it is lost."]

  assert stdlib_docs.prepare(folder, paragraphs=meanwhile())["train_paragraphs"] < 600
  assert len(lines(folder, "train") + lines(folder, "validation")) == 600
  assert list(folder.parent.iterdir()) == [folder]


def test_text_and_vocabulary_are_made_when_the_task_is_first_read(
  stdlib_docs: Any, folder: pathlib.Path
) -> None:
  cfg = DatasetConfig(TASK, {"inputs": 32, "targets": 16}, "train", 4, shuffle=True, seed=0)
  assert not folder.exists()
  dataset = get_dataset(cfg, 0, 1, import_seqio().EncDecFeatureConverter)
  batch = next(dataset.as_numpy_iterator())
  assert json.loads((folder / "manifest.json").read_text())["train_paragraphs"]
  text = stdlib_docs.vocabulary(folder).decode([int(t) for t in batch["encoder_input_tokens"][0]])
  assert "Paragraph" in text
  assert "<extra_id_0>" in text


def test_the_vocabulary_of_a_recipe_is_the_tasks(stdlib_docs: Any, folder: pathlib.Path) -> None:
  class Model:
    input_vocabulary = output_vocabulary = stdlib_docs.vocabulary(folder)

  cfg = DatasetConfig(TASK, {"inputs": 32, "targets": 16}, "train", 4, shuffle=True, seed=0)
  verify_matching_vocabs(cfg, Model())
  assert Model.input_vocabulary.vocab_size == 180
