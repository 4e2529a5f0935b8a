"""Measures the first examples of a run's tasks: truncation, the number of examples, and epochs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rosetta_t5.data.dataset_config import DatasetConfig
from rosetta_t5.data.pipeline.error_locations import naming_files
from rosetta_t5.data.pipeline.task_lookup import find_task_or_mixture, subtasks_with_split
from rosetta_t5.data.prepared import PreparedTask
from rosetta_t5.data.vocabularies.lost_text import count_unknown, describe_unknown

_EXAMPLES = 256  # of a task that are read
_MAX_TASKS = 4  # of a mixture
_COUNTED_BYTES = 64 << 20  # of files whose examples are counted
_MAX_TRUNCATED = 0.5  # share of targets that may lose their end


@dataclasses.dataclass(frozen=True)
class FirstExamples:
  """What the first examples of a task show.

  Attributes:
    task: the task's name.
    number: the number of examples of the split; None if it is not known.
    is_exact: whether it was counted, and not estimated.
    read: the number of examples that were read.
    lengths: for each feature the numbers of tokens of these examples, with the end token; none if the
      task cuts its texts into rows, so that nothing is truncated.
    rows_per_example: how many rows the task makes of an example without packing; None if not known.
    share: the share of the run's rows that are the task's, in a mixture; else 1.
    unknown: how often each character without a piece in the vocabulary occurs; see `count_unknown`.
  """

  task: str
  number: int | None
  is_exact: bool
  read: int
  lengths: Mapping[str, np.ndarray]
  rows_per_example: float | None
  share: float = 1.0
  unknown: Mapping[str, int] = dataclasses.field(default_factory=dict)

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
        f"{share:.0%} of the first {self.read} targets of '{self.task}' are longer than TASK_FEATURE_LENGTHS"
        f"['targets'] = {limits['targets']} and would lose their end: half of them have more than "
        f"{int(np.median(targets))} tokens, the longest has {targets.max()}. Set a larger length, or "
        "utils.DatasetConfig.allow_truncated_targets = True"
      )

  def text(self, cfg: DatasetConfig, steps: int | None = None) -> str:
    """Returns a line with the number of examples, the share truncated, and the epochs of `steps`."""
    parts = []
    if self.number is not None:
      parts.append(f"{'' if self.is_exact else 'about '}{self.number:,} in all")
    truncated = self.truncated(cfg.task_feature_lengths or {})
    shares = [f"{share:.1%} of the {name}" for name, share in truncated.items()]
    if shares:
      parts.append(f"truncated: {', '.join(shares)}, of the first {self.read}")
    if unknown := describe_unknown(self.unknown):
      parts.append(f"the vocabulary has no piece for {unknown}")
    if steps and self.number and self.rows_per_example:
      rows = self.number * self.rows_per_example / self._examples_per_row(cfg)
      is_exact = self.is_exact and not cfg.pack and bool(self.lengths) and self.share == 1
      epochs = self.share * steps * cfg.batch_size / rows
      parts.append(f"{steps:,} steps are {'' if is_exact else 'about '}{epochs:.3g} epochs")
    return "; ".join(parts)

  def _examples_per_row(self, cfg: DatasetConfig) -> float:
    """Returns an estimate of how many examples packing puts into a row."""
    if not cfg.pack:
      return 1.0
    limits = cfg.task_feature_lengths or {}
    full = [limits[name] / np.minimum(x, limits[name]).mean() for name, x in self.lengths.items()]
    return max(1.0, min(full, default=1.0))


def first_examples(cfg: DatasetConfig) -> list[FirstExamples]:
  """Reads the first examples of a task, or of each of the first tasks of a mixture.

  Raises:
    ValueError: there is no such task, its files cannot be read, or none of their first records is usable.
  """
  provider = find_task_or_mixture(cfg)
  if isinstance(provider, PreparedTask) or cfg.task_feature_lengths is None:
    return []
  tasks = subtasks_with_split(cfg, provider)
  rates = [1.0 if provider is task else float(provider.get_rate(task)) for task in tasks]
  shares: dict[int, float] = {}  # by source, because UL2's denoisers are tasks on one source
  firsts: dict[int, Any] = {}
  for task, rate in zip(tasks, rates, strict=True):
    source = id(task.source)
    shares[source] = shares.get(source, 0.0) + rate / sum(rates)
    firsts.setdefault(source, task)
  with naming_files(cfg):
    return [
      dataclasses.replace(
        _measure(task, cfg), share=shares[source], unknown=_count_unknown(task, cfg)
      )
      for source, task in [*firsts.items()][:_MAX_TASKS]
    ]


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
    return functools.partial(_describe_prepared, cfg.mixture_or_task_name.batches(cfg, 0, 1, 0))
  found = first_examples(cfg) if is_ours else []
  for each in found:
    each.check_targets(cfg)
  return functools.partial(_describe, found, cfg)


def _describe_prepared(batches: Any, steps: int | None) -> list[str]:
  prefix = "data/epochs/"
  measures = batches.measures(steps).items() if steps else ()
  epochs = {key.removeprefix(prefix): n for key, n in measures if key.startswith(prefix)}
  return [f"{name}: {steps:,} steps are {n:.3g} epochs" for name, n in epochs.items()]


def _describe(found: list[FirstExamples], cfg: DatasetConfig, steps: int | None) -> list[str]:
  if len(found) == 1:
    return [text] if (text := found[0].text(cfg, steps)) else []
  return [f"{each.task}: {text}" for each in found if (text := each.text(cfg, steps))]


def _measure(task: Any, cfg: DatasetConfig) -> FirstExamples:
  number, is_exact = _number_of_examples(task, cfg)
  try:
    # Without lengths nothing is cut; preprocessors that cut texts into rows fail without them.
    dataset = _read(task, cfg, None)
  except Exception:
    rows_per_example = None if cfg.use_cached else _rows_per_example(task, cfg)
    return FirstExamples(task.name, number, is_exact, 0, {}, rows_per_example)
  names = [name for name in cfg.task_feature_lengths or {} if name in dataset.element_spec]
  names = [name for name in names if dataset.element_spec[name].shape.rank == 1]
  examples = list(dataset.take(_EXAMPLES).as_numpy_iterator())
  lengths = {name: np.array([len(example[name]) for example in examples]) for name in names}
  return FirstExamples(task.name, number, is_exact, len(examples), lengths if examples else {}, 1.0)


def _count_unknown(task: Any, cfg: DatasetConfig) -> Counter[str]:
  """Counts the unknown characters of the first texts, if the task keeps them with their tokens."""
  if cfg.use_cached or not task.supports_caching:
    return Counter()
  source = task.source.get_dataset(split=cfg.split, shuffle=False, seed=0)
  examples = task.preprocess_precache(source, seed=0).take(_EXAMPLES).as_numpy_iterator()
  texts = [
    count_unknown(text.decode(), feature.vocabulary)
    for example in examples
    for name, feature in task.output_features.items()
    if isinstance(text := example.get(f"{name}_pretokenized"), bytes)
  ]
  return sum(texts, Counter())


def _read(task: Any, cfg: DatasetConfig, lengths: Mapping[str, int] | None) -> Any:
  return task.get_dataset(
    lengths, split=cfg.split, use_cached=cfg.use_cached, shuffle=False, seed=0, num_epochs=1
  )


def _rows_per_example(task: Any, cfg: DatasetConfig) -> float | None:
  """Estimates how many rows are made of a text, by the numbers of tokens of both."""
  if not task.supports_caching:
    return None
  source = task.source.get_dataset(split=cfg.split, shuffle=False, seed=0)
  texts = _token_counts(task, task.preprocess_precache(source, seed=0), ("targets",))
  rows = _token_counts(task, _read(task, cfg, cfg.task_feature_lengths), ("inputs", "targets"))
  return float(np.mean(texts) / np.mean(rows)) if texts and rows else None


def _token_counts(task: Any, dataset: Any, names: tuple[str, ...]) -> list[int]:
  """Returns the numbers of tokens of text, without sentinels and end tokens, in the first examples."""
  vocabulary = task.output_features["targets"].vocabulary
  limit = vocabulary.vocab_size - (vocabulary.extra_ids or 0)

  def count(tokens: np.ndarray) -> int:
    return int(((tokens < limit) & (tokens != vocabulary.eos_id)).sum())

  examples = dataset.take(_EXAMPLES).as_numpy_iterator()
  return [sum(count(x[name]) for name in names if name in x) for x in examples]


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
  number, is_exact = source.count_examples(split, max_bytes=_COUNTED_BYTES)
  return number, is_exact
