"""The feed: global batches on eight devices, prefetched, with a position that can be restored."""

from __future__ import annotations

import pathlib
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from clu.data import dataset_iterator

from rosetta_t5.data import (
  DatasetConfig,
  ShardedDatasetIterator,
  get_dataset,
  get_zeros_batch_like_dataset,
  get_zeros_batch_like_spec,
  prepare_train_iter,
  training_feed,
)
from rosetta_t5.data.pipeline.datasets import as_batch_iterator
from rosetta_t5.data.tensorflow_import import import_seqio, import_tensorflow
from rosetta_t5.parallel.partitioner import PjitPartitioner

LINES = [f"line {number:03}" for number in range(100)]


@pytest.fixture(scope="module")
def packed_twice(add_task_of_module: Callable[..., str]) -> tuple[Any, Any]:
  """The same shuffled, packed training data built twice, as a run and its restart build it."""
  fields: dict[str, Any] = {"batch_size": 8, "shuffle": True, "seed": 5, "pack": True}
  lengths = {"inputs": 24, "targets": 24}
  cfg = DatasetConfig(add_task_of_module(LINES), lengths, "train", **fields)
  converter = import_seqio().EncDecFeatureConverter
  # A number of passes skips the check for empty data, which would take as long again.
  first, again = (get_dataset(cfg, 0, 1, converter, num_epochs=100) for _ in range(2))
  return first, again


@pytest.fixture
def make_feed() -> Iterator[Callable[..., ShardedDatasetIterator]]:
  feeds = []

  def make(data: Any, batch_size: int = 8) -> ShardedDatasetIterator:
    partitioner = PjitPartitioner(num_partitions=2)
    feed = prepare_train_iter(data, partitioner, None, partitioner.get_data_layout(batch_size))
    feeds.append(feed)
    return feed

  yield make
  for feed in feeds:
    feed.close()


def counting(stop: int = 100, batch_size: int = 8) -> Iterator[dict[str, np.ndarray]]:
  for number in range(stop):
    yield {"x": np.full((batch_size, 2), number, np.int32)}


def first_numbers(feed: ShardedDatasetIterator, count: int) -> list[int]:
  return [int(np.asarray(next(feed)["x"])[0, 0]) for _ in range(count)]


def assert_batches_equal(a: Any, b: Any) -> None:
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_batch_is_sharded_over_the_data_axis_and_replicated_over_the_model_axis(
  make_feed: Callable[..., ShardedDatasetIterator],
) -> None:
  batch = next(make_feed([{"x": np.arange(24).reshape(8, 3)}]))
  assert batch["x"].sharding.spec == jax.sharding.PartitionSpec("data")
  # Eight devices in four rows of two: each row holds two of the eight examples.
  assert {shard.data.shape for shard in batch["x"].addressable_shards} == {(2, 3)}
  np.testing.assert_array_equal(batch["x"], np.arange(24).reshape(8, 3))


def test_text_features_of_a_tensorflow_dataset_are_dropped(
  make_feed: Callable[..., ShardedDatasetIterator],
) -> None:
  tf = import_tensorflow()
  elements = {"x": tf.range(8, dtype=tf.int64), "text": tf.constant(["a"] * 8)}
  feed = make_feed(tf.data.Dataset.from_tensors(elements))
  assert feed.element_spec == {"x": jax.ShapeDtypeStruct((8,), np.int32)}
  batch = next(feed)
  assert list(batch) == ["x"]
  np.testing.assert_array_equal(batch["x"], range(8))


def test_a_clu_iterator_is_used_unchanged(
  make_feed: Callable[..., ShardedDatasetIterator],
) -> None:
  tf = import_tensorflow()
  dataset = tf.data.Dataset.range(16).batch(8, drop_remainder=True).map(lambda x: {"x": x})
  iterator = dataset_iterator.TfDatasetIterator(dataset, checkpoint=False)
  feed = make_feed(iterator)
  assert feed.iterator is iterator
  np.testing.assert_array_equal(next(feed)["x"], range(8))


def test_the_next_batches_are_read_while_the_caller_is_busy(
  make_feed: Callable[..., ShardedDatasetIterator],
) -> None:
  drawn = threading.Semaphore(0)

  def batches() -> Iterator[dict[str, np.ndarray]]:
    for batch in counting():
      drawn.release()
      yield batch

  feed = make_feed(batches())
  assert all(drawn.acquire(timeout=20) for _ in range(2))  # before the first request
  next(feed)
  assert drawn.acquire(timeout=20)  # two ahead again, before the next request


