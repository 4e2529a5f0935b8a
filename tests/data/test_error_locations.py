"""Errors of data name the file that is damaged, and the line of the example that cannot be used."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from rosetta_t5 import data
from rosetta_t5.data.dataset_config import DatasetConfig
from rosetta_t5.data.pipeline import error_locations
from rosetta_t5.data.pipeline.error_locations import naming_example, naming_files
from rosetta_t5.data.tensorflow_import import import_seqio, import_tensorflow

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
    f"the batch has an x. The first example that fails: {tmp_path}/2.jsonl, example 200"
  )


def test_a_bad_example_of_other_sources_has_a_number(add_task: Any) -> None:
  assert message_about(add_task(["a", "bx", "x"])).endswith(
    "first example that fails: train, example 2"
  )


def test_the_message_remains_if_no_example_is_found(add_task: Any) -> None:
  assert message_about(add_task(["a", "b"])) == "the batch has an x"


def test_the_search_for_an_example_ends_although_a_preprocessor_never_does(
  add_task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(error_locations, "SEARCH_SECONDS", 0.5)
  name = add_task(["a", "b"], preprocessors=[lambda dataset: dataset.repeat()])
  assert message_about(name) == "the batch has an x"


def test_the_source_of_a_cached_task_is_not_searched(add_task: Any) -> None:
  cached = dataclasses.replace(config(add_task(["x"])), use_cached=True)
  with (
    pytest.raises(ValueError, match=r"^the batch has an x$"),
    naming_example(cached, refuse_x),
  ):
    raise ValueError("the batch has an x")


@pytest.fixture
def add_source() -> Iterator[Callable[[str, Any], str]]:
  """Registers a task that has only a source, and a mixture `all_sources` of all of them."""
  seqio = import_seqio()
  features, names = {"targets": seqio.Feature(seqio.ByteVocabulary())}, []

  def add(name: str, source: Any) -> str:
    seqio.TaskRegistry.add(name, source, features, preprocessors=[])
    names.append(name)
    seqio.MixtureRegistry.remove("all_sources")
    seqio.MixtureRegistry.add("all_sources", names, default_rate=1)
    return name

  yield add
  seqio.MixtureRegistry.remove("all_sources")
  for name in names:
    seqio.TaskRegistry.remove(name)


def write_records(path: pathlib.Path, records: Sequence[bytes], damaged_byte: int = -1) -> None:
  """Writes a file of TFRecords, compressed if its name ends with .gz; inverts one of its bytes."""
  with import_tensorflow().io.TFRecordWriter(str(path), "GZIP" * (path.suffix == ".gz")) as writer:
    for record in records:
      writer.write(record)
  content = bytearray(path.read_bytes())
  if damaged_byte >= 0:
    content[damaged_byte] ^= 255
  path.write_bytes(content)


def records(pattern: pathlib.Path) -> Any:
  tf, compression = import_tensorflow(), "GZIP" * (pattern.suffix == ".gz")
  read = functools.partial(tf.data.TFRecordDataset, compression_type=compression)
  return import_seqio().FileDataSource(read, {"train": str(pattern)})


def reading_error(name: str, source: Any, **fields: Any) -> str:
  """Returns the message about an error of reading a source, which is a part of the task `name`."""
  cfg = dataclasses.replace(config(name), **fields)
  with pytest.raises(ValueError, match="cannot be read") as caught, naming_files(cfg):
    list(source.get_dataset("train", shuffle=False).as_numpy_iterator())
  return str(caught.value)


@pytest.mark.parametrize(("suffix", "reason"), [("", "corrupted record"), (".gz", "inflate.*")])
def test_the_damaged_file_is_named_and_no_intact_one_of_another_format(
  tmp_path: pathlib.Path, add_source: Any, suffix: str, reason: str
) -> None:
  (tmp_path / "lines.txt").write_text("neither a record nor compressed\n" * 9)
  write_records(tmp_path / "other.gz", [b"12345678"])
  for name in "abc":
    write_records(tmp_path / f"{name}{suffix}", [b"12345678"], 14 if name == "b" else -1)
  add_source("text", import_seqio().TextLineDataSource({"train": f"{tmp_path}/lines.txt"}))
  add_source("compressed", records(tmp_path / "other.gz"))
  source = records(tmp_path / f"[abc]{suffix}")
  add_source("records", source)
  assert re.fullmatch(
    rf"{tmp_path}/b{suffix} cannot be read: {reason}\. Restore it from an intact copy",
    reading_error("all_sources", source),
  )


def test_the_damaged_file_of_a_cache_is_named(tmp_path: pathlib.Path, add_source: Any) -> None:
  cache = tmp_path / "cache" / "cached_source"
  cache.mkdir(parents=True)
  for name in ("COMPLETED", "info.train.json"):
    (cache / name).write_text("{}")
  write_records(cache / "train.tfrecord-00000-of-00002", [b"12345678"])
  write_records(cache / "train.tfrecord-00001-of-00002", [b"12345678"], 14)
  seqio = import_seqio()
  add_source("cached_source", seqio.TextLineDataSource({"train": f"{cache}/info*"}))
  before = seqio.utils.get_global_cache_dirs()
  try:
    seqio.set_global_cache_dirs([str(tmp_path / "cache")])
    message = reading_error("cached_source", records(cache / "train*"), use_cached=True)
  finally:
    seqio.set_global_cache_dirs(before)
  assert message.startswith(f"{cache}/train.tfrecord-00001-of-00002 cannot be read: corrupted")


def test_damaged_data_without_a_known_file_has_the_name_of_its_task(
  tmp_path: pathlib.Path, add_source: Any
) -> None:
  write_records(tmp_path / "a", [b"12345678"], 14)
  source = records(tmp_path / "a")
  function = import_seqio().FunctionDataSource(
    lambda split, shuffle_files: source.get_dataset(split, shuffle_files), ["train"]
  )
  add_source("of_a_function", function)
  for name in ("of_a_function", "not_registered"):
    assert reading_error(name, source).startswith(
      f"the data of the task '{name}' cannot be read: corrupted record. Restore"
    )


def test_a_missing_file_is_named_with_its_spaces(tmp_path: pathlib.Path) -> None:
  path = tmp_path / "my data" / "the first.tfrecord"
  with pytest.raises(ValueError, match="cannot be read") as caught, naming_files(None):
    list(import_tensorflow().data.TFRecordDataset(str(path)))
  assert str(caught.value) == (
    f"the data cannot be read: {path}; No such file or directory. Restore it, or correct the task's "
    "file pattern"
  )


def test_a_record_that_lacks_a_feature_is_compared_with_its_description(
  tmp_path: pathlib.Path, add_source: Any
) -> None:
  tf = import_tensorflow()
  write_records(tmp_path / "a", [tf.train.Example().SerializeToString()])
  description = {"text": tf.io.FixedLenFeature([], tf.string)}
  source = import_seqio().TFExampleDataSource({"train": f"{tmp_path}/a"}, description)
  assert reading_error(add_source("examples", source), source) == (
    f"{tmp_path}/a cannot be read: Feature: text (data type: string) is required but could not be "
    "found. Compare the file with the task's feature description"
  )


@pytest.mark.parametrize(
  ("reason", "advice"),
  [
    ("Permission denied", "Make it readable"),
    ("Too many open files", "Raise the limit of open files (ulimit -n)"),
    ("Input/output error", "Restore it from an intact copy"),
  ],
)
def test_a_file_that_cannot_be_opened_has_its_own_advice(reason: str, advice: str) -> None:
  error = import_tensorflow().errors.UnknownError(
    None, None, f"{{{{function_node __wrapped__job:a}}}} /a b/c; {reason} [Op:IteratorGetNext]"
  )
  with pytest.raises(ValueError, match="cannot be read") as caught, naming_files(None):
    raise error
  assert str(caught.value) == f"the data cannot be read: /a b/c; {reason}. {advice}"
