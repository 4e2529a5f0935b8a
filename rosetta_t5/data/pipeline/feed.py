"""Feeds batches to the devices: prefetched, sharded, and with a position that can be saved."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from clu.data import dataset_iterator
from etils import epath
from flax import serialization
from jax.sharding import NamedSharding

from rosetta_t5.data.pipeline.feed_source import feed_source
from rosetta_t5.data.reading import BadExamples, unwrap_reader_errors

if TYPE_CHECKING:
  import tensorflow as tf

  from rosetta_t5.parallel.partitioner import BasePartitioner, DataLayout

HostBatch = Mapping[str, np.ndarray]
GlobalBatch = dict[str, jax.Array]


class ShardedDatasetIterator(dataset_iterator.DatasetIterator):
  """Yields the global batches to which each process gives its part, and prefetches the next ones.

  One thread draws from the source and copies to the devices while the step computes. The position
  that `save` writes is that of the batch last handed out: what was drawn ahead is written with it.

  Attributes:
    batches_handed_out: batches that the caller has had, counted over restores.
  """

  def __init__(
    self,
    iterator: dataset_iterator.DatasetIterator,
    partitioner: BasePartitioner,
    global_shapes: Mapping[str, tuple[int, ...]],
    *,
    prefetch: int = 2,
  ):
    """Wraps a source of host batches.

    Args:
      iterator: yields dictionaries of numpy arrays, this process's part of each batch.
      partitioner: its mesh and `data_partition_spec` place the batch.
      global_shapes: the shape of each feature in the global batch; other features are dropped.
      prefetch: batches to have ready; 0 draws each when it is asked for.
    """
    self._source = iterator
    self._global_shapes = dict(global_shapes)
    self._sharding = NamedSharding(partitioner.mesh, partitioner.data_partition_spec)
    self._prefetch = prefetch
    self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")
    self._pending: collections.deque[Future[tuple[HostBatch, GlobalBatch]]] = collections.deque()
    self.batches_handed_out = 0

  def __next__(self) -> GlobalBatch:
    """Returns the next batch; what went wrong in drawing it is raised here."""
    self.start_prefetching(self._prefetch + 1)
    try:
      _, batch = self._pending.popleft().result()
    except StopIteration:
      if self.batches_handed_out:
        raise
      raise ValueError(_no_batch_text(self._global_shapes)) from None
    self.batches_handed_out += 1
    return batch

  def start_prefetching(self, batches: int | None = None) -> None:
    """Draws ahead in the background, so that the first batch is ready when the step is."""
    while len(self._pending) < (self._prefetch if batches is None else batches):
      self._pending.append(self._thread.submit(self._draw))

  def _draw(self) -> tuple[HostBatch, GlobalBatch]:
    with unwrap_reader_errors():
      batch = next(self._source)
    host_batch = {name: np.asarray(batch[name]) for name in self._global_shapes}
    return host_batch, self._to_devices(host_batch)

  def _to_devices(self, host_batch: HostBatch) -> GlobalBatch:
    return {
      name: jax.make_array_from_process_local_data(
        self._sharding,
        np.asarray(value, jax.dtypes.canonicalize_dtype(value.dtype)),
        self._global_shapes[name],
      )
      for name, value in host_batch.items()
    }

  @property
  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each feature of the global batch."""
    local = self._source.element_spec
    return {
      name: jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(local[name].dtype))
      for name, shape in self._global_shapes.items()
    }

  @property
  def iterator(self) -> dataset_iterator.DatasetIterator:
    """The source of host batches."""
    return self._source

  @property
  def is_shard_independent(self) -> bool:
    """Whether the position is a step's number, which serves any number of hosts (prepared data)."""
    return getattr(self._source, "is_shard_independent", False)

  def measures(self) -> dict[str, float]:
    """Returns what a run's metrics tell of its data, up to the batch last handed out.

    "data/epochs/NAME" for each dataset, where the source knows (prepared data does), and
    "data/unreadable" there; "data/bad_examples" if this process has left some out.
    """
    of_source = getattr(self._source, "measures", None)
    told: dict[str, float] = of_source(self.batches_handed_out) if of_source else {}
    bad = BadExamples.total_in_process()
    return {**told, "data/bad_examples": float(bad)} if bad else told

  def reset(self) -> None:
    """Goes back to the first batch."""
    self._settle()
    self._pending.clear()
    self._source.reset()
    self.batches_handed_out = 0

  def save(self, filename: str | epath.Path) -> None:
    """Writes this process's position: `filename` by the source, `filename.feed` beside it.

    Raises:
      ValueError: the source cannot save where it stands.
    """
    drawn_ahead = self._settle()
    options = {"steps_back": len(drawn_ahead)} if self.is_shard_independent else {}
    drawn_ahead = [] if options else drawn_ahead
    try:
      self._source.save(filename, **options)
    except Exception as error:
      raise ValueError(_cannot_save_text(error)) from error
    state = {
      "batches_handed_out": self.batches_handed_out,
      "drawn_ahead": {f"{place:04}": batch for place, batch in enumerate(drawn_ahead)},
    }
    _feed_file(filename).write_bytes(serialization.msgpack_serialize(state))

  def restore(self, filename: str | epath.Path) -> None:
    """Continues after the batch that was the last one handed out at `save`.

    A position that T5X wrote, without the second file, is the source's alone.

    Raises:
      ValueError: the position is not there, or is another pipeline's.
    """
    self._settle()
    try:
      self._source.restore(filename)
    except Exception as error:
      raise ValueError(_cannot_restore_text(filename, error)) from error
    self._pending.clear()
    if not _feed_file(filename).exists():
      return
    state = serialization.msgpack_restore(_feed_file(filename).read_bytes())
    self.batches_handed_out = int(state["batches_handed_out"])
    for _, host_batch in sorted(state["drawn_ahead"].items()):
      self._pending.append(Future())
      self._pending[-1].set_result((host_batch, self._to_devices(host_batch)))

  def _settle(self) -> list[HostBatch]:
    """Waits until the source stands still, and returns the batches drawn ahead."""
    drawn = []
    for future in self._pending:
      if future.exception() is not None:
        break  # __next__ raises it in its turn; a restored source runs into it again.
      drawn.append(future.result()[0])
    return drawn

  def close(self) -> None:
    """Stops drawing ahead."""
    self._thread.shutdown(wait=True, cancel_futures=True)


