"""Turns a `DatasetConfig` into batches: a SeqIO task's examples, sharded, converted and batched."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from absl import logging

from rosetta_t5.data.dataset_config import DatasetConfig, resolve_seed
from rosetta_t5.data.pipeline import task_lookup
from rosetta_t5.data.pipeline.error_locations import naming_files
from rosetta_t5.data.prepared import PreparedTask
from rosetta_t5.data.tensorflow_import import import_seqio
from rosetta_t5.parallel.data_layout import multiples_near

if TYPE_CHECKING:
  import seqio
  import tensorflow as tf

FeatureConverterFactory = Callable[..., "seqio.FeatureConverter"]

_BYTES_PER_TOKEN = 4


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
    continue_from_last_checkpoint: must be False. It exists for users' own dataset functions; this one
      is restored with `RestoreCheckpointConfig.restore_dataset`.

  Raises:
    ValueError: the task, its split or its features do not exist, the batch size is not a multiple of
      the number of shards, or the data has no example.
  """
  if continue_from_last_checkpoint:
    raise ValueError(
      "get_dataset does not support continue_from_last_checkpoint: set it to False, and set "
      "utils.RestoreCheckpointConfig.restore_dataset = True to restore the feed's position."
    )
  _check_batch_size(cfg, num_shards)
  seed = resolve_seed(cfg)
  if isinstance(cfg.mixture_or_task_name, PreparedTask):
    _check_same_seed(seed)
    return cfg.mixture_or_task_name.feed(cfg, shard_id, num_shards, seed)
  shard_info = import_seqio().ShardInfo(index=shard_id, num_shards=num_shards)
  return get_dataset_inner(cfg, shard_info, feature_converter_cls, seed, num_epochs)


