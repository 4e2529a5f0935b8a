"""Measures the first examples of a run's tasks: truncation, the number of examples, and epochs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rosetta_t5.data.dataset_config import DatasetConfig
from rosetta_t5.data.pipeline.task_lookup import (
  find_task_or_mixture,
  naming_data,
  read_task,
  subtasks_with_split,
)
from rosetta_t5.data.prepared import PreparedTask
from rosetta_t5.data.vocabularies.lost_text import count_unknown, describe_unknown

_EXAMPLES = 256  # of a task that are read
_MAX_TASKS = 4  # of a mixture
_COUNTED_BYTES = 64 << 20  # of files whose examples are counted
_MAX_TRUNCATED = 0.5  # share of targets that may lose their end

Example = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class FirstExamples:
  """What the first examples of a task show.

  Attributes:
    task: the task's name.
    share: the share of the run's rows that are the task's, in a mixture; else 1.
    number: the number of examples of the split; None if it is not known.
    is_exact: whether it was counted, and not estimated.
    lengths: for each feature the numbers of tokens of these examples, with the end token; none if the
      task cuts its texts into rows, so that nothing is truncated.
    rows_per_example: how many rows the task makes of an example without packing; None if not known.
    unknown: how often each character without a piece in the vocabulary occurs; see `count_unknown`.
  """

  task: str
  share: float
  number: int | None
  is_exact: bool
  lengths: Mapping[str, np.ndarray]
  rows_per_example: float | None
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
        f"more than {int(np.median(targets))} tokens, the longest has {targets.max()}. Set a larger length, "
        "or utils.DatasetConfig.allow_truncated_targets = True"
      )

  def text(self, cfg: DatasetConfig, steps: int | None = None) -> str:
    """Returns a line with the number of examples, the share truncated, and the epochs of `steps`."""
    parts = []
    if self.number is not None:
      parts.append(f"{'' if self.is_exact else 'about '}{self.number:,} in all")
    limits = cfg.task_feature_lengths or {}
    shares = [f"{share:.1%} of the {name}" for name, share in self.truncated(limits).items()]
    if shares:
      read = len(next(iter(self.lengths.values())))
      parts.append(f"truncated: {', '.join(shares)}, of the first {read}")
    if unknown := describe_unknown(self.unknown):
      parts.append(f"the vocabulary has no piece for {unknown}")
    if steps and self.number and self.rows_per_example:
      # With packing, as many examples are in a row as the feature that fills it first allows.
      full = [limits[name] / np.minimum(x, limits[name]).mean() for name, x in self.lengths.items()]
      examples_per_row = max(1.0, min(full, default=1.0)) if cfg.pack else 1.0
      rows = self.number * self.rows_per_example / examples_per_row
      is_exact = self.is_exact and not cfg.pack and bool(self.lengths) and self.share == 1
      epochs = self.share * steps * cfg.batch_size / rows
      parts.append(f"{steps:,} steps are {'' if is_exact else 'about '}{epochs:.3g} epochs")
    return "; ".join(parts)


def first_examples(cfg: DatasetConfig) -> list[FirstExamples]:
  """Reads the first examples of a task, or of each of the first tasks of a mixture.

  Raises:
    ValueError: there is no such task, its files cannot be read, or none of their first records is usable.
  """
  provider = find_task_or_mixture(cfg)
  tasks = subtasks_with_split(cfg, provider) if cfg.task_feature_lengths is not None else []
  rates = [1.0 if provider is task else float(provider.get_rate(task)) for task in tasks]
  shares: dict[int, float] = {}  # by source, because UL2's denoisers are tasks on one source
  firsts: dict[int, Any] = {}
  for task, rate in zip(tasks, rates, strict=True):
    source = id(task.source)
    shares[source] = shares.get(source, 0.0) + rate / sum(rates)
    firsts.setdefault(source, task)
  with naming_data(cfg):
    return [_measure(task, cfg, shares[s]) for s, task in [*firsts.items()][:_MAX_TASKS]]


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
  is_ours = str(inspect.unwrap(get_dataset_fn).__module__).startswith("rosetta_t5.")
  if is_ours and isinstance(cfg.mixture_or_task_name, PreparedTask):
    return functools.partial(cfg.mixture_or_task_name.describe, cfg)
  found = first_examples(cfg) if is_ours else []
  for each in found:
    each.check_targets(cfg)
  return functools.partial(_describe, found, cfg)


def _describe(found: list[FirstExamples], cfg: DatasetConfig, steps: int | None) -> list[str]:
  texts = {each.task: text for each in found if (text := each.text(cfg, steps))}
  return [text if len(found) == 1 else f"{task}: {text}" for task, text in texts.items()]


def _measure(task: Any, cfg: DatasetConfig, share: float) -> FirstExamples:
  number, is_exact = _number_of_examples(task, cfg)
  features = task.output_features
  lengths: dict[str, np.ndarray] = {}
  rows_per_example: float | None = 1.0
  try:
    # Without lengths nothing is cut; preprocessors that cut texts into rows fail without them.
    examples = _read(read_task(dataclasses.replace(cfg, task_feature_lengths=None), task, seed=0))
    names = [n for n in cfg.task_feature_lengths or {} if n in features and features[n].rank == 1]
    lengths = {n: np.array([len(x[n]) for x in examples if n in x]) for n in names}
    lengths = {name: found for name, found in lengths.items() if len(found)}
  except Exception:
    examples, rows_per_example = [], None
    if task.supports_caching and not cfg.use_cached:
      source = task.source.get_dataset(split=cfg.split, shuffle=False, seed=0)
      examples = _read(task.preprocess_precache(source, seed=0))
      rows = _read(read_task(cfg, task, seed=0))
      texts, made = _mean_tokens(task, examples, ["targets"]), _mean_tokens(task, rows, features)
      rows_per_example = texts / made if made else None
  unknown = [
    count_unknown(text.decode(), feature.vocabulary)
    for example in examples
    for name, feature in features.items()
    if isinstance(text := example.get(f"{name}_pretokenized"), bytes)
  ]
  counts = sum(unknown, Counter())
  return FirstExamples(task.name, share, number, is_exact, lengths, rows_per_example, counts)


def _read(dataset: Any) -> list[Example]:
  return list(dataset.take(_EXAMPLES).as_numpy_iterator())


def _mean_tokens(task: Any, examples: Sequence[Example], names: Sequence[str]) -> float:
  """Returns the mean number of tokens of text in an example, without sentinels and end tokens."""
  vocabulary = task.output_features["targets"].vocabulary
  limit = vocabulary.vocab_size - (vocabulary.extra_ids or 0)

  def count(tokens: np.ndarray) -> int:
    return int(((tokens < limit) & (tokens != vocabulary.eos_id)).sum())

  counts = [sum(count(example[name]) for name in names if name in example) for example in examples]
  return float(np.mean(counts or 0.0))


def _number_of_examples(task: Any, cfg: DatasetConfig) -> tuple[int | None, bool]:
  """Returns the number of examples, None if it is not known soon, and whether it is exact."""
  if cfg.use_cached:
    return task.get_cached_stats(cfg.split)["examples"], True
  source, split = task.source, cfg.split
  if split not in source.splits:  # a part, such as train[:90%]
    return None, False
  known = source.num_input_examples(split)
  if known is not None or not hasattr(source, "count_examples"):
    return known, True
  files = source.list_shards(split)
  if not files or os.path.getsize(files[0]) > _COUNTED_BYTES:
    return None, False
  return source.count_examples(split, max_bytes=_COUNTED_BYTES)
