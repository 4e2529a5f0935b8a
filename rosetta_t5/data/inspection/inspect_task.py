"""`rosetta-t5 inspect`: a task's batches as text, how full and how long they are, what is wrong."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rosetta_t5.data.dataset_config import DatasetConfig
from rosetta_t5.data.inspection import data_checks
from rosetta_t5.data.inspection.histogram_image import draw_histograms
from rosetta_t5.data.pipeline.datasets import get_dataset
from rosetta_t5.data.pipeline.task_lookup import find_task_or_mixture
from rosetta_t5.data.prepared import PreparedTask, prepared_task
from rosetta_t5.data.prepared.prepare import MANIFEST
from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio

_BARS = " ▁▂▃▄▅▆▇█"
_BINS = 24


@dataclasses.dataclass
class Seen:
  """What was found in some batches.

  Attributes:
    lengths: for each feature the examples' lengths.
    room: for each feature the length of a row.
    tokens: how often each token is there.
    rows: rows of batches.
    examples: examples in them, packed ones counted each.
  """

  lengths: dict[str, list[int]]
  room: dict[str, int]
  tokens: collections.Counter[int]
  rows: int = 0
  examples: int = 0

  def counts_of_ids(self, vocab_size: int) -> np.ndarray:
    """Returns how often each id was seen."""
    counts = np.zeros(max([vocab_size - 1, *self.tokens]) + 1)
    counts[list(self.tokens)] = list(self.tokens.values())
    return counts


def main(argv: Sequence[str]) -> int:
  """Runs the verb; returns 1 if something is wrong with the data."""
  arguments = _parser().parse_args(argv)
  sys.path.insert(0, os.getcwd())
  try:
    return _inspect(arguments)
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser("rosetta-t5 inspect", description=__doc__)
  add = parser.add_argument
  add("task", help="a task's or mixture's name, or a folder of prepared data")
  add("--module", help="imported first, to register the task")
  add("--split", default="train")
  add("--lengths", default="inputs=512,targets=128", help="tokens of each feature")
  add("--batches", type=int, default=4)
  add("--batch-size", type=int, default=8)
  add("--examples", type=int, default=2, help="how many are shown as text")
  add("--pack", action="store_true")
  add("--seed", type=int, default=0)
  add("--tfds_data_dir", "--tfds-data-dir", help="where data is looked for")
  add("--png", metavar="FILE", help="draw the histograms into a file")
  return parser


def _inspect(arguments: argparse.Namespace) -> int:
  cfg = _config(arguments)
  task = find_task_or_mixture(cfg)
  features = task.output_features
  vocabulary = features["targets"].vocabulary
  print(f"{cfg.name}, split '{cfg.split}' of {', '.join(task.splits)}")
  print(f"vocabulary: {vocabulary.vocab_size} ids; features: {', '.join(features)}")
  seen = _look(cfg, arguments.batches, vocabulary, arguments.examples)
  print("\n".join(_statistics(seen, vocabulary)))
  if arguments.png:
    lengths = {name: (values, seen.room[name]) for name, values in seen.lengths.items()}
    draw_histograms(arguments.png, lengths, seen.counts_of_ids(vocabulary.vocab_size))
  problems = [*data_checks.check_texts(cfg, task, vocabulary)]
  if cfg.batch_size % 2 == 0:
    problems += data_checks.check_shards(
      *(_digests(cfg, arguments.batches, host) for host in (0, 1))
    )
  problems += data_checks.check_splits(cfg, task)
  print("\n".join(f"wrong: {problem}" for problem in problems) or "nothing is wrong")
  return int(bool(problems))


def _config(arguments: argparse.Namespace) -> DatasetConfig:
  if arguments.tfds_data_dir:
    import_seqio().set_tfds_data_dir_override(arguments.tfds_data_dir)
  lengths = dict(part.split("=") for part in arguments.lengths.split(","))
  name: Any = arguments.task
  if os.path.exists(os.path.join(name, MANIFEST)):
    name = prepared_task(name)
  return DatasetConfig(
    name,
    {feature: int(length) for feature, length in lengths.items()},
    arguments.split,
    arguments.batch_size,
    shuffle=True,
    seed=arguments.seed,
    pack=arguments.pack,
    module=arguments.module,
  )


def _converter(cfg: DatasetConfig) -> Any:
  if isinstance(cfg.mixture_or_task_name, PreparedTask):
    return None
  seqio = import_seqio()
  has_inputs = "inputs" in cfg.task_feature_lengths
  return seqio.EncDecFeatureConverter if has_inputs else seqio.LMFeatureConverter


def _batches(cfg: DatasetConfig, count: int, shard: int = 0, shards: int = 1) -> Iterator[Any]:
  data = get_dataset(cfg, shard, shards, _converter(cfg), num_epochs=None)
  rows = data.as_numpy_iterator() if hasattr(data, "as_numpy_iterator") else data
  return itertools.islice(rows, count)


def _look(cfg: DatasetConfig, count: int, vocabulary: Any, show: int) -> Seen:
  """Counts what is in batches, and prints the first examples."""
  seen = Seen({}, {}, collections.Counter())
  for batch in _batches(cfg, count):
    for row in range(len(batch["decoder_target_tokens"])):
      seen.rows += 1
      for example in _unpacked(batch, row):
        if seen.examples < show:
          print("\n".join(_as_text(example, vocabulary)))
        seen.examples += 1
        _count(example, batch, seen)
  return seen


def _unpacked(batch: Mapping[str, np.ndarray], row: int) -> Iterator[dict[str, np.ndarray]]:
  """Yields a row's examples, as {"inputs": …, "targets": …} without padding."""
  sides = {"encoder_input_tokens": "encoder", "decoder_target_tokens": "decoder"}
  names = {"encoder": "inputs", "decoder": "targets"}
  there = {side: feature for feature, side in sides.items() if feature in batch}
  segments = {
    side: batch.get(f"{side}_segment_ids", (batch[feature] > 0).astype(np.int32))[row]
    for side, feature in there.items()
  }
  for segment in range(1, max(int(ids.max()) for ids in segments.values()) + 1):
    yield {
      names[side]: batch[feature][row][segments[side] == segment] for side, feature in there.items()
    }


