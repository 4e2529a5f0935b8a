"""Finds a run's task or mixture in SeqIO's registry and checks, before reading, that it will do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rosetta_t5.data.dataset_config import DatasetConfig, import_module
from rosetta_t5.data.reading import unwrap_reader_errors
from rosetta_t5.data.tasks.catalogue import TASKS, register
from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio

if TYPE_CHECKING:
  import seqio
  import tensorflow as tf


def find_provider(cfg: DatasetConfig) -> Any:
  """Returns the task or mixture that `cfg` names, importing its module first.

  Raises:
    ValueError: no such name is registered; the text has near names and what to set.
  """
  seqio = import_seqio()
  known_here = isinstance(cfg.mixture_or_task_name, str) and cfg.name in TASKS
  # T5X's recipes import the package t5 for tasks that are known here as well.
  if cfg.module and not (known_here and cfg.module.split(".")[0] == "t5" and not find_spec("t5")):
    import_module(cfg.module)
  if not isinstance(cfg.mixture_or_task_name, str):
    return cfg.mixture_or_task_name
  register(cfg.name)
  known = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
  if cfg.name not in known:
    raise ValueError(_unknown_task(cfg, {*known, *TASKS}))
  return seqio.get_mixture_or_task(cfg.name)


def _unknown_task(cfg: DatasetConfig, known: set[str]) -> str:
  text = f"There is no SeqIO task or mixture '{cfg.name}' (MIXTURE_OR_TASK_NAME)"
  text += near_names(cfg.name, known) or f" among the {len(known)} that are registered"
  if cfg.module:
    return f"{text}. The module {cfg.module!r} was imported, but registers no such name."
  return (
    f"{text}. If a module of yours registers it, import that module in the gin file or set "
    "MIXTURE_OR_TASK_MODULE = 'your.module' (DatasetConfig.module); it is not set."
  )


def near_names(name: str, known: Iterable[str]) -> str:
  """Returns "; did you mean 'a' or 'b'?"-like text for a misspelt name, or nothing."""
  near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
  return f"; near it: {', '.join(repr(n) for n in near)}" if near else ""


def check_split(cfg: DatasetConfig, provider: Any) -> None:
  """Checks that the split exists.

  An offline cache need not have the splits of the task's source: it is left to SeqIO.

  Raises:
    ValueError: it does not; the text lists those that do.
  """
  if not cfg.use_cached and not has_split(provider, cfg.split):
    splits = sorted(provider.splits)
    raise ValueError(
      f"The task '{cfg.name}' has no split '{cfg.split}'; it has {', '.join(map(repr, splits))}. "
      "Set DatasetConfig.split (MIXTURE_OR_TASK_SPLIT, where a recipe has it) to one of them."
    )


def check_cached(cfg: DatasetConfig, provider: Any) -> None:
  """Checks that what is to be read from SeqIO's offline cache is there.

  Raises:
    ValueError: a task has no cache.
  """
  if not cfg.use_cached:
    return
  missing = [task.name for task in import_seqio().get_subtasks(provider) if not task.cache_dir]
  if missing:
    raise ValueError(
      f"The task '{missing[0]}' has no offline cache, but USE_CACHED_TASKS = True "
      "(DatasetConfig.use_cached): set USE_CACHED_TASKS = False to read its source, or name the "
      "cache's folder with --seqio_additional_cache_dirs."
    )


def has_split(provider: Any, split: str) -> bool:
  """Whether a task has a split, or every part of one like "train[:90%]+validation"."""
  return all(part.split("[")[0] in provider.splits for part in split.split("+"))


def check_feature_lengths(cfg: DatasetConfig, converter: seqio.FeatureConverter) -> None:
  """Checks that each feature that the model reads has a length, and no other.

  Raises:
    ValueError: one has none, or a name is not the model's.
  """
  wanted = set(converter.TASK_FEATURES) | set(getattr(converter, "_passthrough_features", {}))
  given = dict(cfg.task_feature_lengths or {})
  if wanted == set(given):
    return
  wrong = [f"gives no length for '{name}'" for name in sorted(wanted - set(given))]
  wrong += [
    f"names '{name}', which the model does not read" for name in sorted(set(given) - wanted)
  ]
  example = {name: given.get(name, 512) for name in sorted(wanted)}
  raise ValueError(
    f"TASK_FEATURE_LENGTHS = {given} (task '{cfg.name}') {' and '.join(wrong)}. "
    f"{type(converter).__name__} takes {sorted(wanted)}: set TASK_FEATURE_LENGTHS = {example}, "
    "say."
  )


def check_not_empty(cfg: DatasetConfig, provider: Any, shard_info: seqio.ShardInfo) -> None:
  """Draws one example of each task, so that an empty one is refused instead of waited for.

  Training repeats its data without end. If every example is filtered out, that is an endless
  search, not an end: so one pass is looked through first, unshuffled, up to its first example.
  Tasks of a mixture without the split are none of its tasks; other providers are trusted.

  Raises:
    ValueError: this shard of a task has no example.
  """
  seqio = import_seqio()
  if not isinstance(provider, seqio.Task | seqio.Mixture):
    return
  for task in seqio.get_subtasks(provider):
    if not cfg.use_cached and not has_split(task, cfg.split):
      continue
    dataset = task.get_dataset(
      sequence_length=cfg.task_feature_lengths,
      split=cfg.split,
      use_cached=cfg.use_cached,
      shuffle=False,
      shard_info=shard_info,
      num_epochs=1,
    )
    if not has_element(dataset):
      raise ValueError(empty_dataset_text(task.name, cfg.split, shard_info))


def has_element(dataset: tf.data.Dataset) -> bool:
  """Whether a dataset gives anything.

  Raises:
    ValueError: nothing in its files can be used.
  """
  with unwrap_reader_errors():
    return any(True for _ in dataset.take(1))


def empty_dataset_text(name: str, split: str, shard_info: seqio.ShardInfo) -> str:
  """Returns the error for a task whose split gives no example to this shard."""
  where = f"the split '{split}' of the task '{name}'"
  if shard_info.num_shards == 1:
    return (
      f"No example comes out of {where}: its files are empty, or its preprocessors drop "
      "everything. Look at them with seqio.get_mixture_or_task(...).get_dataset(...)."
    )
  return (
    f"No example comes out of shard {shard_info.index} of {shard_info.num_shards} of {where}. "
    "Split its files into more, or run on fewer hosts."
  )
