"""Describes what a feed reads, as JSON values that are stored with its position and later compared."""

from __future__ import annotations

import collections
import functools
import glob
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from clu.data import dataset_iterator

from rosetta_t5.data.dataset_config import DatasetConfig
from rosetta_t5.data.pipeline.task_lookup import find_task_or_mixture, subtasks_with_split
from rosetta_t5.data.reading.files import compare_files, describe_files, digest_of
from rosetta_t5.data.tensorflow_import import import_seqio
from rosetta_t5.data.vocabularies.task_vocabularies import content_digest
from rosetta_t5.distributed.coordination import check_same

Facts = dict[str, Any]
# Descriptions of the changes that make a position invalid, and of those that do not.
Differences = tuple[list[str], list[str]]

_TIMEOUT_S = 1800.0  # of a process that waits for another one
_EXAMPLES_READ = 256  # from a source without files


def data_facts(cfg: DatasetConfig, batches: dataset_iterator.DatasetIterator) -> Facts:
  """Returns everything that determines the examples and their order.

  Args:
    cfg: the dataset, with its seed.
    batches: what reads it. If it has a method `describe_data`, its JSON values describe the data.
      Otherwise the files of SeqIO's tasks do, and for sources without files their first examples.
  """
  facts: Facts = {
    "split": cfg.split,
    "task_feature_lengths": dict(cfg.task_feature_lengths or {}),
    "seed": cfg.seed,
    "shuffle": cfg.shuffle,
    "pack": cfg.pack,
    "use_cached": cfg.use_cached,
    "trim_output_features": cfg.trim_output_features,
    "runtime_preprocessors": _function_names(cfg.runtime_preprocessors or ()),
  }
  if (describe := getattr(batches, "describe_data", None)) is not None:
    facts["data"] = describe()
  elif isinstance(batches, dataset_iterator.TfDatasetIterator):
    facts["task"] = facts_of_tasks(cfg)
  else:
    facts["task"] = cfg.name
  return json.loads(json.dumps(facts, default=str))


def compare_facts(stored: Facts, current: Facts, prefix: str = "") -> Differences:
  """Returns descriptions of the changes that make a position invalid, and of those that do not.

  The latter are folders that were moved and have the same contents.
  """
  changes: list[str] = []
  notes: list[str] = []
  for key in sorted({*stored, *current}):
    old, new = stored.get(key), current.get(key)
    if isinstance(old, dict) and isinstance(new, dict):
      if "files" in old and "files" in new:
        more = [[f"{prefix}{key}: {text}" for text in texts] for texts in compare_files(old, new)]
      else:
        more = list(compare_facts(old, new, f"{prefix}{key}."))
      changes, notes = changes + more[0], notes + more[1]
    elif old != new:
      changes.append(f"{prefix}{key}: {_shorten(old)} → {_shorten(new)}")
  return changes, notes


def facts_of_tasks(cfg: DatasetConfig) -> Facts | str:
  """Returns the facts of each task of a mixture; the name, if no task or mixture has it.

  A user's dataset function need not read a registered task.
  """
  try:
    provider = find_task_or_mixture(cfg)
  except ValueError:
    return cfg.name
  read_files = functools.cache(describe_files)  # UL2's seven tasks read the same files.
  facts = {}
  for number, task in enumerate(subtasks_with_split(cfg, provider)):
    # Tasks of `file_task` have these arguments, and names that may be derived from the files' paths.
    arguments = getattr(task.source, "arguments", None)
    name = task.name
    if arguments is not None:
      is_own = cfg.name in name  # the task, or a denoiser of UL2's mixture
      name = name.replace(cfg.name, "file_task") if is_own else f"file_task {number}"
    facts[name] = {
      "source": type(task.source).__name__,
      "preprocessors": _function_names(task.preprocessors) if arguments is None else None,
      "arguments": arguments,
    }
    try:
      facts[name] |= _facts_of_source(task, cfg, read_files)
    except Exception as error:  # of a user's source, which need not list its files or be read twice
      logging.warning("Changes of the data of '%s' cannot be noticed: %s", task.name, error)
    if isinstance(provider, import_seqio().Mixture):
      facts[name]["rate"] = float(provider.get_rate(task))
  return facts


