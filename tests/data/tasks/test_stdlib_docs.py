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


@pytest.fixture(scope="module")
def stdlib_docs() -> Any:
  from rosetta_t5.data.tasks import stdlib_docs

  return stdlib_docs


@pytest.fixture
def folder(stdlib_docs: Any, corpus_folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """A folder that does not exist yet and that the task will write and read."""
  stdlib_docs.register(TASK, corpus_folder)
  yield corpus_folder
  import_seqio().TaskRegistry.remove(TASK)


@pytest.mark.slow
def test_text_and_vocabulary_are_made_when_the_task_is_first_read(
  stdlib_docs: Any, folder: pathlib.Path
) -> None:
  cfg = DatasetConfig(TASK, {"inputs": 32, "targets": 16}, "train", 4, shuffle=True, seed=0)
  assert not folder.exists()
  dataset = get_dataset(cfg, 0, 1, import_seqio().EncDecFeatureConverter, num_epochs=1)
  batch = next(dataset.as_numpy_iterator())
  assert json.loads((folder / "manifest.json").read_text())["train_paragraphs"]
  vocabulary = stdlib_docs.vocabulary(folder)
  text = "".join(vocabulary.decode(row.tolist()) for row in batch["encoder_input_tokens"])
  assert "Paragraph" in text
  assert "<extra_id_0>" in text


def test_the_models_vocabulary_matches_the_tasks(stdlib_docs: Any, folder: pathlib.Path) -> None:
  class Model:
    input_vocabulary = output_vocabulary = stdlib_docs.vocabulary(folder)
    network_config = None

  cfg = DatasetConfig(TASK, {"inputs": 32, "targets": 16}, "train", 4, shuffle=True, seed=0)
  verify_matching_vocabs(cfg, Model())
  assert Model.input_vocabulary.vocab_size == 180


@pytest.mark.slow
def test_rows_of_bytes_are_full_and_continue_across_paragraphs(
  stdlib_docs: Any, corpus_folder: pathlib.Path
) -> None:
  stdlib_docs.register_bytes("bytes_of_tests", corpus_folder)
  cfg = DatasetConfig("bytes_of_tests", {"targets": 48}, "train", 4, shuffle=True, seed=0)
  converter = import_seqio().DecoderFeatureConverter
  batch = next(get_dataset(cfg, 0, 1, converter, num_epochs=1).as_numpy_iterator())
  import_seqio().TaskRegistry.remove("bytes_of_tests")
  assert (batch["decoder_target_tokens"] > 0).all()
  row = batch["decoder_target_tokens"][0]
  text = import_seqio().ByteVocabulary().decode(row[row != 1].tolist())  # without end tokens
  assert "aragraph" in text
  assert 1 in row