def _count(example: Mapping[str, np.ndarray], batch: Mapping[str, np.ndarray], seen: Seen) -> None:
  rooms = {"inputs": "encoder_input_tokens", "targets": "decoder_target_tokens"}
  for name, tokens in example.items():
    seen.lengths.setdefault(name, []).append(len(tokens))
    seen.room[name] = batch[rooms[name]].shape[1]
    seen.tokens.update(tokens.tolist())


def _digests(cfg: DatasetConfig, count: int, shard: int) -> set[bytes]:
  """Returns the examples that the first or second of two hosts reads."""
  found = set()
  for batch in _batches(cfg, count, shard, 2):
    for row in range(cfg.batch_size // 2):
      found |= {data_checks.digest(example) for example in _unpacked(batch, row)}
  return found


def _as_text(example: Mapping[str, np.ndarray], vocabulary: Any) -> Iterator[str]:
  yield ""
  for name, tokens in example.items():
    yield f"  {name} ({len(tokens)}): {readable(tokens, vocabulary)}"


def readable(tokens: Sequence[int] | np.ndarray, vocabulary: Any) -> str:
  """Returns tokens as text with the sentinels as ⟨0⟩, ⟨1⟩, … and the end as ⟨end⟩."""
  first_sentinel = vocabulary.vocab_size - 100
  parts: list[str] = []
  plain: list[int] = []
  for token in [*map(int, tokens), -1]:
    is_sentinel = token >= first_sentinel and _is_sentinel(token, vocabulary)
    if not is_sentinel and token not in (vocabulary.eos_id, -1):
      plain.append(token)
      continue
    parts += [vocabulary.decode(plain)] if plain else []
    plain = []
    if token != -1:
      parts.append(f"⟨{vocabulary.vocab_size - 1 - token}⟩" if is_sentinel else "⟨end⟩")
  return " ".join(parts)


def _is_sentinel(token: int, vocabulary: Any) -> bool:
  if token >= vocabulary.vocab_size - vocabulary.extra_ids:
    return True
  tokenizer = getattr(vocabulary, "tokenizer", None)
  return tokenizer is not None and "extra_id_" in tokenizer.id_to_piece(token)


def _statistics(seen: Seen, vocabulary: Any) -> Iterator[str]:
  packed = (
    f", {seen.examples / seen.rows:.1f} packed into each" if seen.examples > seen.rows else ""
  )
  yield f"\n{seen.examples} examples in {seen.rows} rows{packed}"
  for name, lengths in seen.lengths.items():
    values = np.array(lengths)
    full = values.sum() / (seen.rows * seen.room[name])
    quarter, half, most = np.percentile(values, [25, 50, 75]).astype(int)
    yield (
      f"  {name:<8} {bars(values, seen.room[name])}  {values.min()} to {values.max()} tokens, "
      f"quartiles {quarter} {half} {most}, rows {full:.1%} full, {1 - full:.1%} padding"
    )
  total = sum(seen.tokens.values())
  common = ", ".join(
    f"{readable([token], vocabulary)!r} {count / total:.1%}"
    for token, count in seen.tokens.most_common(8)
  )
  unknown = seen.tokens[vocabulary.unk_id] if vocabulary.unk_id is not None else 0
  yield f"  tokens: {len(seen.tokens)} of {vocabulary.vocab_size} seen, {unknown / total:.3%} unknown"
  yield f"  most often: {common}"
  parts = np.array_split(seen.counts_of_ids(vocabulary.vocab_size), _BINS)
  heights = np.log1p([part.sum() for part in parts])
  yield f"  by id:      {_as_bars(heights)}  0 to {vocabulary.vocab_size}, log(1 + count)"


def bars(values: np.ndarray, longest: int) -> str:
  """Returns a histogram as a line of bars."""
  return _as_bars(np.histogram(values, bins=_BINS, range=(0, max(longest, 1)))[0])


def _as_bars(heights: np.ndarray) -> str:
  steps = np.ceil(heights / max(heights.max(), 1e-9) * (len(_BARS) - 1)).astype(int)
  return "".join(_BARS[step] for step in steps)
