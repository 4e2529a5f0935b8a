"""Checks a task's data: whether texts survive encoding, are truncated, or are on two hosts or in two splits.

Each check prints what it found and yields the problems.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rosetta_t5.data.dataset_config import DatasetConfig
from rosetta_t5.data.pipeline.first_examples import first_examples
from rosetta_t5.data.pipeline.task_lookup import has_split
from rosetta_t5.data.prepared import PreparedTask, TokenStream
from rosetta_t5.data.prepared.token_stream import losses_of_folders
from rosetta_t5.data.reading.file_facts import digest_of
from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio
from rosetta_t5.data.vocabularies.lost_text import count_lost, describe_lost, lost_text_problems

_MAX_SHARED = 0.01  # fraction of the examples that two hosts or two splits may share
_TEXTS = 64  # number of texts that are encoded and decoded
_EXAMPLES = 20_000  # number of examples of each split that are compared
_TOKENS = 4_000_000  # number of tokens of each split of prepared data that are compared
_PASSAGE = 32  # tokens; two texts do not share such a long passage by chance


def check_lengths(cfg: DatasetConfig) -> Iterator[str]:
  """Checks whether targets lose their end, and prints the number of examples and the share truncated."""
  found = first_examples(cfg)
  for each in found:
    text = each.text(cfg)
    if not each.lengths:
      text = f"{text + '; ' * bool(text)}no text is truncated: the task cuts its texts into rows"
    print(f"examples of {each.task}: {text}")
    try:
      each.check_targets(cfg)
    except ValueError as error:
      yield str(error)
  if not found:
    print("no text is truncated: prepared text is read to its end, row after row")


def check_texts(cfg: DatasetConfig, task: Any, vocabulary: Any) -> Iterator[str]:
  """Checks whether texts survive encoding and decoding."""
  if isinstance(task, PreparedTask):
    counts = losses_of_folders(task.folders)
  else:
    texts = _texts_of_task(cfg, task)
    counts = sum((count_lost(text, vocabulary) for text in texts), collections.Counter())
  if not counts:
    print("decode(encode(text)) is not checked, because there are only tokens without their texts")
    return
  print("\n".join(describe_lost(counts)))
  yield from lost_text_problems(counts)


def _texts_of_task(cfg: DatasetConfig, task: Any) -> Iterator[str]:
  """Yields the features' texts of the first examples, or else the longest text of the source's example."""
  lengths = dict(cfg.task_feature_lengths or {})
  dataset = task.get_dataset(sequence_length=lengths, split=cfg.split, shuffle=False)
  kept = [name for name in lengths if f"{name}_pretokenized" in dataset.element_spec]
  if not kept:
    for fields in _source_texts(task, cfg.split, _TEXTS):
      yield max(fields, key=len).decode()
    return
  for example in dataset.take(_TEXTS).as_numpy_iterator():
    texts = (example[f"{name}_pretokenized"] for name in kept)
    yield from (text.decode() for text in texts if isinstance(text, bytes))


def check_shards(first: set[str], second: set[str]) -> Iterator[str]:
  """Checks that two hosts read different examples, given digests of their examples."""
  same = len(first & second)
  print(f"two hosts: {len(first)} and {len(second)} different examples, {same} on both")
  if same > _MAX_SHARED * max(len(first), 1):
    yield f"two hosts both read {same} examples"


def check_splits(cfg: DatasetConfig, task: Any) -> Iterator[str]:
  """Checks that texts of the other splits are not in this one."""
  others = [split for split in task.splits if split != cfg.split]
  if cfg.split not in task.splits or not others:
    print("there is no other split to compare with")
    return
  compare = _same_passages if isinstance(task, PreparedTask) else _same_examples
  for other in others:
    same, total, unit = compare(task, cfg.split, other)
    text = f"{same} of {total} {unit} of '{other}' are also in '{cfg.split}'"
    print(text)
    if same > _MAX_SHARED * total:
      yield text


def _same_examples(task: Any, split: str, other: str) -> tuple[int, int, str]:
  """Compares examples as their source yields them.

  Returns:
    How many examples of the other split are in the first, the size of the other split, and a description of
    the examples.
  """
  first, second = (
    {digest_of([b"\x1f".join(fields)]) for fields in _source_texts(task, name, _EXAMPLES)}
    for name in (split, other)
  )
  return len(first & second), len(second), f"examples (of the first {_EXAMPLES:,} of each split)"


def _source_texts(task: Any, split: str, limit: int) -> Iterator[list[bytes]]:
  """Yields the texts of each example, without ids, before any preprocessor."""
  for part in import_seqio().get_subtasks(task):
    if has_split(part, split):
      dataset = part.source.get_dataset(split=split, shuffle=False)
      for example in itertools.islice(dataset.as_numpy_iterator(), limit):
        fields = example if isinstance(example, Mapping) else {"line": example}
        texts = [value for name, value in sorted(fields.items()) if name not in ("id", "idx")]
        yield [text for text in texts if isinstance(text, bytes)]


def _same_passages(task: PreparedTask, split: str, other: str) -> tuple[int, int, str]:
  """Compares passages of tokens, because prepared text has no document boundaries.

  Returns:
    The same as `_same_examples`, for passages.
  """
  same = total = 0
  for folder in task.folders:
    first, second = (_passages(TokenStream(folder, name)) for name in (split, other))
    second = second[::_PASSAGE]
    same += int(np.isin(second, first).sum())
    total += len(second)
  return same, total, f"passages of {_PASSAGE} tokens (of the first {_TOKENS:,} of each split)"


def _passages(stream: TokenStream) -> np.ndarray:
  """Returns a hash of the passage that begins at each position."""
  tokens = stream.read([0], min(_TOKENS, stream.size))[0].astype(np.uint64)
  count = max(0, len(tokens) - _PASSAGE + 1)
  # A polynomial hash modulo 2**64.
  hashes = np.zeros(count, np.uint64)
  with np.errstate(over="ignore"):
    for offset in range(_PASSAGE):
      hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + tokens[offset : offset + count]
  return hashes


def digest(example: Mapping[str, np.ndarray]) -> str:
  """Returns a digest of an example's tokens."""
  parts = [np.asarray(tokens, np.int32).tobytes() for tokens in example.values()]
  return digest_of([b"|".join(parts)])
