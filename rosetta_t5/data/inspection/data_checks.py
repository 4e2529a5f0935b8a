"""What may be wrong with a task's data: texts that change or are cut, hosts or splits that share.

Each check prints what it found, and yields what is wrong.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rosetta_t5.data.dataset_config import DatasetConfig
from rosetta_t5.data.pipeline.task_lookup import has_split
from rosetta_t5.data.prepared import PreparedTask, TokenStream
from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio

_WIDTH = 60
_CHANGED = 0.25
_TEXTS = 64
_EXAMPLES = 20_000
_TOKENS = 4_000_000
_PASSAGE = 32  # tokens; so many in a row are no chance
_SHARED = 0.01


def check_texts(cfg: DatasetConfig, task: Any, vocabulary: Any) -> Iterator[str]:
  """Looks for texts that are too long, or others once encoded and decoded, spaces apart."""
  if isinstance(task, PreparedTask):
    print("no text is cut off: prepared text is read to its end, row after row")
    texts = [vocabulary.decode(row.tolist()) for row in _some_rows(task, cfg.split)]
  else:
    pairs = list(_texts_of_task(cfg, task))
    texts = [text for _, text in pairs]
    _tell_what_is_cut(cfg, pairs, vocabulary)
  if not texts:
    print("the task keeps no texts beside its tokens: decode(encode(text)) is not checked")
    return
  changed = [text for text in texts if not _survives(text, vocabulary)]
  same = len(texts) - len(changed)
  print(f"decode(encode(text)) is the text, but for spaces, in {same} of {len(texts)}")
  # Every vocabulary lacks some characters: T5's has no braces. Many such texts mean the wrong one.
  if len(changed) > _CHANGED * len(texts):
    first = repr(changed[0][:_WIDTH])
    yield f"{len(changed)} of {len(texts)} texts change by the vocabulary; the first: {first}"


def _some_rows(task: PreparedTask, split: str) -> np.ndarray:
  stream = TokenStream(task.folders[0], split)
  length = min(256, stream.size)
  rows = min(_TEXTS, stream.size // length)
  return stream.read([number * (stream.size // rows) for number in range(rows)], length)


def _texts_of_task(cfg: DatasetConfig, task: Any) -> Iterator[tuple[str, str]]:
  """Yields (feature, text) of the first examples; where a task has lost them, its source's texts."""
  dataset = task.get_dataset(
    sequence_length=dict(cfg.task_feature_lengths), split=cfg.split, shuffle=False
  )
  names = [f"{feature}_pretokenized" for feature in cfg.task_feature_lengths]
  kept = [name for name in names if name in dataset.element_spec]
  for example in dataset.take(_TEXTS).as_numpy_iterator() if kept else ():
    for name in kept:
      if isinstance(example[name], bytes):
        yield name.removesuffix("_pretokenized"), example[name].decode()
  for fields in _source_texts(task, cfg.split, _TEXTS) if not kept else ():
    yield "", max(fields, key=len).decode()


def _tell_what_is_cut(
  cfg: DatasetConfig, pairs: Sequence[tuple[str, str]], vocabulary: Any
) -> None:
  total, cut = collections.Counter(name for name, _ in pairs), collections.Counter[str]()
  if "" in total:
    print("no text is cut off: the task cuts its texts into rows")
    return
  for name, text in pairs:
    cut[name] += len(vocabulary.encode(text)) + 1 > cfg.task_feature_lengths[name]
  told = ", ".join(f"{name} {cut[name]} ({cut[name] / n:.0%})" for name, n in total.items())
  if told:
    print(f"longer than their rows, and cut off, of the first {max(total.values())}: {told}")


def _survives(text: str, vocabulary: Any) -> bool:
  return "".join(vocabulary.decode(vocabulary.encode(text)).split()) == "".join(text.split())


def check_shards(first: set[bytes], second: set[bytes]) -> Iterator[str]:
  """Looks whether two hosts read the same examples, given digests of those that they read."""
  same = len(first & second)
  print(f"two hosts: {len(first)} and {len(second)} different examples, {same} on both")
  if same > _SHARED * max(len(first), 1):
    yield f"two hosts read {same} examples both"


def check_splits(cfg: DatasetConfig, task: Any) -> Iterator[str]:
  """Looks for texts of the other splits in this one."""
  others = [split for split in task.splits if split != cfg.split]
  if cfg.split not in task.splits or not others:
    print("there is no other split to compare with")
    return
  compare: Callable[[Any, str, str], tuple[int, int, str]]
  compare = _same_passages if isinstance(task, PreparedTask) else _same_examples
  for other in others:
    same, total, what = compare(task, cfg.split, other)
    told = f"{same} of {total} {what} of '{other}' are in '{cfg.split}' too"
    print(told)
    if same > _SHARED * total:
      yield told


def _same_examples(task: Any, split: str, other: str) -> tuple[int, int, str]:
  """Compares examples as they come from the source, whatever a task makes of them."""
  here, there = (
    {
      hashlib.blake2b(b"\x1f".join(fields), digest_size=8).digest()
      for fields in _source_texts(task, name, _EXAMPLES)
    }
    for name in (split, other)
  )
  return len(here & there), len(there), f"examples (of the first {_EXAMPLES:,} of each split)"


def _source_texts(task: Any, split: str, most: int) -> Iterator[list[bytes]]:
  """Yields the texts of examples, no ids, before any preprocessor."""
  for part in import_seqio().get_subtasks(task):
    if has_split(part, split):
      dataset = part.source.get_dataset(split=split, shuffle=False)
      for example in itertools.islice(dataset.as_numpy_iterator(), most):
        texts = [value for name, value in sorted(example.items()) if name not in ("id", "idx")]
        yield [text for text in texts if isinstance(text, bytes)]


def _same_passages(task: PreparedTask, split: str, other: str) -> tuple[int, int, str]:
  """Compares passages of tokens, for prepared text has no borders of documents."""
  same = total = 0
  for folder in task.folders:
    here, there = (_passages(TokenStream(folder, name)) for name in (split, other))
    there = there[::_PASSAGE]
    same += int(np.isin(there, here).sum())
    total += len(there)
  return same, total, f"passages of {_PASSAGE} tokens (of the first {_TOKENS:,} of each split)"


def _passages(stream: TokenStream) -> np.ndarray:
  """Returns a hash of the tokens from each place on."""
  tokens = stream.read([0], min(_TOKENS, stream.size))[0].astype(np.uint64)
  count = max(0, len(tokens) - _PASSAGE + 1)
  hashes = np.zeros(count, np.uint64)
  with np.errstate(over="ignore"):
    for place in range(_PASSAGE):
      hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + tokens[place : place + count]
  return hashes


def digest(example: Mapping[str, np.ndarray]) -> bytes:
  """Returns a digest of an example's tokens."""
  data = b"|".join(np.asarray(tokens, np.int32).tobytes() for tokens in example.values())
  return hashlib.blake2b(data, digest_size=8).digest()