def get_dataset_inner(
  cfg: DatasetConfig,
  shard_info: seqio.ShardInfo,
  feature_converter_cls: FeatureConverterFactory,
  seed: int | None = None,
  num_epochs: int | None = None,
) -> tf.data.Dataset:
  """Returns the batches of one shard. All processes must pass the same seed."""
  _check_same_seed(seed)
  converter = feature_converter_cls(
    pack=cfg.pack, use_custom_packing_ops=cfg.use_custom_packing_ops
  )
  provider = task_lookup.find_checked_task(cfg, converter)
  if num_epochs is None:
    _check_not_empty(cfg, provider, shard_info)
  batch_size = cfg.batch_size // shard_info.num_shards
  logging.info("Dataset '%s': seed %s, %d examples per shard", cfg.name, seed, batch_size)
  dataset = task_lookup.read_task(
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
  dataset = converter(dataset, task_feature_lengths=cfg.task_feature_lengths)
  return dataset.batch(batch_size, drop_remainder=True)


def get_training_eval_datasets(
  cfg: DatasetConfig,
  shard_id: int,
  num_shards: int,
  eval_steps: int,
  feature_converter_cls: FeatureConverterFactory,
  deterministic: bool = False,
  model_dir: str | None = None,
  start_step: int = 0,
) -> Mapping[str, tf.data.Dataset]:
  """Returns `eval_steps` batches of a task, or of a mixture and each of its tasks, by name.

  As in T5X, the batches are the same for any number of shards: each shard reads all examples and
  keeps its own. Too few examples are repeated. Tasks without the split are left out.

  Args:
    cfg: the dataset; its `mixture_or_task_name` may be a mixture.
    shard_id: the shard to read.
    num_shards: the number of shards.
    eval_steps: the number of batches.
    feature_converter_cls: see `get_dataset`.
    deterministic: must be False; T5X's deterministic tasks are not supported.
    model_dir: ignored, because T5X uses it only for deterministic tasks.
    start_step: ignored, for the same reason.

  Raises:
    ValueError: the same errors as in `get_dataset`, or a task has no example.
  """
  del model_dir, start_step
  if deterministic:
    raise ValueError(
      "get_training_eval_datasets does not support deterministic=True (T5X's deterministic tasks): "
      "leave it False. Evaluation without shuffling reads the same examples every time."
    )
  _check_batch_size(cfg, num_shards)
  if isinstance(cfg.mixture_or_task_name, PreparedTask):
    task = cfg.mixture_or_task_name
    return {task.name: task.evaluation(cfg, shard_id, num_shards, eval_steps)}
  provider = task_lookup.find_task_or_mixture(cfg)
  task_lookup.check_cached(cfg, provider)
  task_lookup.check_split(cfg, provider)
  names = {task.name: task.name for task in task_lookup.subtasks_with_split(cfg, provider)}
  names[provider.name] = cfg.mixture_or_task_name

  def batches(name: Any) -> tf.data.Dataset:
    examples = get_dataset(
      dataclasses.replace(cfg, mixture_or_task_name=name, batch_size=1),
      shard_id=0,
      num_shards=1,
      feature_converter_cls=feature_converter_cls,
      # Reading must end even if the task filters out all examples, so the passes are limited.
      num_epochs=eval_steps * cfg.batch_size,
      continue_from_last_checkpoint=False,
    )
    if not _has_element(cfg, examples):
      raise ValueError(
        f"The split '{cfg.split}' of the task '{name}' has no example to evaluate. Give it more data, "
        "or set train.train_eval_dataset_cfg = None."
      )
    rows = examples.unbatch().repeat().shard(num_shards, shard_id)
    dataset = rows.batch(cfg.batch_size // num_shards, drop_remainder=True).take(eval_steps)
    return dataset.cache() if cfg.use_memory_cache else dataset

  return {name: batches(reference) for name, reference in names.items()}


def _check_batch_size(cfg: DatasetConfig, num_shards: int) -> None:
  if cfg.batch_size % num_shards:
    near = multiples_near(cfg.batch_size, num_shards)
    raise ValueError(
      f"Batch size ({cfg.batch_size}) must be divisible by number of shards ({num_shards}). Set "
      f"BATCH_SIZE (DatasetConfig.batch_size, task '{cfg.name}') to {near}, for example."
    )
  rows, lengths = cfg.batch_size // num_shards, dict(cfg.task_feature_lengths or {})
  size = rows * sum(lengths.values()) * _BYTES_PER_TOKEN
  memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  if size > memory:
    raise ValueError(
      f"A batch of {rows:,} examples of the lengths {lengths} takes {size / 1e9:,.0f} GB, but this "
      f"machine has {memory / 1e9:,.0f} GB of memory. Set a smaller BATCH_SIZE "
      "(DatasetConfig.batch_size) or smaller TASK_FEATURE_LENGTHS."
    )


def _check_same_seed(seed: int | None) -> None:
  if seed is None or jax.process_count() == 1:
    return
  from jax.experimental import multihost_utils

  multihost_utils.assert_equal(
    np.array(seed),
    f"process {jax.process_index()} shuffles with the seed {seed}, other processes with another one",
  )


def _check_not_empty(cfg: DatasetConfig, provider: Any, shard_info: seqio.ShardInfo) -> None:
  """Checks that this shard of every task has an example.

  Training repeats its data forever, so a task that filters out all its examples would never end. One
  unshuffled pass is therefore read up to its first example. Providers other than SeqIO's tasks and
  mixtures are not checked.

  Raises:
    ValueError: this shard of a task has no example.
  """
  seqio = import_seqio()
  if not isinstance(provider, seqio.Task | seqio.Mixture):
    return
  for task in task_lookup.subtasks_with_split(cfg, provider):
    if not _has_element(cfg, task_lookup.read_task(cfg, task, shard_info=shard_info)):
      raise ValueError(_empty_dataset_message(task.name, cfg.split, shard_info))


def _has_element(cfg: DatasetConfig, dataset: tf.data.Dataset) -> bool:
  """Returns whether a dataset has any element.

  Raises:
    ValueError: a file is damaged, or none of its records is usable.
  """
  with naming_files(cfg):
    return any(True for _ in dataset.take(1))


def _empty_dataset_message(name: str, split: str, shard_info: seqio.ShardInfo) -> str:
  where = f"the split '{split}' of the task '{name}'"
  if shard_info.num_shards == 1:
    return (
      f"There are no examples in {where}: its files are empty, or its preprocessors drop every "
      "example. Inspect them with seqio.get_mixture_or_task(...).get_dataset(...)."
    )
  return (
    f"There are no examples in shard {shard_info.index} of {shard_info.num_shards} of {where}. "
    "Split its files into more files, or run on fewer hosts."
  )
