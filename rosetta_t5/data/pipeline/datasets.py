"""Turns a `DatasetConfig` into batches of SeqIO's tasks, for training, evaluation and inference."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging

from rosetta_t5 import terminal
from rosetta_t5.data import seqio_internals
from rosetta_t5.data.dataset_config import DatasetConfig, resolve_seed
from rosetta_t5.data.pipeline import task_lookup
from rosetta_t5.data.pipeline.task_lookup import naming_data, subtasks_with_split
from rosetta_t5.data.prepared import PreparedTask
from rosetta_t5.data.tasks.catalogue import registered_names
from rosetta_t5.data.tensorflow_import import seqio, tf
from rosetta_t5.parallel.data_layout import multiples_near

FeatureConverterFactory = Callable[..., "seqio.FeatureConverter"]
Chunk = tuple[int, "tf.data.Dataset", "tf.data.Dataset"]


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
  provider = task_lookup.find_task_or_mixture(cfg)
  if isinstance(provider, PreparedTask):
    return {provider.name: provider.eval_batches(cfg, shard_id, num_shards, eval_steps)}
  task_lookup.check_cached(cfg, provider)
  task_lookup.check_split(cfg, provider)
  names = {task.name: task.name for task in subtasks_with_split(cfg, provider)}
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


def _check_same_seed(seed: int | None) -> None:
  if seed is None or jax.process_count() == 1:
    return
  from jax.experimental import multihost_utils

  multihost_utils.assert_equal(
    np.array(seed),
    f"process {jax.process_index()} shuffles with the seed {seed}, other processes with another one",
  )


def _check_not_empty(cfg: DatasetConfig, provider: Any, shard: seqio.ShardInfo) -> None:
  """Checks that this shard of every task has an example.

  Training repeats its data forever, so a task that filters out all its examples would never end. One
  unshuffled pass is therefore read up to its first example. Providers other than SeqIO's tasks and
  mixtures are not checked.

  Raises:
    ValueError: this shard of a task has no example.
  """
  if not isinstance(provider, seqio.Task | seqio.Mixture):
    return
  for task in subtasks_with_split(cfg, provider):
    if not _has_element(cfg, task_lookup.read_task(cfg, task, shard_info=shard)):
      part = f"shard {shard.index} of {shard.num_shards} of " if shard.num_shards > 1 else ""
      raise ValueError(
        f"There are no examples in {part}the split '{cfg.split}' of the task '{task.name}': its files are "
        "empty, or its preprocessors drop every example. If only a shard has none, split the files into "
        "more files, or run on fewer hosts."
      )


def _has_element(cfg: DatasetConfig, dataset: tf.data.Dataset) -> bool:
  """Returns whether a dataset has any element.

  Raises:
    ValueError: a file is damaged, or none of its records is usable.
  """
  with naming_data(cfg):
    return any(True for _ in dataset.take(1))


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
    if not 0 <= shard_id < num_shards:
      raise ValueError(
        f"infer.shard_id must be between 0 and {num_shards - 1} (infer.num_shards = {num_shards}), "
        f"got {shard_id}. The flag --shard_id also sets it."
      )
    self._converter = feature_converter_cls(pack=False)
    provider = task_lookup.find_checked_task(cfg, self._converter)
    self._cfg = cfg
    self._shard = seqio.ShardInfo(index=shard_id, num_shards=num_shards)
    self.tasks = subtasks_with_split(cfg, provider)

  def _datasets(self, task: Any) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Returns the examples with the task's features, and with the model's features."""
    cfg = self._cfg
    examples = task_lookup.read_task(cfg, task, seed=cfg.seed, shard_info=self._shard)
    return examples, self._converter(examples, task_feature_lengths=cfg.task_feature_lengths)

  def element_spec(self) -> dict[str, tf.TensorSpec]:
    """Returns shape and dtype of each of the model's features, without a batch dimension."""
    return self._datasets(self.tasks[0])[1].element_spec

  def chunks(self, task: Any, size: int, first: int = 0) -> Iterator[Chunk]:
    """Yields the chunks of a task, starting with number `first` (see `iterate_chunks`).

    Raises:
      ValueError: a file of the task is damaged.
    """
    with naming_data(self._cfg):
      yield from iterate_chunks(*self._datasets(task), size, first)


