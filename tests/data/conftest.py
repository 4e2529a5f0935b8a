"""Fixtures: SeqIO tasks of a few lines of text, which are removed after each test."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from rosetta_t5.data import quickstart_data
from rosetta_t5.data.dataset_config import DatasetConfig
from rosetta_t5.data.tensorflow_import import import_seqio, import_tensorflow

AddTask = Callable[..., str]
_numbers = itertools.count()


def _adding_tasks() -> Iterator[AddTask]:
  """Yields a function that registers a task of lines as bytes and returns the task's name.

  The inputs are the lines, the targets are the lines in upper case.
  """
  tf, seqio = import_tensorflow(), import_seqio()
  added = []

  def add(
    lines: Sequence[str],
    name: str | None = None,
    preprocessors: Sequence[Any] = (),
    vocabulary: Any = None,
    add_eos: bool = True,
    **more_splits: Sequence[str],
  ) -> str:
    name = name or f"lines_{next(_numbers)}"
    splits = {"train": lines, **more_splits}
    vocabulary = vocabulary or seqio.ByteVocabulary()

    def read(split: str, shuffle_files: bool = False, seed: int | None = None) -> Any:
      return tf.data.Dataset.from_tensor_slices(tf.constant(splits[split], tf.string))

    def as_example(line: Any) -> dict[str, Any]:
      return {"inputs": line, "targets": tf.strings.upper(line)}

    seqio.TaskRegistry.add(
      name,
      source=seqio.FunctionDataSource(read, splits=list(splits)),
      preprocessors=[
        lambda dataset: dataset.map(as_example),
        seqio.preprocessors.tokenize,
        *preprocessors,
        *([seqio.preprocessors.append_eos_after_trim] if add_eos else []),
      ],
      output_features={
        "inputs": seqio.Feature(vocabulary, required=False),
        "targets": seqio.Feature(vocabulary),
      },
    )
    added.append(name)
    return name

  yield add
  for name in added:
    seqio.TaskRegistry.remove(name)


add_task = pytest.fixture(_adding_tasks)
add_task_of_module = pytest.fixture(_adding_tasks, scope="module")


@pytest.fixture
def config() -> Callable[..., DatasetConfig]:
  """Builds a DatasetConfig with small lengths; arguments override its fields."""

  def build(name: Any, **overrides: Any) -> DatasetConfig:
    fields = {
      "task_feature_lengths": {"inputs": 16, "targets": 16},
      "split": "train",
      "batch_size": 4,
      "shuffle": False,
      "seed": 0,
    }
    return DatasetConfig(name, **{**fields, **overrides})

  return build


@pytest.fixture
def paragraphs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
  """A small text that replaces the standard library's, with a vocabulary size to match."""
  text = [
    f"Paragraph {n} states that {n * n} is the square of {n} and of {-n}." for n in range(600)
  ]
  monkeypatch.setattr(quickstart_data, "stdlib_paragraphs", lambda: iter(text))
  monkeypatch.setattr(quickstart_data, "VOCAB_SIZE", 180)
  return text


@pytest.fixture
def corpus_folder(paragraphs: list[str], tmp_path: pathlib.Path) -> pathlib.Path:
  """A folder for text and vocabulary, which does not exist yet."""
  return tmp_path / "run" / "data"
