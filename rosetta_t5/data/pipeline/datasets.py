"""Turns a `DatasetConfig`, or any iterable of batches, into the batches of one host, and checks their values."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from clu.data import dataset_iterator
from etils import epath

from rosetta_t5.data import dataset_config
from rosetta_t5.data.dataset_config import DatasetConfig
from rosetta_t5.data.pipeline.model_features import TaskFeatureConverter
from rosetta_t5.data.prepared import PreparedTask
from rosetta_t5.data.tensorflow_import import seqio, tf
from rosetta_t5.networks.other_networks import setting_of
from rosetta_t5.parallel.data_layout import multiples_near

FeatureConverterFactory = Callable[..., "seqio.FeatureConverter"]
HostBatch = Mapping[str, np.ndarray]

_INT32 = np.iinfo(np.int32)


def get_dataset(
  cfg: DatasetConfig,
  shard_id: int,
  num_shards: int,
  feature_converter_cls: FeatureConverterFactory,
  num_epochs: int | None = None,
  continue_from_last_checkpoint: bool = False,
) -> tf.data.Dataset:
  """Returns this shard's batches of model features, with `cfg.batch_size / num_shards` examples each.

  Args:
    cfg: the dataset.
    shard_id: the shard of the data to read.
    num_shards: the number of shards; each example is in exactly one.
    feature_converter_cls: called with `pack` and `use_custom_packing_ops`.
    num_epochs: the number of passes over the data; None repeats it forever.
    continue_from_last_checkpoint: must be False. It exists for users' own dataset functions; a restart
      restores this one if `SaveCheckpointConfig.save_dataset` is set.

  Raises:
    ValueError: the task, its split or its features do not exist, the batch size is not a multiple of
      the number of shards, or the data has no example.
  """
  if continue_from_last_checkpoint:
    raise ValueError(
      "To continue from the last checkpoint, set utils.SaveCheckpointConfig.save_dataset = True"
    )
  _check_batch_size(cfg, num_shards)
  seed = dataset_config.resolve_seed(cfg)
  if isinstance(cfg.mixture_or_task_name, PreparedTask):
    return cfg.mixture_or_task_name.batches(cfg, shard_id, num_shards, seed)
  shard_info = seqio.ShardInfo(index=shard_id, num_shards=num_shards)
  return get_dataset_inner(cfg, shard_info, feature_converter_cls, seed, num_epochs)


def get_dataset_inner(
  cfg: DatasetConfig,
  shard_info: seqio.ShardInfo,
  feature_converter_cls: FeatureConverterFactory,
  seed: int | None = None,
  num_epochs: int | None = None,
) -> tf.data.Dataset:
  """Returns the batches of one shard. All processes must pass the same seed."""
  packing = {"pack": cfg.pack, "use_custom_packing_ops": cfg.use_custom_packing_ops}
  converter = feature_converter_cls(**packing)
  provider = dataset_config.find_checked_task(cfg, converter)
  if num_epochs is None:
    _check_not_empty(cfg, provider, shard_info)
  dataset = dataset_config.read_task(
    cfg,
    provider,
    shuffle=cfg.shuffle,
    seed=seed,
    shard_info=shard_info,
    num_epochs=num_epochs,
    trim_output_features=cfg.trim_output_features,
  )
  for preprocess in cfg.runtime_preprocessors or ():
    dataset = preprocess(dataset)
  converter = TaskFeatureConverter(converter, provider.output_features)
  dataset = converter(dataset, task_feature_lengths=cfg.task_feature_lengths)
  return dataset.batch(cfg.batch_size // shard_info.num_shards, drop_remainder=True)


def get_training_eval_datasets(
  cfg: DatasetConfig,
  shard_id: int,
  num_shards: int,
  eval_steps: int | None,
  feature_converter_cls: FeatureConverterFactory,
  deterministic: bool = False,
  model_dir: str | None = None,
  start_step: int = 0,
) -> Mapping[str, tf.data.Dataset]:
  """Returns `eval_steps` batches of a task, or of a mixture and each of its tasks, by name.

  As in T5X, the batches are the same for any number of shards: each shard reads all examples and
  keeps its own. Too few examples are repeated. Tasks without the split are left out. Without
  `eval_steps`, all examples are read once (those of a mixture until one of its tasks ends), and empty
  ones, which have no loss, complete the last batch.

  Args:
    cfg: the dataset; its `mixture_or_task_name` may be a mixture.
    shard_id: the shard to read.
    num_shards: the number of shards.
    eval_steps: the number of batches; None for as many as the split has.
    feature_converter_cls: see `get_dataset`.
    deterministic: must be False; T5X's deterministic tasks are not supported.
    model_dir: ignored, because T5X uses it only for deterministic tasks.
    start_step: ignored, for the same reason.

  Raises:
    ValueError: the same errors as in `get_dataset`, or a task has no example.
  """
  del model_dir, start_step
  if deterministic:
    raise ValueError("get_training_eval_datasets cannot use deterministic=True: leave it False")
  _check_batch_size(cfg, num_shards)
  if isinstance(prepared := cfg.mixture_or_task_name, PreparedTask):
    return {cfg.name: prepared.eval_batches(cfg, shard_id, num_shards, eval_steps or _INT32.max)}
  provider = dataset_config.find_checked_task(cfg)
  _check_not_empty(cfg, provider, seqio.ShardInfo(0, 1))

  def batches(name: Any) -> tf.data.Dataset:
    one = dataclasses.replace(cfg, mixture_or_task_name=name, batch_size=1)
    # Reading must end even if the task filters out all examples, so the passes are limited.
    passes = 1 if eval_steps is None else eval_steps * cfg.batch_size
    examples = get_dataset(one, 0, 1, feature_converter_cls, num_epochs=passes).unbatch()
    rows = examples.repeat().take(passes)
    if eval_steps is None:
      empty = examples.map(lambda row: {name: tf.zeros_like(x) for name, x in row.items()})
      rows = examples.concatenate(empty.repeat().take(cfg.batch_size - 1))
    whole = rows.batch(cfg.batch_size, drop_remainder=True)
    dataset = whole.map(lambda batch: {name: x[shard_id::num_shards] for name, x in batch.items()})
    return dataset.cache() if cfg.use_memory_cache else dataset

  names = {task.name: task.name for task in dataset_config.subtasks_with_split(cfg, provider)}
  names[cfg.name] = cfg.mixture_or_task_name
  return {name: batches(reference) for name, reference in names.items()}


def _check_batch_size(cfg: DatasetConfig, num_shards: int) -> None:
  if cfg.batch_size % num_shards:
    near = multiples_near(cfg.batch_size, num_shards)
    raise ValueError(
      f"Batch size ({cfg.batch_size}) must be divisible by number of shards ({num_shards}). Set "
      f"BATCH_SIZE (DatasetConfig.batch_size, task '{cfg.name}') to {near}, for example."
    )


def _check_not_empty(cfg: DatasetConfig, provider: Any, shard: seqio.ShardInfo) -> None:
  """Checks that this shard of every task has an example.

  Training repeats its data forever, so reading a task whose examples are all filtered out would never
  end. One unshuffled pass is therefore read up to its first example.

  Raises:
    ValueError: this shard of a task has no example, or a file is damaged.
  """
  for task in dataset_config.subtasks_with_split(cfg, provider):
    with dataset_config.data_errors_named(cfg):
      examples = dataset_config.read_task(cfg, task, shard_info=shard)
      if any(True for _ in examples.take(1)):
        continue
    part = f"shard {shard.index} of {shard.num_shards} of " if shard.num_shards > 1 else ""
    raise ValueError(
      f"There are no examples in {part}the split '{cfg.split}' of the task '{task.name}': its files are "
      "empty, its preprocessors drop every example, or validation_percent of a small file is less than a "
      "row (set data.file_task.validation_percent higher). If only a shard has none, split the files into "
      "more files, or run on fewer hosts."
    )


def as_batch_iterator(data: Any) -> dataset_iterator.DatasetIterator:
  """Returns `data` as a clu DatasetIterator, which has next, element_spec, save, restore and reset.

  Args:
    data: a DatasetIterator, a tf.data.Dataset, or an iterable of dictionaries of numpy arrays.

  Raises:
    ValueError: `data` has another type.
  """
  if isinstance(data, dataset_iterator.DatasetIterator):
    return data
  # A tf.data.Dataset exists only if TensorFlow has been imported, so it is not imported here.
  if "tensorflow" in sys.modules and isinstance(data, tf.data.Dataset):
    return dataset_iterator.TfDatasetIterator(data, checkpoint=True)
  if not isinstance(data, Iterable) or isinstance(data, Mapping | str):
    raise ValueError(
      "The dataset function must return a tf.data.Dataset, a clu DatasetIterator, or an iterable of "
      f"batches (dictionaries of numpy arrays), got {type(data).__name__}."
    )
  return IterableBatches(data)


class IterableBatches(dataset_iterator.DatasetIterator):
  """The batches of any iterable. Its position is a count, so restoring it reads and skips batches.

  The position is exact if the iterable yields the same batches each time.
  """

  def __init__(self, batches: Iterable[HostBatch]):
    self._batches = batches
    self._iterator: Iterator[HostBatch] = iter(batches)
    self._drawn = 0

  def reset(self) -> None:
    """Returns to the first batch.

    Raises:
      ValueError: batches of an iterable that can be read only once, such as a generator, were returned.
    """
    if not self._drawn:
      return
    self._iterator, self._drawn = iter(self._batches), 0
    if self._iterator is self._batches:
      raise ValueError(
        f"the training data is a {type(self._batches).__name__}, which can be read only once: return a "
        "list from the dataset function, or an object whose __iter__ starts over"
      )

  def __next__(self) -> HostBatch:
    batch = next(self._iterator)
    self._drawn += 1
    return batch

  @functools.cached_property
  def element_spec(self) -> dict[str, dataset_iterator.ArraySpec]:
    """Shapes and dtypes of the first batch, which is read for them and then returned as usual."""
    first = next(self._iterator, None)
    if not isinstance(first, Mapping):
      raise ValueError(
        "The dataset function's iterable must contain batches, which are dictionaries of numpy "
        f"arrays, got {'no batch' if first is None else type(first).__name__}"
      )
    self._iterator = itertools.chain([first], self._iterator)
    arrays = {name: np.asarray(value) for name, value in first.items()}
    return {n: dataset_iterator.ArraySpec(a.dtype, a.shape) for n, a in arrays.items()}

  def describe_data(self) -> dict[str, str]:
    """Returns {}: nothing is known about the data of an iterable."""
    return {}

  def save(self, filename: epath.PathLike) -> None:
    """Writes the number of batches that have been returned."""
    epath.Path(filename).write_text(json.dumps({"drawn": self._drawn}))

  def restore(self, filename: epath.PathLike) -> None:
    """Continues after the saved number of batches, which are read and dropped.

    Raises:
      ValueError: there are fewer batches than that.
    """
    saved = json.loads(epath.Path(filename).read_text())["drawn"]
    if saved < self._drawn:
      self.reset()
    while self._drawn < saved:
      if next(self, None) is None:
        raise ValueError(
          f"the saved position is after {saved} batches, but the training data has only {self._drawn}"
        )


def token_limit(model: Any) -> int | None:
  """Returns the number of token ids that a model knows; None if its network does not state it."""
  limit: int | None = setting_of(model.network_config, "vocab_size")
  return limit


def check_ids(batch: HostBatch, data: str, vocab_size: int | None) -> None:
  """Checks that token ids are in the vocabulary, and that other integers fit into the devices' int32.

  Args:
    batch: arrays by feature, [B, ...]. The integers of a feature `*_tokens` are token ids.
    data: names the data in the message, such as "the task 'squad'".
    vocab_size: the number of ids that the model knows; None checks only for negative ids.

  Raises:
    ValueError: a value is out of range.
  """
  for name, values in batch.items():
    if getattr(values, "dtype", np.dtype(object)).kind not in "iu" or not values.size:
      continue
    low, high, reason = _INT32.min, _INT32.max, "integers have 32 bits on the devices"
    if name.endswith("_tokens"):
      low, high, reason = 0, (vocab_size or high + 1) - 1, "these are token ids"
      if vocab_size:
        reason = f"the model's vocabulary has {vocab_size} ids (its network's vocab_size)"
    if values.min() >= low and values.max() <= high:
      continue
    row, *column = np.argwhere((values < low) | (values > high))[0].tolist()
    at = f"row {row}, position {column[0]}" if column else f"row {row}"
    raise ValueError(
      f"{data} has the value {values[(row, *column)]} in {name} ({at} of a batch): it must be from {low} "
      f"to {high}, because {reason}. Correct the task's vocabulary (-1 is the id of a piece that it "
      "lacks, usually the end token) or its preprocessors"
    )


def check_has_target(batch: HostBatch, data: str) -> None:
  """Checks that a training batch has a target token with a loss weight other than 0.

  Raises:
    ValueError: it has none, so there would be nothing to learn from.
  """
  for name in ("decoder_loss_weights", "decoder_target_tokens"):
    if name in batch and not batch[name].any():
      raise ValueError(
        f"a batch of {data} has no target to learn from: its {len(batch[name])} rows have only 0 in "
        f"{name}, which means padding. Check the task's targets (rosetta-t5 inspect shows them): the "
        "preprocessors must return at least one token, and TASK_FEATURE_LENGTHS must leave room for it"
      )
