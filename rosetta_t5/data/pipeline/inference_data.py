"""Reads examples in chunks for inference, each with the task's features and with the model's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rosetta_t5.data.dataset_config import DatasetConfig
from rosetta_t5.data.pipeline.error_locations import naming_files
from rosetta_t5.data.pipeline.task_lookup import find_checked_task, read_task, subtasks_with_split
from rosetta_t5.data.tensorflow_import import import_seqio, import_tensorflow

if TYPE_CHECKING:
  import tensorflow as tf


class InferenceData:
  """One unshuffled pass over one shard of a task or mixture, without packing.

  Attributes:
    tasks: the task, or the mixture's tasks that have the split.
  """

  def __init__(
    self, cfg: DatasetConfig, feature_converter_cls: Any, shard_id: int, num_shards: int
  ):
    """Checks the arguments; reads no data.

    Args:
      cfg: the task or mixture, its split and its feature lengths.
      feature_converter_cls: called with `pack=False`.
      shard_id: the shard of the data to read.
      num_shards: the number of shards; each example is in exactly one.

    Raises:
      ValueError: the task, its split, its cache or the shard does not exist, or the lengths do not
        fit the model.
    """
    seqio = import_seqio()
    if not 0 <= shard_id < num_shards:
      raise ValueError(
        f"infer.shard_id must be between 0 and {num_shards - 1} (infer.num_shards = {num_shards}), "
        f"got {shard_id}. The flag --shard_id also sets it."
      )
    self._converter = feature_converter_cls(pack=False)
    provider = find_checked_task(cfg, self._converter)
    self._cfg = cfg
    self._shard = seqio.ShardInfo(index=shard_id, num_shards=num_shards)
    self.tasks = subtasks_with_split(cfg, provider)

  def _datasets(self, task: Any) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Returns the examples with the task's features, and with the model's features."""
    cfg = self._cfg
    examples = read_task(cfg, task, seed=cfg.seed, shard_info=self._shard)
    return examples, self._converter(examples, task_feature_lengths=cfg.task_feature_lengths)

  def element_spec(self) -> dict[str, tf.TensorSpec]:
    """Returns shape and dtype of each of the model's features, without a batch dimension."""
    return self._datasets(self.tasks[0])[1].element_spec

  def chunks(
    self, task: Any, size: int, first: int = 0
  ) -> Iterator[tuple[int, tf.data.Dataset, tf.data.Dataset]]:
    """Yields the chunks of a task, starting with number `first` (see `iterate_chunks`).

    Raises:
      ValueError: a file of the task is damaged.
    """
    with naming_files(self._cfg):
      yield from iterate_chunks(*self._datasets(task), size, first)


def iterate_chunks(
  task_ds: tf.data.Dataset, model_ds: tf.data.Dataset, size: int, first: int = 0
) -> Iterator[tuple[int, tf.data.Dataset, tf.data.Dataset]]:
  """Yields (number, examples with the task's features, the same with the model's) of each chunk.

  Chunks before the first are read and skipped. A restart therefore sees the same chunks even if the
  input pipeline cannot save its position.

  Args:
    task_ds: the examples with the task's features.
    model_ds: the same examples with the model's features.
    size: examples per chunk.
    first: the number of the first chunk to yield.
  """
  tf = import_tensorflow()
  both = tf.data.Dataset.zip((task_ds, model_ds)).skip(first * size)
  for number, chunk in enumerate(both.padded_batch(size).prefetch(1), first):
    pairs = tf.data.Dataset.from_tensor_slices(chunk)
    yield number, pairs.map(lambda task, _: task), pairs.map(lambda _, model: model)
