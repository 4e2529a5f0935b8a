"""The number of examples, the share truncated and the epochs that a run states about its data."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest

from rosetta_t5.data import (
  DatasetConfig,
  check_examples,
  file_task,
  get_dataset,
  mixture,
  task_on_rows,
)
from rosetta_t5.data.tensorflow_import import import_seqio
from rosetta_t5.data.vocabularies.sentencepiece_models import train_sentencepiece

pytestmark = pytest.mark.usefixtures("isolated_registries")


@pytest.fixture
def cfg(tmp_path: pathlib.Path) -> DatasetConfig:
  """A task of 100 rows: inputs of 10 bytes, and targets of 4 bytes in the first half and of 8 bytes."""
  rows = [f"{n:010d},{'a' * (4 if n < 50 else 8)}\n" for n in range(100)]
  (tmp_path / "rows.csv").write_text("inputs,targets\n" + "".join(rows))
  task = file_task(
    str(tmp_path / "rows.csv"),
    vocabulary=import_seqio().ByteVocabulary(),
    objective="seq2seq",
    inputs="inputs",
    targets="targets",
    validation_percent=0.0,
    name="rows",
  )
  return DatasetConfig(task, {"inputs": 11, "targets": 9}, "train", 8, shuffle=True, seed=0)


def describe(cfg: DatasetConfig, steps: int, **changes: Any) -> list[str]:
  return check_examples(dataclasses.replace(cfg, **changes), get_dataset)(steps)


@pytest.mark.slow
def test_the_examples_the_share_truncated_and_the_epochs_of_the_steps_are_stated(
  cfg: DatasetConfig,
) -> None:
  (text,) = describe(cfg, 25)
  assert text == (
    "100 in all; truncated: 0.0% of the inputs, 0.0% of the targets, of the first 100; "
    "25 steps are about 2 epochs"
  )
  (text,) = describe(cfg, 25, task_feature_lengths={"inputs": 10, "targets": 8})
  assert "truncated: 100.0% of the inputs, 50.0% of the targets" in text
  (text,) = describe(cfg, 25, pack=True, task_feature_lengths={"inputs": 44, "targets": 90})
  assert text.endswith("25 steps are about 8 epochs")  # four inputs fit into a row


@pytest.mark.slow
def test_each_task_of_a_mixture_is_described(cfg: DatasetConfig, tmp_path: pathlib.Path) -> None:
  (tmp_path / "more.csv").write_text("inputs,targets\n" + "a,b\n" * 20)
  like = import_seqio().TaskRegistry.get("rows")
  names = [
    "rows",
    task_on_rows([str(tmp_path / "more.csv")], like, import_seqio().ByteVocabulary(), {}),
  ]
  texts = describe(cfg, 100, mixture_or_task_name=mixture(names, rates=[3, 1]))
  first, second = sorted(texts, key=lambda text: not text.startswith("rows: 100 in all; truncated"))
  assert first.startswith("rows: 100 in all; truncated")
  assert ": 20 in all; truncated" in second


def test_targets_that_lose_their_end_in_most_rows_are_refused_unless_allowed(
  cfg: DatasetConfig,
) -> None:
  lengths = {"inputs": 8, "targets": 4}
  with pytest.raises(
    ValueError, match=r"100% of the first 100 targets.*= 4 and would lose their end"
  ):
    describe(cfg, 1, task_feature_lengths=lengths)
  (text,) = describe(cfg, 1, task_feature_lengths=lengths, allow_truncated_targets=True)
  assert "100.0% of the targets" in text


def test_the_data_of_a_users_own_dataset_function_is_not_described(cfg: DatasetConfig) -> None:
  def own(*_: Any, **__: Any) -> Any:
    raise AssertionError

  assert check_examples(cfg, own)(100) == []


def test_characters_that_the_vocabulary_lacks_are_named(
  cfg: DatasetConfig, tmp_path: pathlib.Path
) -> None:
  model = train_sentencepiece(["the red cat of the sea", "the old hat of the sea"], 16)
  (tmp_path / "pieces.model").write_bytes(model)
  (tmp_path / "more.csv").write_text("inputs,targets\n" + "the cat,the hat é\n" * 20)
  task = file_task(
    str(tmp_path / "more.csv"),
    vocabulary=import_seqio().SentencePieceVocabulary(str(tmp_path / "pieces.model"), 100),
    objective="seq2seq",
    inputs="inputs",
    targets="targets",
    validation_percent=0.0,
  )
  (text,) = describe(
    cfg, 25, mixture_or_task_name=task, task_feature_lengths={"inputs": 64, "targets": 64}
  )
  assert "; the vocabulary has no piece for 'é' 20 times" in text
