"""Describes what a feed reads, as JSON values that are stored with its position and later compared."""

from __future__ import annotations

import collections
import functools
import glob
import json
import os
from typing import Any

import jax
from clu.data import dataset_iterator

from rosetta_t5.data.dataset_config import DatasetConfig
from rosetta_t5.data.pipeline.task_lookup import (
  find_task_or_mixture,
  subtasks_with_split,
  task_files,
)
from rosetta_t5.data.reading.files import compare_files, describe_files
from rosetta_t5.data.tensorflow_import import seqio
from rosetta_t5.distributed.coordination import check_same

Description = dict[str, Any]

_TIMEOUT_S = 1800.0  # of a process that waits for another one
# What older versions described too.
_NO_LONGER_DESCRIBED = {
  "features",
  "first_batch",
  "first_examples",
  "number_of_examples",
  "preprocessors",
  "runtime_preprocessors",
  "source",
}


def describe_data(cfg: DatasetConfig, batches: dataset_iterator.DatasetIterator) -> Description:
  """Returns what determines the examples and their order.

  Args:
    cfg: the dataset, with its seed.
    batches: what reads it. If it has a method `describe_data`, its JSON values describe the data.
      Otherwise the names and files of SeqIO's tasks do.
  """
  description: Description = {
    "split": cfg.split,
    "task_feature_lengths": dict(cfg.task_feature_lengths or {}),
    "seed": cfg.seed,
    "shuffle": cfg.shuffle,
    "pack": cfg.pack,
    "use_cached": cfg.use_cached,
    "trim_output_features": cfg.trim_output_features,
  }
  if (describe := getattr(batches, "describe_data", None)) is not None:
    description["data"] = describe()
  else:
    is_seqio = isinstance(batches, dataset_iterator.TfDatasetIterator)
    description["task"] = describe_tasks(cfg) if is_seqio else cfg.name
  return json.loads(json.dumps(description, default=str))


def describe_tasks(cfg: DatasetConfig) -> Description | str:
  """Returns the files and the rate of each task of a mixture; the name, if no task or mixture has it.

  A user's dataset function need not read a registered task.
  """
  try:
    provider = find_task_or_mixture(cfg)
  except ValueError:
    return cfg.name
  describe = functools.cache(describe_files)  # UL2's seven tasks read the same files.
  tasks: Description = {}
  for number, task in enumerate(subtasks_with_split(cfg, provider)):
    name = task.name
    if (arguments := getattr(task.source, "arguments", None)) is not None:
      # The name of a `file_task`, or of a denoiser of its UL2 mixture, may be derived from its files' paths.
      is_own = cfg.name in name
      name = name.replace(cfg.name, "file_task") if is_own else f"file_task {number}"
    tasks[name] = {"arguments": arguments}
    if isinstance(provider, seqio.Mixture):
      tasks[name]["rate"] = float(provider.get_rate(task))
    paths = tuple(task_files(task, cfg))
    if any(os.path.isfile(path) or "://" in path for path in paths):
      is_movable = getattr(task.source, "is_movable", False) and not cfg.use_cached
      tasks[name]["data"] = describe(paths, is_movable)
  return tasks


def compare_descriptions(
  stored: Description, current: Description, prefix: str = ""
) -> tuple[list[str], list[str]]:
  """Returns the changes that make a position invalid, and those that do not, as texts.

  The latter are folders that were moved and have the same contents.
  """
  changes: list[str] = []
  notes: list[str] = []
  for key in sorted({*stored, *current} - _NO_LONGER_DESCRIBED):
    old, new = stored.get(key), current.get(key)
    if isinstance(old, dict) and isinstance(new, dict):
      if "files" in old and "files" in new:
        more = [[f"{prefix}{key}: {text}" for text in texts] for texts in compare_files(old, new)]
      else:
        more = list(compare_descriptions(old, new, f"{prefix}{key}."))
      changes, notes = changes + more[0], notes + more[1]
    elif old != new:
      changes.append(f"{prefix}{key}: {_shorten(old)} → {_shorten(new)}")
  return changes, notes


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
      provider = find_task_or_mixture(cfg)
      prepared = [glob.escape(folder) for folder in getattr(provider, "folders", ())]
      paths = [path for folder in prepared for path in glob.glob(f"{folder}/*")]
      paths += [path for t in subtasks_with_split(cfg, provider) for path in task_files(t, cfg)]
    except (
      Exception
    ) as error:  # of one machine, or of a user's function that reads no registered task
      errors[cfg.name] = f"{type(error).__name__}: {error}"
      continue
    for path in sorted(paths):
      name = f"{cfg.name}, {cfg.split}: {os.path.basename(path)}"
      sizes[name] += os.path.getsize(path) if os.path.isfile(path) else 0
  files = {name: f"{size:,} bytes" for name, size in sizes.items()}
  check_same({**errors, **files}, "files of data", _TIMEOUT_S)


def _shorten(value: Any) -> str:
  text = "none" if value is None else str(value)
  return text if len(text) <= 200 else f"{text[:200]}…"
