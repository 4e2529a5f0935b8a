"""Feeds batches to the devices: checked, prefetched, sharded, and with a position that can be saved."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from clu.data import dataset_iterator
from etils import epath
from flax import serialization
from jax.sharding import NamedSharding

from rosetta_t5.data.dataset_config import DatasetConfig, data_errors_named
from rosetta_t5.data.pipeline import datasets
from rosetta_t5.data.pipeline.data_description import compare_descriptions, describe_data
from rosetta_t5.data.pipeline.datasets import HostBatch
from rosetta_t5.data.prepared.prepared_batches import PreparedIterator
from rosetta_t5.data.reading import BadExamples
from rosetta_t5.data.tensorflow_import import tf
from rosetta_t5.parallel import BasePartitioner, DataLayout

GlobalBatch = dict[str, jax.Array]

_PREFETCHED_BATCHES = 2


class ShardedDatasetIterator(dataset_iterator.DatasetIterator):
  """Yields global batches and prefetches the next ones. Each process reads its own part of a batch.

  One thread reads the source and copies batches to the devices while the step computes. The position
  that `save` writes is that of the last batch yielded, so the prefetched batches are saved with it.

  Attributes:
    iterator: the source of host batches.
    is_shard_independent: whether any number of hosts can restore the position, which is then a step
      number.
    batches_yielded: the number of batches yielded, including those before a restore.
  """

  def __init__(
    self,
    iterator: dataset_iterator.DatasetIterator,
    partitioner: BasePartitioner,
    global_shapes: Mapping[str, tuple[int, ...]],
    dataset_cfg: DatasetConfig | None = None,
    check: Callable[[HostBatch], None] | None = None,
  ):
    """Wraps a source of host batches.

    Args:
      iterator: yields dictionaries of numpy arrays, this process's part of each batch.
      partitioner: its mesh and `data_partition_spec` determine the sharding of the batch.
      global_shapes: the shape of each feature in the global batch; other features are dropped.
      dataset_cfg: describes the data, which is stored with a position and compared when the position
        is restored; None stores and compares nothing.
      check: raises an error for a batch that must not be used; None accepts every batch.
    """
    self.iterator = iterator
    self.is_shard_independent = isinstance(iterator, PreparedIterator)
    self._global_shapes = dict(global_shapes)
    self._dataset_cfg, self._check = dataset_cfg, check
    self._sharding = NamedSharding(partitioner.mesh, partitioner.data_partition_spec)
    self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")
    self._pending = collections.deque[Future[tuple[HostBatch, GlobalBatch]]]()
    self.batches_yielded = 0

  def __next__(self) -> GlobalBatch:
    """Returns the next batch. An error from reading it is raised here."""
    self.start_prefetching(_PREFETCHED_BATCHES + 1)
    try:
      host_batch, batch = self._pending.popleft().result()
    except StopIteration:
      if self.batches_yielded:
        raise
      batch_size = next(iter(self._global_shapes.values()))[0]
      raise ValueError(
        f"The training data ended before its first batch of {batch_size} examples: it is empty, or "
        "has fewer examples than one batch. Check its files, or set a smaller BATCH_SIZE "
        "(DatasetConfig.batch_size)."
      ) from None
    if self._check is not None:
      self._check(host_batch)
    self.batches_yielded += 1
    return batch

  def start_prefetching(self, count: int = _PREFETCHED_BATCHES) -> None:
    """Reads ahead in the background, so that the first batch is ready when the step is."""
    while len(self._pending) < count:
      self._pending.append(self._thread.submit(self._read))

  def _read(self) -> tuple[HostBatch, GlobalBatch]:
    with data_errors_named(self._dataset_cfg):
      batch = next(self.iterator)
    return self._transfer({name: np.asarray(batch[name]) for name in self._global_shapes})

  def _transfer(self, host_batch: HostBatch) -> tuple[HostBatch, GlobalBatch]:
    batch = {}
    for name, value in host_batch.items():
      value = np.asarray(value, jax.dtypes.canonicalize_dtype(value.dtype))
      place = jax.make_array_from_process_local_data
      batch[name] = place(self._sharding, value, self._global_shapes[name])
    return host_batch, batch

  @property
  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each feature of the global batch."""
    local = self.iterator.element_spec
    return {
      name: jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(local[name].dtype))
      for name, shape in self._global_shapes.items()
    }

  def measures(self) -> dict[str, float]:
    """Returns metrics of the data, up to the last batch yielded.

    Prepared data reports "data/epochs/NAME" for each folder. Any data reports "data/bad_examples" if
    this process has skipped some.
    """
    bad = float(BadExamples.total_in_process)
    found = {"data/bad_examples": bad} if bad else {}
    if isinstance(self.iterator, PreparedIterator):
      epochs = self.iterator.batches.epochs(self.batches_yielded)
      found |= {f"data/epochs/{name}": number for name, number in epochs.items()}
    return found

  @functools.cached_property
  def _description(self) -> dict[str, Any] | None:
    """What the feed reads, as it is when the first position is saved or restored."""
    cfg = self._dataset_cfg
    return None if cfg is None else describe_data(cfg, self.iterator)

  def reset(self) -> None:
    """Returns to the first batch."""
    self._wait_for_reads()
    self._pending.clear()
    self.iterator.reset()
    self.batches_yielded = 0

  def save(self, filename: str | epath.Path) -> None:
    """Writes this process's position: the source's to `filename`, the feed's to `filename.feed`.

    Raises:
      ValueError: the source cannot save its position.
      OSError: the files cannot be written. TensorFlow raises its own kinds of errors.
    """
    prefetched = self._wait_for_reads()
    if isinstance(self.iterator, PreparedIterator):
      self.iterator.save(filename, steps_back=len(prefetched))
      prefetched = []
    else:
      try:
        self.iterator.save(filename)
      except Exception as error:
        if "SerializeIter" not in str(error):
          raise
        raise ValueError(
          f"This input pipeline cannot save its position ({str(error).splitlines()[0][:200]}). Set "
          "utils.SaveCheckpointConfig.save_dataset = False, or remove from the task what keeps state "
          "outside of tf.data (tf.py_function, from_generator)."
        ) from error
    # Version 0.1.0 wrote these names too.
    state = {
      "data": self._description,
      "batches_handed_out": self.batches_yielded,
      "drawn_ahead": {f"{index:04}": batch for index, batch in enumerate(prefetched)},
    }
    epath.Path(f"{filename}.feed").write_bytes(serialization.msgpack_serialize(state))

  def restore(self, filename: str | epath.Path) -> None:
    """Continues after the batch that was last yielded before `save`.

    A position that T5X wrote has no second file; then only the source is restored.

    Raises:
      ValueError: the position does not exist, or belongs to other data or another pipeline.
    """
    self._wait_for_reads()
    file = epath.Path(f"{filename}.feed")
    state = serialization.msgpack_restore(file.read_bytes()) if file.exists() else {}
    stored, current = state.get("data"), self._description
    if stored and current and (changes := compare_descriptions(stored, current)):
      raise ValueError(
        f"the training data has changed since the position {filename} was saved:\n"
        + "".join(f"  {change}\n" for change in changes)
        + "Undo the change to continue with the next example"
      )
    try:
      self.iterator.restore(filename)
    except Exception as error:
      raise ValueError(
        f"the input pipeline's position cannot be restored from {filename}: {str(error)[:200]}. If it "
        "was saved with another task, batch size or data folder, undo that change"
      ) from error
    self.batches_yielded = int(state.get("batches_handed_out", self.batches_yielded))
    prefetched = [batch for _, batch in sorted(state.get("drawn_ahead", {}).items())]
    self._pending.clear()
    self._pending.extend(self._thread.submit(self._transfer, batch) for batch in prefetched)

  def _wait_for_reads(self) -> list[HostBatch]:
    """Waits until the thread is idle, and returns the batches that it has read."""
    wait(self._pending)
    return [read.result()[0] for read in self._pending if read.exception() is None]

  def close(self) -> None:
    """Stops prefetching."""
    self._thread.shutdown(wait=True, cancel_futures=True)