def prepare_train_iter(
  train_iter: Any, *, partitioner: BasePartitioner, checkpoint_cfg: Any, data_layout: DataLayout
) -> ShardedDatasetIterator:
  """Returns the feed of a training run, already drawing its first batches.

  Args:
    train_iter: a tf.data.Dataset, a clu DatasetIterator, or any iterable of dictionaries of numpy
      arrays; each element is this process's part of a batch. Text features are dropped.
    partitioner: places the batch on the devices.
    checkpoint_cfg: a `CheckpointConfig` or None. If the position will be restored, nothing is
      drawn before.
    data_layout: the global batch size and the number of shards.

  Raises:
    ValueError: the batches have another size than the run's, or none that is fixed.
  """
  source = feed_source(train_iter)
  shapes = {
    name: _global_shape(name, spec.shape, data_layout)
    for name, spec in source.element_spec.items()
    if np.dtype(spec.dtype).kind not in "OSU"
  }
  feed = ShardedDatasetIterator(source, partitioner, shapes)
  if not getattr(getattr(checkpoint_cfg, "restore", None), "restore_dataset", False):
    feed.start_prefetching()
  return feed


def _global_shape(
  name: str, shape: tuple[int | None, ...], data_layout: DataLayout
) -> tuple[int, ...]:
  wanted = data_layout.batch_size // data_layout.num_shards
  if not shape or shape[0] != wanted or None in shape:
    raise ValueError(
      f"The training data's feature '{name}' has the shape {tuple(shape)}, but this process reads "
      f"{wanted} examples a batch (batch size {data_layout.batch_size} over "
      f"{data_layout.num_shards} data shards). The dataset function must return batches of "
      "cfg.batch_size // num_shards examples, all dimensions fixed (drop_remainder=True)."
    )
  return (data_layout.batch_size, *(int(size) for size in shape[1:] if size is not None))


def get_zeros_batch_like_spec(
  batch_spec: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, jax.Array]:
  """Returns a batch of zeros with these shapes and dtypes."""
  return {name: jnp.zeros(spec.shape, spec.dtype) for name, spec in batch_spec.items()}


def get_zeros_batch_like_dataset(
  dataset: tf.data.Dataset, batch_size: int | None = None
) -> dict[str, jax.Array]:
  """Returns a batch of zeros like the dataset's, of `batch_size` examples if that is given."""
  return get_zeros_batch_like_spec(
    {
      name: jax.ShapeDtypeStruct(
        (batch_size or spec.shape[0], *spec.shape[1:]), spec.dtype.as_numpy_dtype
      )
      for name, spec in dataset.element_spec.items()
    }
  )


def _feed_file(filename: str | epath.Path) -> epath.Path:
  return epath.Path(f"{filename}.feed")


def _no_batch_text(shapes: Mapping[str, tuple[int, ...]]) -> str:
  batch_size = next(iter(shapes.values()))[0]
  return (
    f"The training data ended before its first batch of {batch_size} examples: it is empty, or "
    "has fewer examples than one batch. Look at its files, or set a smaller BATCH_SIZE "
    "(DatasetConfig.batch_size)."
  )


def _cannot_save_text(error: Exception) -> str:
  return (
    f"This input pipeline cannot save its position ({_first_line(error)}). Set "
    "utils.SaveCheckpointConfig.save_dataset = False, or take what keeps a state outside of "
    "tf.data (tf.py_function, from_generator) out of the task."
  )


def _cannot_restore_text(filename: str | epath.Path, error: Exception) -> str:
  return (
    f"The input pipeline's position cannot be restored from {filename} ({_first_line(error)}). "
    "It is missing, or another task, batch size or data folder wrote it. Undo that change, or set "
    "utils.RestoreCheckpointConfig.restore_dataset = False to start the data anew."
  )


def _first_line(error: Exception) -> str:
  text = str(error).strip() or type(error).__name__
  return text.splitlines()[0][:200]
