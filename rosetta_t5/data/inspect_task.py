"""`rosetta-t5 inspect`: a task's batches as text, how full and how long they are, what is wrong."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import importlib
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rosetta_t5.data.dataset_config import DatasetConfig
from rosetta_t5.data.datasets import get_dataset
from rosetta_t5.data.prepared import PreparedTask, prepared_task
from rosetta_t5.data.prepared.prepare import MANIFEST
from rosetta_t5.data.providers import find_provider
from rosetta_t5.data.tensorflow_import import import_seqio

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 60
_CHANGED = 0.25
_TEXTS = 64


@dataclasses.dataclass
class Seen:
  """What was found in some batches.

  Attributes:
    lengths: for each feature the examples' lengths.
    room: for each feature the length of a row.
    tokens: how often each token is there.
    digests: of the examples' targets.
    rows: rows of batches.
    examples: examples in them, packed ones counted each.
  """

  lengths: dict[str, list[int]]
  room: dict[str, int]
  tokens: collections.Counter[int]
  digests: set[bytes]
  rows: int = 0
  examples: int = 0


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
  add("--png", metavar="FILE", help="draw the histograms into a file (needs matplotlib)")
  return parser


def _inspect(arguments: argparse.Namespace) -> int:
  cfg = _config(arguments)
  task = find_provider(cfg)
  features = task.output_features
  vocabulary = features["targets"].vocabulary
  print(f"{cfg.name}, split '{cfg.split}' of {', '.join(task.splits)}")
  print(f"vocabulary: {vocabulary.vocab_size} ids; features: {', '.join(features)}")
  seen = _look(cfg, arguments.batches, vocabulary, arguments.examples)
  print("\n".join(_statistics(seen, vocabulary)))
  if arguments.png:
    _draw(seen, arguments.png)
  problems = [*_round_trip(cfg, vocabulary), *_shards(cfg, arguments.batches)]
  problems += _overlap(cfg, task, seen, arguments.batches)
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
  seen = Seen({}, {}, collections.Counter(), set())
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
  seen.digests.add(_digest(example))


def _digest(example: Mapping[str, np.ndarray]) -> bytes:
  data = b"|".join(np.asarray(tokens, np.int32).tobytes() for tokens in example.values())
  return hashlib.blake2b(data, digest_size=8).digest()


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
  yield f"\n{seen.examples} examples in {seen.rows} rows"
  for name, lengths in seen.lengths.items():
    values = np.array(lengths)
    full = values.sum() / (seen.rows * seen.room[name])
    quarter, half, most = np.percentile(values, [25, 50, 75]).astype(int)
    yield (
      f"  {name:<8} {bars(values, seen.room[name])}  {values.min()} to {values.max()} tokens, "
      f"quartiles {quarter} {half} {most}, rows {full:.1%} full"
    )
  total = sum(seen.tokens.values())
  common = ", ".join(
    f"{readable([token], vocabulary)!r} {count / total:.1%}"
    for token, count in seen.tokens.most_common(8)
  )
  unknown = seen.tokens[vocabulary.unk_id] if vocabulary.unk_id is not None else 0
  yield f"  tokens: {len(seen.tokens)} of {vocabulary.vocab_size} seen, {unknown / total:.3%} unknown"
  yield f"  most often: {common}"


def bars(values: np.ndarray, longest: int) -> str:
  """Returns a histogram as a line of bars."""
  counts, _ = np.histogram(values, bins=24, range=(0, max(longest, 1)))
  heights = np.ceil(counts / max(counts.max(), 1) * (len(_BARS) - 1)).astype(int)
  return "".join(_BARS[height] for height in heights)


def _round_trip(cfg: DatasetConfig, vocabulary: Any) -> Iterator[str]:
  """Looks for texts that are too long, or others once encoded and decoded, spaces apart."""
  if isinstance(cfg.mixture_or_task_name, PreparedTask):
    return
  data = find_provider(cfg).get_dataset(
    sequence_length=dict(cfg.task_feature_lengths), split=cfg.split, shuffle=False
  )
  changed, total, first = 0, 0, ""
  cut: collections.Counter[str] = collections.Counter()
  for example in data.take(_TEXTS).as_numpy_iterator():
    for name in ("inputs_pretokenized", "targets_pretokenized"):
      if isinstance(example.get(name), bytes):
        text = example[name].decode()
        tokens = vocabulary.encode(text)
        total += 1
        feature = name.removesuffix("_pretokenized")
        cut[feature] += len(tokens) + 1 > cfg.task_feature_lengths.get(feature, len(tokens) + 1)
        if "".join(vocabulary.decode(tokens).split()) != "".join(text.split()):
          changed, first = changed + 1, first or text
  if total:
    told = ", ".join(f"{name} {count}" for name, count in cut.items())
    print(f"longer than their rows, and cut off, of the first {_TEXTS}: {told}")
    print(f"decode(encode(text)) is the text, but for spaces, in {total - changed} of {total}")
  # Every vocabulary lacks some characters: T5's has no braces. Many such texts mean the wrong one.
  if changed > _CHANGED * total:
    yield f"{changed} of {total} texts change by the vocabulary; the first: {first[:_WIDTH]!r}"


def _shards(cfg: DatasetConfig, count: int) -> Iterator[str]:
  """Looks whether two hosts would read the same examples."""
  if cfg.batch_size % 2:
    return
  found = []
  for shard in range(2):
    rows = ((b, row) for b in _batches(cfg, count, shard, 2) for row in range(cfg.batch_size // 2))
    found.append({_digest(e) for batch, row in rows for e in _unpacked(batch, row)})
  same = len(found[0] & found[1])
  print(f"two hosts: {len(found[0])} and {len(found[1])} different examples, {same} on both")
  if same > 0.01 * max(len(found[0]), 1):
    yield f"two hosts read {same} examples both"


def _overlap(cfg: DatasetConfig, task: Any, seen: Seen, count: int) -> Iterator[str]:
  """Looks for examples of this split in the others."""
  for split in task.splits:
    if split == cfg.split or cfg.split not in ("train", "validation"):
      continue
    other = dataclasses.replace(cfg, split=split)
    try:
      rows = [(b, row) for b in _batches(other, count) for row in range(cfg.batch_size)]
    except ValueError as error:
      print(f"split '{split}' is not compared: {str(error).splitlines()[0]}")
      continue
    same = len({_digest(e) for batch, row in rows for e in _unpacked(batch, row)} & seen.digests)
    print(f"{same} examples of '{cfg.split}' are in '{split}' too")
    if same:
      yield f"{same} examples are in '{cfg.split}' and in '{split}'"


def _draw(seen: Seen, path: str) -> None:
  try:
    pyplot = importlib.import_module("matplotlib.pyplot")
  except ImportError:
    raise ValueError("--png needs matplotlib: pip install matplotlib") from None
  figure, axes = pyplot.subplots(1, len(seen.lengths) + 1, figsize=(4 * len(seen.lengths) + 4, 3))
  for axis, (name, lengths) in zip(axes, seen.lengths.items(), strict=False):
    axis.hist(lengths, bins=40, range=(0, seen.room[name]))
    axis.set_xlabel(f"tokens of {name}")
  axes[-1].loglog(sorted(seen.tokens.values(), reverse=True))
  axes[-1].set_xlabel("token, by rank")
  figure.tight_layout()
  figure.savefig(path, dpi=120)
  pyplot.close(figure)