def training_feed(
  get_dataset_fn: Callable[..., Any],
  cfg: DatasetConfig,
  model: Any,
  partitioner: BasePartitioner,
  checkpoint_cfg: Any,
) -> ShardedDatasetIterator:
  """Returns the feed of a training run: its dataset function's batches, checked for its model.

  Args:
    get_dataset_fn: returns this process's batches, such as `get_dataset`.
    cfg: the data, with its seed.
    model: provides the feature converter and the number of token ids.
    partitioner: see `prepare_train_iter`.
    checkpoint_cfg: see `prepare_train_iter`.
  """
  layout = partitioner.get_data_layout(cfg.batch_size)
  batches = get_dataset_fn(cfg, layout.shard_id, layout.num_shards, model.FEATURE_CONVERTER_CLS)
  limit = datasets.token_limit(model)
  return prepare_train_iter(batches, partitioner, checkpoint_cfg, layout, cfg, limit)


def prepare_train_iter(
  train_iter: Any,
  partitioner: BasePartitioner,
  checkpoint_cfg: Any,
  data_layout: DataLayout,
  dataset_cfg: DatasetConfig | None = None,
  num_token_ids: int | None = None,
  is_training: bool = True,
) -> ShardedDatasetIterator:
  """Returns the feed of a training run or an evaluation, which reads its first batches in the background.

  Args:
    train_iter: a tf.data.Dataset, a clu DatasetIterator, or any iterable of dictionaries of numpy
      arrays; each element is this process's part of a batch. Text features are dropped.
    partitioner: determines the sharding of the batch.
    checkpoint_cfg: a `CheckpointConfig` or None. If it restores the position, nothing is read ahead.
    data_layout: the size of the global batch and the number of shards.
    dataset_cfg: the data's configuration; see `ShardedDatasetIterator`.
    num_token_ids: how many token ids the model knows; see `token_limit`.
    is_training: whether each batch must have a target to learn from.

  Raises:
    ValueError: the batches do not have the run's batch size, or their shapes are not fixed.
  """
  name = f"the task '{dataset_cfg.name}'" if dataset_cfg else "the training data"

  def check(batch: HostBatch) -> None:
    datasets.check_ids(batch, name, num_token_ids)
    if is_training and data_layout.num_shards == 1:  # Other hosts may have the batch's targets.
      datasets.check_has_target(batch, name)

  source = datasets.as_batch_iterator(train_iter)
  size, local_size = data_layout.batch_size, data_layout.batch_size // data_layout.num_shards
  shapes: dict[str, tuple[int, ...]] = {}
  for feature, spec in source.element_spec.items():
    if np.dtype(spec.dtype).kind in "OSU":
      continue
    if tuple(spec.shape)[:1] != (local_size,) or None in tuple(spec.shape):
      raise ValueError(
        f"The training data's feature '{feature}' has the shape {tuple(spec.shape)}, but this process "
        f"reads {local_size} examples per batch (batch size {size} over {data_layout.num_shards} data "
        "shards). The dataset function must return batches of cfg.batch_size // num_shards examples, "
        "with all dimensions fixed (drop_remainder=True)."
      )
    shapes[feature] = (size, *spec.shape[1:])
  feed = ShardedDatasetIterator(source, partitioner, shapes, dataset_cfg, check)
  if not (checkpoint_cfg and checkpoint_cfg.restore and checkpoint_cfg.restore.restore_dataset):
    feed.start_prefetching()
  return feed


def get_zeros_batch_like_spec(
  batch_spec: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, jax.Array]:
  """Returns a batch of zeros with these shapes and dtypes."""
  return {name: jnp.zeros(spec.shape, spec.dtype) for name, spec in batch_spec.items()}


def get_zeros_batch_like_dataset(
  dataset: tf.data.Dataset, batch_size: int | None = None
) -> dict[str, jax.Array]:
  """Returns a batch of zeros with a dataset's shapes, or with `batch_size` examples if it is given."""
  return {
    name: jnp.zeros((batch_size or spec.shape[0], *spec.shape[1:]), spec.dtype.as_numpy_dtype)
    for name, spec in dataset.element_spec.items()
  }
