"""Describes a run's data: what a position in it belongs to, how much is truncated, and the number of epochs."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from clu.data import dataset_iterator

from rosetta_t5.data import dataset_config
from rosetta_t5.data.dataset_config import DatasetConfig, find_task_or_mixture, subtasks_with_split
from rosetta_t5.data.prepared import PreparedTask
from rosetta_t5.data.reading.files import compare_files, describe_files
from rosetta_t5.data.vocabularies.sentencepiece_models import count_unknown, describe_unknown
from rosetta_t5.distributed.coordination import check_same
from rosetta_t5.user_errors import OWN_PACKAGES

Description = dict[str, Any]

_EXAMPLES = 256  # of a task that are read
_MAX_TASKS = 4  # of a mixture
_COUNTED_BYTES = 64 << 20  # of files whose examples are counted
_MAX_TRUNCATED = 0.5  # share of targets that may lose their end


def describe_data(cfg: DatasetConfig, batches: dataset_iterator.DatasetIterator) -> Description:
  """Returns what determines the examples and their order.

  Args:
    cfg: the dataset, with its seed.
    batches: what reads it. If it has a method `describe_data`, its JSON values describe the data.
      Otherwise the names and files of SeqIO's tasks do.
  """
  fields = ("split", "batch_size", "seed", "shuffle", "pack", "use_cached", "trim_output_features")
  description: Description = {name: getattr(cfg, name) for name in fields}
  description["task_feature_lengths"] = dict(cfg.task_feature_lengths or {})
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
    if provider is not task:
      tasks[name]["rate"] = float(provider.get_rate(task))
    paths = tuple(dataset_config.task_files(task, cfg))
    if any(os.path.isfile(path) or "://" in path for path in paths):
      is_movable = getattr(task.source, "is_movable", False) and not cfg.use_cached
      tasks[name]["data"] = describe(paths, is_movable)
  return tasks


def compare_descriptions(stored: Description, current: Description, prefix: str = "") -> list[str]:
  """Returns the changes that make a position invalid, as texts.

  Folders that were moved and have the same contents are none.
  """
  changes: list[str] = []
  for key in sorted({*stored, *current}):
    old, new = stored.get(key), current.get(key)
    if not (isinstance(old, dict) and isinstance(new, dict)):
      if old != new:
        changes.append(f"{prefix}{key}: {str(old)[:200]} → {str(new)[:200]}")
    elif "files" in old and "files" in new:
      changes += [f"{prefix}{key}: {text}" for text in compare_files(old, new)]
    else:
      changes += compare_descriptions(old, new, f"{prefix}{key}.")
  return changes


def check_same_files(*cfgs: DatasetConfig | None) -> None:
  """Raises ValueError on every process of a run if one of them reads other files than process 0.

  Names and sizes are compared. Folders are not: each machine may have its own copy.
  """
  if jax.process_count() == 1:
    return
  found: dict[str, str] = {}
  for cfg in filter(None, cfgs):
    try:
      provider = find_task_or_mixture(cfg)
      folders = getattr(provider, "folders", ())  # of prepared data
      paths = [file.path for folder in folders for file in os.scandir(folder)]
      for task in subtasks_with_split(cfg, provider):
        paths += dataset_config.task_files(task, cfg)
    except Exception as error:  # of one machine, or of a user's function that reads no task
      found[cfg.name] = f"{type(error).__name__}: {error}"
      continue
    sizes = Counter[str]()  # files of several folders may have the same name
    for path in filter(os.path.isfile, paths):
      sizes[os.path.basename(path)] += os.path.getsize(path)
    for name, size in sorted(sizes.items()):
      found[f"{cfg.name}, {cfg.split}: {name}"] = f"{size:,} bytes"
  check_same(found, "files of data")


@dataclasses.dataclass(frozen=True)
class FirstExamples:
  """What the first examples of a task show.

  Attributes:
    task: the task's name.
    number: the number of examples of the split; None if it is not known.
    is_exact: whether it was counted, and not estimated.
    lengths: for each feature the numbers of tokens of these examples, with the end token; none if the
      task cuts its texts into rows, so that nothing is truncated.
    unknown: how often each character without a piece in the vocabulary occurs; see `count_unknown`.
  """

  task: str
  number: int | None
  is_exact: bool
  lengths: Mapping[str, np.ndarray]
  unknown: Mapping[str, int]

  def truncated(self, limits: Mapping[str, int]) -> dict[str, float]:
    """Returns for each feature the share of the examples that are longer than its limit."""
    return {name: float((x > limits[name]).mean()) for name, x in self.lengths.items()}

  def check_targets(self, cfg: DatasetConfig) -> None:
    """Checks that most targets keep their end.

    Raises:
      ValueError: they do not, and `cfg` does not allow it.
    """
    limits = cfg.task_feature_lengths or {}
    share = self.truncated(limits).get("targets", 0.0)
    if share > _MAX_TRUNCATED and not cfg.allow_truncated_targets:
      targets = self.lengths["targets"]
      raise ValueError(
        f"{share:.0%} of the first {len(targets)} targets of '{self.task}' are longer than "
        f"TASK_FEATURE_LENGTHS['targets'] = {limits['targets']} and would lose their end: half of them have "
        f"more than {int(np.median(targets))} tokens, the longest has {targets.max()}. Set a larger length "
        "(--target_length of finetune), or utils.DatasetConfig.allow_truncated_targets = True"
      )

  def text(self, cfg: DatasetConfig, steps: int | None = None) -> str:
    """Returns a line with the number of examples, the share truncated, and the epochs of `steps`."""
    parts = []
    if self.number is not None:
      parts.append(f"{'' if self.is_exact else 'about '}{self.number:,} in all")
    limits = cfg.task_feature_lengths or {}
    if self.lengths:
      shares = [f"{share:.1%} of the {name}" for name, share in self.truncated(limits).items()]
      read = len(next(iter(self.lengths.values())))
      parts.append(f"truncated: {', '.join(shares)}, of the first {read}")
    if unknown := describe_unknown(self.unknown):
      parts.append(f"the vocabulary has no piece for {unknown}")
    if steps and self.number and self.lengths:
      # With packing, as many examples are in a row as the feature that fills it first allows.
      full = [limits[name] / np.minimum(x, limits[name]).mean() for name, x in self.lengths.items()]
      rows = steps * cfg.batch_size * (max(1.0, min(full)) if cfg.pack else 1.0)
      parts.append(f"{steps:,} steps are about {rows / self.number:.3g} epochs")
    return "; ".join(parts)


def first_examples(cfg: DatasetConfig) -> list[FirstExamples]:
  """Reads the first examples of a task, or of each of the first tasks of a mixture.

  Raises:
    ValueError: there is no such task, its files cannot be read, or none of their first records is usable.
  """
  tasks = subtasks_with_split(cfg, find_task_or_mixture(cfg)) if cfg.task_feature_lengths else []
  by_source = {id(task.source): task for task in tasks}  # UL2's denoisers are tasks on one source.
  with dataset_config.data_errors_named(cfg):
    return [_measure(task, cfg) for task in [*by_source.values()][:_MAX_TASKS]]


def check_examples(
  cfg: DatasetConfig, get_dataset_fn: Callable[..., Any]
) -> Callable[[int | None], list[str]]:
  """Checks the first examples, and returns a function of the number of steps that describes the data.

  Args:
    cfg: the training data.
    get_dataset_fn: what reads the data. That of a user may read something else, of which nothing is known.

  Raises:
    ValueError: most targets would lose their end; or see `first_examples`.
  """
  if not str(inspect.unwrap(get_dataset_fn).__module__).startswith(OWN_PACKAGES):
    return lambda steps: []
  if isinstance(cfg.mixture_or_task_name, PreparedTask):
    return functools.partial(cfg.mixture_or_task_name.describe, cfg)
  found = first_examples(cfg)
  for each in found:
    each.check_targets(cfg)

  def describe(steps: int | None) -> list[str]:
    if len(found) == 1:  # The tasks of a mixture have different numbers of epochs.
      return [text for text in [found[0].text(cfg, steps)] if text]
    return [f"{each.task}: {text}" for each in found if (text := each.text(cfg))]

  return describe


def _measure(task: Any, cfg: DatasetConfig) -> FirstExamples:
  dataset, features = None, task.output_features
  # Without lengths nothing is cut; preprocessors that cut texts into rows fail without them.
  with contextlib.suppress(Exception):
    uncut = dataclasses.replace(cfg, task_feature_lengths=None)
    dataset = dataset_config.read_task(uncut, task, seed=0)
  examples = list(dataset.take(_EXAMPLES).as_numpy_iterator()) if dataset is not None else []
  names = [n for n in cfg.task_feature_lengths or {} if n in features and features[n].rank == 1]
  lengths = {n: np.array([len(x[n]) for x in examples if n in x]) for n in names}
  unknown = Counter[str]()
  for example, (name, feature) in itertools.product(examples, features.items()):
    if isinstance(text := example.get(f"{name}_pretokenized"), bytes):
      unknown += count_unknown(text.decode(), feature.vocabulary)
  lengths = {name: counts for name, counts in lengths.items() if len(counts)}
  return FirstExamples(task.name, *_number_of_examples(task, cfg), lengths, unknown)


def _number_of_examples(task: Any, cfg: DatasetConfig) -> tuple[int | None, bool]:
  """Returns the number of examples, None if it is not known soon, and whether it is exact."""
  if cfg.use_cached:
    return task.get_cached_stats(cfg.split)["examples"], True
  source, split = task.source, cfg.split
  if split not in source.splits:  # a part, such as train[:90%]
    return None, False
  if not hasattr(source, "count_examples"):
    return source.num_input_examples(split), True
  files = source.list_shards(split)
  if not files or os.path.getsize(files[0]) > _COUNTED_BYTES:
    return None, False
  return source.count_examples(split, max_bytes=_COUNTED_BYTES)