def test_an_error_in_the_thread_is_raised_after_the_batches_before_it(
  make_feed: Callable[..., ShardedDatasetIterator],
) -> None:
  def batches() -> Iterator[dict[str, np.ndarray]]:
    yield from counting(2)
    raise OSError("disk gone")

  feed = make_feed(batches())
  assert first_numbers(feed, 2) == [0, 1]
  with pytest.raises(OSError, match="disk gone"):
    next(feed)


def test_finite_data_ends(make_feed: Callable[..., ShardedDatasetIterator]) -> None:
  assert [int(np.asarray(batch["x"])[0, 0]) for batch in make_feed(counting(3))] == [0, 1, 2]


def test_data_without_a_full_batch_is_refused(
  make_feed: Callable[..., ShardedDatasetIterator],
) -> None:
  tf = import_tensorflow()
  dataset = tf.data.Dataset.range(7).batch(8, drop_remainder=True).map(lambda x: {"x": x})
  with pytest.raises(ValueError, match=r"ended before its first batch of 8 examples"):
    next(make_feed(dataset))


def test_an_empty_iterable_is_refused(make_feed: Callable[..., ShardedDatasetIterator]) -> None:
  with pytest.raises(ValueError, match=r"must contain batches.*got no batch"):
    make_feed([])


def test_batches_of_another_size_are_refused(
  make_feed: Callable[..., ShardedDatasetIterator],
) -> None:
  with pytest.raises(ValueError, match=r"'x' has the shape \(4, 2\).*reads 8 examples per batch"):
    make_feed(counting(batch_size=4))


def test_an_object_that_is_not_a_dataset_is_refused(
  make_feed: Callable[..., ShardedDatasetIterator],
) -> None:
  with pytest.raises(ValueError, match=r"must return a tf\.data\.Dataset.*, got int"):
    make_feed(3)


@pytest.mark.slow
def test_restart_continues_with_the_next_batch_of_shuffled_packed_data(
  make_feed: Callable[..., ShardedDatasetIterator],
  packed_twice: tuple[Any, Any],
  tmp_path: pathlib.Path,
) -> None:
  feed = make_feed(packed_twice[0])
  for _ in range(5):
    next(feed)
  feed.save(tmp_path / "train_ds")
  expected = [next(feed) for _ in range(15)]

  restarted = make_feed(packed_twice[1])
  restarted.restore(tmp_path / "train_ds")
  assert restarted.batches_yielded == 5
  for batch in expected:
    assert_batches_equal(next(restarted), batch)


@pytest.mark.slow
def test_saving_does_not_disturb_what_follows(
  make_feed: Callable[..., ShardedDatasetIterator],
  packed_twice: tuple[Any, Any],
  tmp_path: pathlib.Path,
) -> None:
  saving, undisturbed = map(make_feed, packed_twice)
  for step in range(6):
    assert_batches_equal(next(saving), next(undisturbed))
    saving.save(tmp_path / f"position_{step}")


def test_restart_of_an_iterable_skips_the_batches_already_used(
  make_feed: Callable[..., ShardedDatasetIterator], tmp_path: pathlib.Path
) -> None:
  feed = make_feed(counting())
  first_numbers(feed, 4)
  feed.save(tmp_path / "position")
  restarted = make_feed(counting())
  restarted.restore(tmp_path / "position")
  assert first_numbers(restarted, 5) == [4, 5, 6, 7, 8]


def test_a_generator_cannot_go_back_to_an_earlier_batch(tmp_path: pathlib.Path) -> None:
  data = as_batch_iterator(counting())
  next(data)
  data.save(tmp_path / "position")
  next(data)
  with pytest.raises(ValueError, match=r"can be read only once.*return a list"):
    data.restore(tmp_path / "position")


def test_a_position_beyond_the_end_of_the_data_is_refused_with_both_numbers(
  tmp_path: pathlib.Path,
) -> None:
  data = as_batch_iterator(counting(5))
  list(data)
  data.save(tmp_path / "position")
  with pytest.raises(ValueError, match=r"is after 5 batches, but the training data has only 3"):
    as_batch_iterator(counting(3)).restore(tmp_path / "position")


def test_reset_keeps_a_batch_that_was_read_for_its_shapes() -> None:
  data = as_batch_iterator(counting())
  assert data.element_spec
  data.reset()
  assert next(data)["x"][0, 0] == 0


