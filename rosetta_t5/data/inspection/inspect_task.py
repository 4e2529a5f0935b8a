"""`rosetta-t5 inspect`: shows a task's batches as text, their statistics and the problems found."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rosetta_t5.data.dataset_config import DatasetConfig
from rosetta_t5.data.inspection import data_checks
from rosetta_t5.data.pipeline.datasets import get_dataset
from rosetta_t5.data.pipeline.task_lookup import find_task_or_mixture
from rosetta_t5.data.prepared import PreparedTask
from rosetta_t5.data.tensorflow_import import seqio

Example = Mapping[str, np.ndarray]  # {"inputs": tokens, "targets": tokens}

_BARS = " ▁▂▃▄▅▆▇█"
_BINS = 24  # of a histogram
_MODEL_FEATURES = {"inputs": "encoder_input_tokens", "targets": "decoder_target_tokens"}
_SEGMENT_IDS = {"inputs": "encoder_segment_ids", "targets": "decoder_segment_ids"}


@dataclasses.dataclass
class BatchStatistics:
  """Statistics of some batches.

  Attributes:
    row_lengths: for each feature the length of a row.
    lengths: for each feature the lengths of the examples.
    tokens: the number of times that each token occurs.
    rows: the number of rows.
    examples: the number of examples; a row may have several packed examples.
  """

  row_lengths: dict[str, int] = dataclasses.field(default_factory=dict)
  lengths: dict[str, list[int]] = dataclasses.field(default_factory=dict)
  tokens: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
  rows: int = 0
  examples: int = 0

  def length_histogram(self, name: str, bins: int) -> np.ndarray:
    """Returns the number of examples in each bin of lengths, from 0 to the length of a row."""
    return np.histogram(self.lengths[name], bins=bins, range=(0, self.row_lengths[name]))[0]

  def id_histogram(self, vocab_size: int, bins: int) -> np.ndarray:
    """Returns log(1 + number of tokens) in each bin of ids."""
    counts = np.zeros(max([vocab_size - 1, *self.tokens]) + 1)
    counts[list(self.tokens)] = list(self.tokens.values())
    return np.log1p([part.sum() for part in np.array_split(counts, bins)])


def show_dataset(cfg: DatasetConfig, batches: int, examples: int) -> int:
  """Prints a task's data, its statistics and its problems; returns 1 if it has problems, else 0.

  Args:
    cfg: the task, its lengths and its split.
    batches: the number of batches to read.
    examples: the number of examples to print as text.
  """
  task = find_task_or_mixture(cfg)
  if not isinstance(task, PreparedTask):
    lengths = {
      n: x for n, x in (cfg.task_feature_lengths or {}).items() if n in task.output_features
    }
    cfg = dataclasses.replace(cfg, task_feature_lengths=lengths)
  vocabulary = task.output_features["targets"].vocabulary
  vocab_size = vocabulary.vocab_size
  print(f"{cfg.name}, split '{cfg.split}' of {', '.join(task.splits)}")
  print(f"vocabulary: {vocab_size} ids; features: {', '.join(task.output_features)}")
  statistics = _collect(cfg, batches, vocabulary, examples)
  print("\n".join(_statistics_lines(statistics, vocabulary)))
  problems = [*data_checks.check_lengths(cfg), *data_checks.check_texts(cfg, task, vocabulary)]
  problems += data_checks.check_splits(cfg, task)
  print("\n".join(f"problem: {problem}" for problem in problems) or "no problems found")
  return int(bool(problems))


def _batches(cfg: DatasetConfig, count: int) -> Iterator[Any]:
  """Returns the first batches; those of prepared data need no feature converter."""
  converter: Any = None
  if not isinstance(cfg.mixture_or_task_name, PreparedTask):
    has_inputs = "inputs" in (cfg.task_feature_lengths or {})
    converter = seqio.EncDecFeatureConverter if has_inputs else seqio.LMFeatureConverter
  data = get_dataset(cfg, 0, 1, converter)
  return itertools.islice(data.as_numpy_iterator() if converter else data, count)


def _collect(cfg: DatasetConfig, count: int, vocabulary: Any, show: int) -> BatchStatistics:
  """Returns statistics of `count` batches, and prints the first `show` examples."""
  statistics = BatchStatistics()
  for batch in _batches(cfg, count):
    statistics.rows += len(batch[_MODEL_FEATURES["targets"]])
    for example in _examples(batch):
      if statistics.examples < show:
        print()
        for name, tokens in example.items():
          print(f"  {name} ({len(tokens)}): {readable(tokens, vocabulary)}")
      statistics.examples += 1
      for name, tokens in example.items():
        statistics.row_lengths[name] = batch[_MODEL_FEATURES[name]].shape[1]
        statistics.lengths.setdefault(name, []).append(len(tokens))
        statistics.tokens.update(tokens.tolist())
  return statistics


def _examples(batch: Mapping[str, np.ndarray]) -> Iterator[Example]:
  """Yields the examples of a batch, unpacked and without padding."""
  features = {name: batch[key] for name, key in _MODEL_FEATURES.items() if key in batch}
  # Without packing, a row's only segment has the number 1, and its mask equals its segment ids.
  segments = {name: batch.get(_SEGMENT_IDS[name], x > 0) for name, x in features.items()}
  for row in range(len(features["targets"])):
    for segment in range(1, max(int(ids[row].max()) for ids in segments.values()) + 1):
      yield {name: x[row][segments[name][row] == segment] for name, x in features.items()}


def readable(tokens: Sequence[int] | np.ndarray, vocabulary: Any) -> str:
  """Returns tokens as text, with sentinels as ⟨0⟩, ⟨1⟩, … and the end token as ⟨end⟩."""
  marked = [(token, _marker(token, vocabulary)) for token in map(int, tokens)]
  parts: list[str] = []
  for marker, group in itertools.groupby(marked, key=lambda pair: pair[1]):
    run = [token for token, _ in group]
    parts += [vocabulary.decode(run)] if marker is None else [marker] * len(run)
  return " ".join(parts)


def _marker(token: int, vocabulary: Any) -> str | None:
  """Returns the text that is shown for a sentinel or an end token, or None for a token of text."""
  if token == vocabulary.eos_id:
    return "⟨end⟩"
  tokenizer: Any = getattr(vocabulary, "tokenizer", None)
  is_sentinel = token >= vocabulary.vocab_size - vocabulary.extra_ids
  if not is_sentinel and hasattr(tokenizer, "id_to_piece"):
    is_sentinel = "extra_id_" in tokenizer.id_to_piece(token)
  return f"⟨{vocabulary.vocab_size - 1 - token}⟩" if is_sentinel else None


def _statistics_lines(statistics: BatchStatistics, vocabulary: Any) -> Iterator[str]:
  rows, examples = statistics.rows, statistics.examples
  packed = f", {examples / rows:.1f} packed into each" if examples > rows else ""
  yield f"\n{examples} examples in {rows} rows{packed}"
  for name, row_length in statistics.row_lengths.items():
    lengths = np.array(statistics.lengths[name])
    full = lengths.sum() / (rows * row_length)
    quartiles = " ".join(map(str, np.percentile(lengths, [25, 50, 75]).astype(int)))
    line = bars(statistics.length_histogram(name, _BINS))
    yield (
      f"  {name:<8} {line}  {lengths.min()} to {lengths.max()} tokens, "
      f"quartiles {quartiles}, rows {full:.1%} full, {1 - full:.1%} padding"
    )
  total = statistics.tokens.total()
  common = ", ".join(
    f"{readable([token], vocabulary)!r} {count / total:.1%}"
    for token, count in statistics.tokens.most_common(8)
  )
  unknown = statistics.tokens[vocabulary.unk_id] / total
  vocab_size = vocabulary.vocab_size
  yield f"  tokens: {len(statistics.tokens)} of {vocab_size} seen, {unknown:.3%} unknown"
  yield f"  most frequent: {common}"
  by_id = statistics.id_histogram(vocab_size, _BINS)
  yield f"  by id:      {bars(by_id)}  0 to {vocab_size}, log(1 + count)"


def bars(heights: np.ndarray) -> str:
  """Returns a histogram as a line of bars."""
  steps = np.ceil(heights / max(heights.max(), 1e-9) * (len(_BARS) - 1)).astype(int)
  return "".join(_BARS[step] for step in steps)
