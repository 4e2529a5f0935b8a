"""Errors of data name the file that is damaged, and the line of the example that cannot be used."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import pytest

from rosetta_t5 import data
from rosetta_t5.data.dataset_config import DatasetConfig
from rosetta_t5.data.pipeline.error_places import naming_example, naming_files
from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio, import_tensorflow

LENGTHS = {"inputs": 16, "targets": 16}


def refuse_x(example: Mapping[str, Any]) -> None:
  if ord("x") + 3 in example["inputs_tokens"]:  # ByteVocabulary has three special ids.
    raise ValueError("an x")


def config(name: str) -> DatasetConfig:
  return DatasetConfig(name, LENGTHS, "train", batch_size=4, shuffle=True, seed=0)


def message_about(name: str) -> str:
  with (
    pytest.raises(ValueError, match="the batch has an x") as caught,
    naming_example(config(name), refuse_x),
  ):
    raise ValueError("the batch has an x")
  return str(caught.value)


def test_a_bad_example_is_found_in_the_second_file_of_a_task_on_files(
  tmp_path: pathlib.Path,
) -> None:
  rows = [json.dumps({"in": f"row {number}", "out": "a"}) for number in range(300)]
  (tmp_path / "1.jsonl").write_text("\n".join(rows))
  rows[7], rows[200], rows[250] = "{", json.dumps({"in": "x", "out": "a"}), rows[200]
  (tmp_path / "2.jsonl").write_text("\n".join(rows))
  options: Any = {"objective": "seq2seq", "inputs": "in", "targets": "out"}
  vocabulary = import_seqio().ByteVocabulary()
  name = data.file_task(
    f"{tmp_path}/*.jsonl", vocabulary=vocabulary, validation_percent=0.0, **options
  )
  assert message_about(name) == (
    f"the batch has an x. The first such example: {tmp_path}/2.jsonl, line 201"
  )


def test_a_bad_example_of_other_sources_has_a_number(add_task: Any) -> None:
  assert message_about(add_task(["a", "bx", "x"])).endswith("first such example: train, example 2")


def test_the_message_remains_if_no_example_is_found(add_task: Any) -> None:
  assert message_about(add_task(["a", "b"])) == "the batch has an x"


def test_a_damaged_file_of_several_is_named(tmp_path: pathlib.Path) -> None:
  tf, seqio = import_tensorflow(), import_seqio()
  for name in ("a", "b", "c"):
    with tf.io.TFRecordWriter(f"{tmp_path}/{name}") as writer:
      writer.write(b"12345678")
  content = bytearray((tmp_path / "b").read_bytes())
  content[14] ^= 1
  (tmp_path / "b").write_bytes(content)
  feature = seqio.Feature(seqio.ByteVocabulary())
  source = seqio.FileDataSource(tf.data.TFRecordDataset, {"train": f"{tmp_path}/*"})
  task = seqio.Task("records", source, {"targets": feature}, preprocessors=[])
  with pytest.raises(ValueError, match="corrupted record") as caught, naming_files(config(task)):
    list(source.get_dataset("train", shuffle=False).as_numpy_iterator())
  assert str(caught.value) == (
    f"{tmp_path}/b cannot be read: corrupted record. Restore it from an intact copy"
  )
