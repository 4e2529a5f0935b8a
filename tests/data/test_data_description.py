"""A position in the data is restored only with the data with which it was saved."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from clu.data import dataset_iterator

from rosetta_t5.data import (
  DatasetConfig,
  ShardedDatasetIterator,
  check_same_files,
  file_task,
  get_dataset,
  prepare_train_iter,
)
from rosetta_t5.data.pipeline import data_description
from rosetta_t5.data.pipeline.data_description import compare_descriptions, describe_data
from rosetta_t5.data.pipeline.datasets import as_batch_iterator
from rosetta_t5.data.reading.files import compare_files, describe_files
from rosetta_t5.data.tensorflow_import import import_seqio, import_tensorflow
from rosetta_t5.parallel.partitioner import PjitPartitioner

pytestmark = pytest.mark.usefixtures("isolated_registries")

MakeFeed = Callable[[DatasetConfig, Any], ShardedDatasetIterator]


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
  """Three files of 40 numbered lines."""
  (tmp_path / "text").mkdir()
  for number in range(3):
    lines = [f"line {line:02} of file {number}\n" for line in range(40)]
    (tmp_path / f"text/{number}.txt").write_text("".join(lines))
  return tmp_path / "text"


@pytest.fixture
def make_feed() -> Iterator[MakeFeed]:
  feeds = []

  def make(cfg: DatasetConfig, batches: Any = None) -> ShardedDatasetIterator:
    partitioner = PjitPartitioner(num_partitions=1)
    if batches is None:
      batches = get_dataset(cfg, 0, 1, import_seqio().EncDecFeatureConverter, num_epochs=9)
    feed = prepare_train_iter(
      batches,
      partitioner=partitioner,
      checkpoint_cfg=None,
      data_layout=partitioner.get_data_layout(8),
      dataset_cfg=cfg,
    )
    feeds.append(feed)
    return feed

  yield make
  for feed in feeds:
    feed.close()


def config(name: str, **overrides: Any) -> DatasetConfig:
  lengths = {"inputs": 32, "targets": 16}
  fields = {"split": "train", "batch_size": 8, "shuffle": True, "seed": 0}
  return DatasetConfig(name, **{"task_feature_lengths": lengths, **fields, **overrides})


def own_files(folder: pathlib.Path, **arguments: Any) -> str:
  import_seqio().TaskRegistry.reset()
  vocabulary = import_seqio().ByteVocabulary()
  return file_task(f"{folder}/*.txt", vocabulary=vocabulary, objective="prefix_lm", **arguments)


def describe(cfg: DatasetConfig) -> dict[str, Any]:
  dataset = import_tensorflow().data.Dataset.from_tensors({"x": [0]})
  return describe_data(cfg, as_batch_iterator(dataset))


def rewrite(path: pathlib.Path, old: str, new: str) -> None:
  path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
  ("change", "expected"),
  [
    (
      lambda f: rewrite(f / "1.txt", "20", "21"),
      r"changed: 1\.txt \(other contents\)",
    ),
    (lambda f: rewrite(f / "1.txt", "20", ""), r"changed: 1\.txt \(size 720 → 718\)"),
    (lambda f: (f / "3.txt").write_text("x\n"), r"added: 3\.txt"),
    (lambda f: (f / "2.txt").unlink(), r"removed: 2\.txt"),
    (lambda f: (f / "0.txt").rename(f / "9.txt"), r"removed: 0\.txt; added: 9\.txt"),
  ],
)
def test_changed_files_are_named(folder: pathlib.Path, change: Any, expected: str) -> None:
  before = describe(config(own_files(folder)))
  change(folder)
  (text,) = compare_descriptions(before, describe(config(own_files(folder))))
  assert text.startswith(f"task.file_task.data: in {folder}, ")
  assert re.search(expected, text), text


@pytest.mark.parametrize(
  ("arguments", "overrides", "expected"),
  [
    ({}, {"seed": 1}, "seed: 0 → 1"),
    ({}, {"pack": True}, "pack: False → True"),
    ({}, {"split": "validation"}, "split: train → validation"),
    (
      {},
      {"task_feature_lengths": {"inputs": 32, "targets": 8}},
      "task_feature_lengths.targets: 16 → 8",
    ),
    ({"text_unit": "file"}, {}, "task.file_task.arguments.layout.text_unit: line → file"),
    ({"validation_percent": 5}, {}, "task.file_task.arguments.validation_percent: 1.0 → 5"),
  ],
)
def test_changed_settings_are_named(
  folder: pathlib.Path, arguments: dict, overrides: dict, expected: str
) -> None:
  before = describe(config(own_files(folder)))
  assert compare_descriptions(before, describe(config(own_files(folder)))) == []
  after = describe(config(own_files(folder, **arguments), **overrides))
  assert compare_descriptions(before, after) == [expected]


@pytest.mark.slow
def test_a_restart_continues_with_the_next_example_after_its_files_were_moved(
  folder: pathlib.Path, make_feed: MakeFeed, tmp_path: pathlib.Path
) -> None:
  feed = make_feed(config(own_files(folder)))
  for _ in range(4):
    next(feed)
  feed.save(tmp_path / "position")
  expected = [next(feed) for _ in range(6)]
  moved = folder.rename(tmp_path / "moved")
  restarted = make_feed(config(own_files(moved)))
  restarted.restore(tmp_path / "position")
  for batch in expected:
    for name, value in next(restarted).items():
      np.testing.assert_array_equal(value, batch[name])


@pytest.mark.slow
def test_a_restart_with_other_data_is_refused(
  folder: pathlib.Path, make_feed: MakeFeed, tmp_path: pathlib.Path
) -> None:
  make_feed(config(own_files(folder))).save(tmp_path / "position")
  rewrite(folder / "2.txt", "line 39", "line xx")
  restarted = make_feed(config(own_files(folder)))
  with pytest.raises(ValueError, match=r"(?s)data has changed since.*changed: 2\.txt"):
    restarted.restore(tmp_path / "position")


def test_a_task_that_stores_paths_must_not_move(tmp_path: pathlib.Path) -> None:
  tf, seqio = import_tensorflow(), import_seqio()

  def described(folder: pathlib.Path) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    (folder / "a.tfrecord").write_bytes(b"record")
    seqio.TaskRegistry.reset()
    seqio.TaskRegistry.add(
      "records",
      source=seqio.TFExampleDataSource(
        {"train": f"{folder}/*"}, {"inputs": tf.io.FixedLenFeature([], tf.string)}
      ),
      preprocessors=[],
      output_features={"inputs": seqio.Feature(seqio.ByteVocabulary())},
    )
    return describe(config("records"))

  assert compare_descriptions(described(tmp_path / "a"), described(tmp_path / "b")) == [
    f"task.records.data: moved from {tmp_path}/a to {tmp_path}/b (the position contains paths: make "
    "the old path a link to the new one)"
  ]


def test_a_mixture_is_compared_by_its_tasks_and_rates(add_task: Callable[..., str]) -> None:
  seqio = import_seqio()

  def description(rate: float, second: str) -> dict[str, Any]:
    seqio.TaskRegistry.reset()
    seqio.MixtureRegistry.reset()
    tasks = [(add_task(["a"], "one"), 1.0), (add_task(["a"], second), rate)]
    seqio.MixtureRegistry.add("both", tasks)
    return describe(config("both"))

  before = description(1.0, "two")
  assert compare_descriptions(before, description(1.0, "two")) == []
  assert compare_descriptions(before, description(3.0, "two")) == ["task.two.rate: 1.0 → 3.0"]
  changes = compare_descriptions(before, description(1.0, "three"))
  assert [change.partition(":")[0] for change in changes] == ["task.three", "task.two"]


class OwnIterator(dataset_iterator.DatasetIterator):
  """A user's iterator, which describes its data."""

  def __init__(self, path: str):
    self._path = path

  @property
  def element_spec(self) -> dict[str, dataset_iterator.ArraySpec]:
    return {"x": dataset_iterator.ArraySpec(np.dtype(np.int32), (8, 2))}

  def describe_data(self) -> dict[str, str]:
    return {"path": self._path}

  def __next__(self) -> dict[str, np.ndarray]:
    return {"x": np.zeros((8, 2), np.int32)}

  def reset(self) -> None:
    pass

  def save(self, filename: Any) -> None:
    pathlib.Path(filename).write_text("0")

  def restore(self, filename: Any) -> None:
    pass