def iterate_chunks(
  task_ds: tf.data.Dataset, model_ds: tf.data.Dataset, size: int, first: int = 0
) -> Iterator[Chunk]:
  """Yields (number, examples with the task's features, the same with the model's) of each chunk.

  Chunks before the first are read and skipped. A restart therefore sees the same chunks even if the
  input pipeline cannot save its position.

  Args:
    task_ds: the examples with the task's features.
    model_ds: the same examples with the model's features.
    size: examples per chunk.
    first: the number of the first chunk to yield.
  """
  both = tf.data.Dataset.zip((task_ds, model_ds)).skip(first * size)
  for number, chunk in enumerate(both.padded_batch(size).prefetch(1), first):
    pairs = tf.data.Dataset.from_tensor_slices(chunk)
    yield number, pairs.map(lambda task, _: task), pairs.map(lambda _, model: model)


def has_metrics(cfg: DatasetConfig) -> bool:
  """Returns whether the task, or a task of the mixture, has the split and metrics of predictions.

  Raises:
    ValueError: the task does not exist.
  """
  tasks = subtasks_with_split(cfg, task_lookup.find_task_or_mixture(cfg))
  return any(task.metric_objs for task in tasks)


def make_evaluator(
  cfg: DatasetConfig,
  feature_converter_cls: Callable[..., Any],
  evaluator_cls: Callable[..., Any] | None = None,
  log_dir: str | os.PathLike[str] | None = None,
) -> seqio.Evaluator:
  """Returns an evaluator over all examples of a split, which it reads once to find their lengths.

  Args:
    cfg: the dataset. With `task_feature_lengths` None, the longest example sets the lengths, so that
      nothing is truncated. With `use_memory_cache` False, each evaluation reads the data again.
    feature_converter_cls: called with `pack=False`.
    evaluator_cls: `seqio.Evaluator`, possibly with bound arguments; None means one that writes
      TensorBoard files and JSON.
    log_dir: the folder for its loggers; None means no loggers.

  Returns:
    The evaluator. Its `eval_tasks` are the tasks that have the split and metrics.

  Raises:
    ValueError: the task, its split or its cache does not exist, or `cfg.pack` is set.
  """
  if cfg.pack:
    raise ValueError(
      "infer_eval/utils.DatasetConfig.pack must be False, because each prediction belongs to one "
      f"example; got True for the task '{cfg.name}'"
    )
  provider = task_lookup.find_task_or_mixture(cfg)
  task_lookup.check_cached(cfg, provider)
  if isinstance(provider, seqio.Task):  # A mixture's tasks without the split are left out.
    task_lookup.check_split(cfg, provider)
  if cfg.name not in registered_names() or seqio.get_mixture_or_task(cfg.name) is not provider:
    raise ValueError(
      f"The task '{cfg.name}' must be in SeqIO's registry, because the evaluator looks it up there. "
      "Register it with seqio.TaskRegistry.add, and give its name instead of the task"
    )
  if evaluator_cls is None:
    loggers = [seqio.PyLoggingLogger, seqio.TensorBoardLogger, seqio.JSONLogger]
    evaluator_cls = functools.partial(seqio.Evaluator, logger_cls=loggers)
  log_options = {"logger_cls": ()} if log_dir is None else {"log_dir": os.fspath(log_dir)}
  with naming_data(cfg):
    evaluator = evaluator_cls(
      mixture_or_task_name=cfg.name,
      feature_converter=feature_converter_cls(pack=False),
      eval_split=cfg.split,
      use_cached=cfg.use_cached,
      seed=cfg.seed,
      sequence_length=cfg.task_feature_lengths,
      use_memory_cache=cfg.use_memory_cache,
      **log_options,
    )
  seqio_internals.replace_loggers(evaluator, _without_errors)
  return evaluator


def _without_errors(logger: Callable[..., None]) -> Callable[..., None]:
  """Returns a logger that writes UTF-8, and logs an error instead of raising it."""
  seqio_internals.write_utf8(logger)

  def log(*args: Any, **kwargs: Any) -> None:
    with terminal.optional_output("the results of predictions", Exception):
      logger(*args, **kwargs)

  return log