def _facts_of_source(task: Any, cfg: DatasetConfig, read_files: Callable[..., Facts]) -> Facts:
  """Returns the facts of a task's features, and of its files or examples."""
  facts: Facts = {
    "features": {n: _feature_text(f) for n, f in task.output_features.items()},
    "number_of_examples": task.source.num_input_examples(cfg.split),  # None if it is not known
  }
  paths = task_files(task, cfg)
  if any(os.path.isfile(path) or "://" in path for path in paths):
    is_movable = getattr(task.source, "is_movable", False) and not cfg.use_cached
    return facts | {"data": read_files(tuple(paths), is_movable)}
  return facts | {"first_examples": _digest_of_examples(task.source, cfg.split)}


def task_files(task: Any, cfg: DatasetConfig) -> list[str]:
  """Returns the files that a task reads: its source's, or those of its offline cache."""
  if not cfg.use_cached:
    return list(map(str, task.source.list_shards(cfg.split)))
  prefix = import_seqio().utils.get_cached_tfrecord_prefix(task.cache_dir, cfg.split)
  return sorted(glob.glob(f"{glob.escape(prefix)}*"))


def check_same_files(*cfgs: DatasetConfig | None) -> None:
  """Raises ValueError on every process of a run if one of them reads other files than process 0.

  Names and sizes are compared. Folders are not: each machine may have its own copy.
  """
  if jax.process_count() == 1:
    return
  sizes: collections.Counter[str] = collections.Counter()
  errors = {}
  for cfg in filter(None, cfgs):
    try:
      for path in _all_files(cfg):
        if "://" in path or os.path.isfile(path):
          size = 0 if "://" in path else os.path.getsize(path)
          sizes[f"{cfg.name}, {cfg.split}: {os.path.basename(path)}"] += size
    # A user's function need not read a registered task, and its source need not list its files.
    except Exception as error:
      errors[cfg.name] = f"{type(error).__name__}: {error}"
  files = {name: f"{size:,} bytes" for name, size in sizes.items()}
  check_same({**errors, **files}, "files of data", _TIMEOUT_S)


def _all_files(cfg: DatasetConfig) -> list[str]:
  """Returns the files of all tasks of a dataset."""
  provider = find_task_or_mixture(cfg)
  if folders := getattr(provider, "folders", ()):  # of prepared data
    return [path for folder in folders for path in sorted(glob.glob(f"{glob.escape(folder)}/*"))]
  return [path for task in subtasks_with_split(cfg, provider) for path in task_files(task, cfg)]


def _digest_of_examples(source: Any, split: str) -> str:
  """Returns a digest of the first examples of a source that has no files, such as a function."""
  examples = source.get_dataset(split=split, shuffle=False, seed=0).take(_EXAMPLES_READ)

  def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
      return [(name, plain(inner)) for name, inner in sorted(value.items())]
    return value.to_list() if hasattr(value, "to_list") else np.asarray(value).tolist()

  return digest_of(repr(plain(example)).encode() for example in examples.as_numpy_iterator())


def _feature_text(feature: Any) -> str:
  """Describes a feature of a task: its vocabulary by content, and whether it ends with an end token."""
  vocabulary = feature.vocabulary
  text = f"{type(vocabulary).__name__} of {vocabulary.vocab_size} tokens"
  if model := getattr(vocabulary, "sp_model", None):
    text += f" (digest {digest_of([model])})"
  elif digest := content_digest(vocabulary):
    text += f" (digest {digest})"
  return text + (" with an end token" if feature.add_eos else "")


def _function_names(functions: Sequence[Any]) -> list[str]:
  """Returns the names of functions, each with the plain arguments that are bound to it."""
  names = []
  for function in functions:
    bound: list[str] = []
    while isinstance(function, functools.partial):
      arguments = [*function.args, *(f"{key}={x!r}" for key, x in function.keywords.items())]
      bound += [
        str(x) for x in arguments if isinstance(x, str | int | float) and " at 0x" not in str(x)
      ]
      function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    names.append(f"{name}({', '.join(bound)})" if bound else name)
  return names


def _shorten(value: Any) -> str:
  text = "none" if value is None else str(value)
  return text if len(text) <= 200 else f"{text[:200]}…"