def test_an_iterable_of_anything_but_dictionaries_is_refused(
  make_feed: Callable[..., ShardedDatasetIterator],
) -> None:
  with pytest.raises(
    ValueError, match=r"must contain batches, which are dictionaries of numpy arrays, got ndarray"
  ):
    make_feed([np.ones((8, 2))])


def test_a_restart_meets_a_prefetched_batch_that_was_refused_again(
  make_feed: Callable[..., ShardedDatasetIterator], tmp_path: pathlib.Path
) -> None:
  data = [{"x": batch["x"], "y_tokens": batch["x"]} for batch in counting(9)]
  data[3]["y_tokens"] = -data[3]["y_tokens"]
  feed = make_feed(data)
  first_numbers(feed, 2)
  feed.save(tmp_path / "position")  # batches 2 to 4 have been prefetched
  restarted = make_feed(data)
  restarted.restore(tmp_path / "position")
  assert first_numbers(restarted, 1) == [2]
  with pytest.raises(ValueError, match="y_tokens"):
    next(restarted)
  assert first_numbers(restarted, 2) == [4, 5]


def test_shapes_are_known_while_a_generator_is_being_read(
  make_feed: Callable[..., ShardedDatasetIterator],
) -> None:
  drawing, go_on = threading.Event(), threading.Event()

  def slow() -> Iterator[dict[str, np.ndarray]]:
    for number, batch in enumerate(counting()):
      if number > 0:
        drawing.set()
        go_on.wait(60)
      yield batch

  feed = make_feed(slow())
  drawing.wait(60)
  shapes = [spec.shape for spec in feed.element_spec.values()]
  go_on.set()
  assert shapes
  assert first_numbers(feed, 3) == [0, 1, 2]


def test_reset_goes_back_to_the_first_batch(
  make_feed: Callable[..., ShardedDatasetIterator],
) -> None:
  feed = make_feed(list(counting(9)))
  first_numbers(feed, 4)
  feed.reset()
  assert first_numbers(feed, 3) == [0, 1, 2]


def test_nothing_is_prefetched_when_the_position_will_be_restored() -> None:
  data, space = IterableThatCounts(), types.SimpleNamespace
  cfg = space(restore=space(restore_dataset=True))
  model = space(FEATURE_CONVERTER_CLS=None, network_config=space(vocab_size=None))
  data_cfg: Any = space(batch_size=8, name="counted")
  feed = training_feed(lambda *_: data, data_cfg, model, PjitPartitioner(num_partitions=2), cfg)
  time.sleep(0.3)  # a thread would have read more by then
  assert data.drawn == 1  # for the shapes
  feed.close()


class IterableThatCounts:
  drawn = 0

  def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
    for batch in counting():
      self.drawn += 1
      yield batch


def test_a_missing_position_is_refused(
  make_feed: Callable[..., ShardedDatasetIterator], tmp_path: pathlib.Path
) -> None:
  with pytest.raises(ValueError, match=r"cannot be restored from .*/gone"):
    make_feed(counting()).restore(tmp_path / "gone")


def test_a_pipeline_that_cannot_save_its_position_is_refused_with_what_to_set(
  make_feed: Callable[..., ShardedDatasetIterator], tmp_path: pathlib.Path
) -> None:
  tf = import_tensorflow()
  dataset = tf.data.Dataset.from_generator(
    counting, output_signature={"x": tf.TensorSpec([8, 2], tf.int32)}
  )
  with pytest.raises(ValueError, match=r"cannot save its position.*save_dataset = False"):
    make_feed(dataset).save(tmp_path / "position")


def test_a_position_that_cannot_be_written_is_not_reported_as_a_fault_of_the_pipeline(
  make_feed: Callable[..., ShardedDatasetIterator],
) -> None:
  dataset = import_tensorflow().data.Dataset.from_tensors({"x": np.zeros([8, 2], np.int32)})
  with pytest.raises(Exception, match=r"/proc/no") as caught:
    make_feed(dataset.repeat()).save("/proc/no/position")
  assert "save_dataset" not in str(caught.value)


def test_zeros_like_a_spec_and_like_a_dataset(packed_twice: tuple[Any, Any]) -> None:
  spec = {"x": jax.ShapeDtypeStruct((2, 3), np.int32)}
  np.testing.assert_array_equal(get_zeros_batch_like_spec(spec)["x"], np.zeros((2, 3)))
  batch = get_zeros_batch_like_dataset(packed_twice[0], batch_size=3)
  assert batch["encoder_input_tokens"].shape == (3, 24)