def test_a_users_iterator_describes_its_data(make_feed: MakeFeed, tmp_path: pathlib.Path) -> None:
  make_feed(config("own"), OwnIterator("a")).save(tmp_path / "position")
  with pytest.raises(ValueError, match=r"data\.path: a → b"):
    make_feed(config("own"), OwnIterator("b")).restore(tmp_path / "position")


def test_files_are_compared_by_their_heads_and_sizes(tmp_path: pathlib.Path) -> None:
  path = tmp_path / "large"

  def found() -> dict[str, Any]:
    return json.loads(json.dumps(describe_files([str(path)], is_movable=True)))

  path.write_bytes(bytes(200_000))
  before = found()
  path.write_bytes(bytes(199_999) + b"x")
  assert compare_files(before, found()) == []
  path.write_bytes(b"x" + bytes(199_999))
  assert compare_files(before, found()) == [f"in {tmp_path}, changed: large (other contents)"]


def test_of_files_with_the_same_name_in_several_folders_each_is_compared_between_processes(
  folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  compared: list[dict[str, str]] = []
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(data_description, "check_same", lambda values, *_: compared.append(values))
  for machine in ("first", "second", "first_changed", "second_changed"):
    for part in ("a", "b"):
      shutil.copytree(folder, tmp_path / machine / part)
  for machine, part in (("first_changed", "a"), ("second_changed", "b")):
    rewrite(tmp_path / machine / part / "1.txt", "20", "")
  for machine in ("first", "second", "first_changed", "second_changed"):
    import_seqio().TaskRegistry.reset()
    task = file_task(f"{tmp_path / machine}/*/*.txt", name="own")
    check_same_files(config(task))
  first, second, *changed = compared
  assert first == second
  assert all(values != first for values in changed)
