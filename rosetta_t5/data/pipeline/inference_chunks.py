"""A task's examples in chunks of a known size, each as the task and as the model sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rosetta_t5.data.dataset_config import DatasetConfig
from rosetta_t5.data.pipeline.providers import (
  check_cached,
  check_feature_lengths,
  check_split,
  find_provider,
  has_split,
)
from rosetta_t5.data.pipeline.text_examples import in_chunks
from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio

if TYPE_CHECKING:
  import tensorflow as tf


class InferenceData:
  """The examples of one shard of a task or mixture: unshuffled, once, nothing packed.

  Attributes:
    tasks: the tasks, of a mixture those that have the split.
  """

  def __init__(
    self, cfg: DatasetConfig, feature_converter_cls: Any, shard_id: int, num_shards: int
  ):
    """Checks what is given; nothing is read.

    Args:
      cfg: the task or mixture, its split and lengths.
      feature_converter_cls: called with `pack=False`.
      shard_id: which shard of the data to read.
      num_shards: shards in all; each example lies in exactly one.

    Raises:
      ValueError: the task, its split, its cache or that shard does not exist, or the lengths are
        not the model's.
    """
    seqio = import_seqio()
    if not 0 <= shard_id < num_shards:
      raise ValueError(
        f"infer.shard_id = {shard_id} does not exist among infer.num_shards = {num_shards}: shards "
        f"count from 0 to {num_shards - 1} (--shard_id sets it too)"
      )
    provider = find_provider(cfg)
    check_cached(cfg, provider)
    check_split(cfg, provider)
    self._converter = feature_converter_cls(pack=False)
    check_feature_lengths(cfg, self._converter)
    self._cfg = cfg
    self._shard = seqio.ShardInfo(index=shard_id, num_shards=num_shards)
    self.tasks = [
      task for task in seqio.get_subtasks(provider) if cfg.use_cached or has_split(task, cfg.split)
    ]

  def _datasets(self, task: Any) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Returns the examples, with the task's features and with the model's."""
    examples = task.get_dataset(
      sequence_length=self._cfg.task_feature_lengths,
      split=self._cfg.split,
      use_cached=self._cfg.use_cached,
      shuffle=False,
      seed=self._cfg.seed,
      shard_info=self._shard,
      num_epochs=1,
    )
    return examples, self._converter(examples, task_feature_lengths=self._cfg.task_feature_lengths)

  def element_spec(self) -> dict[str, tf.TensorSpec]:
    """Shape and dtype of each of the model's features, without the batch."""
    return self._datasets(self.tasks[0])[1].element_spec

  def chunks(
    self, task: Any, size: int, first: int = 0
  ) -> Iterator[tuple[int, tf.data.Dataset, tf.data.Dataset]]:
    """Yields (number, task's examples, model's examples) of each chunk from `first` on."""
    return in_chunks(*self._datasets(task), size, first)
