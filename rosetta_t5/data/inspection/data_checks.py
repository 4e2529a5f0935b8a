"""Checks a task's data: whether texts survive encoding, lose their end, or are in two splits.

Each check prints what it found and yields the problems.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from rosetta_t5.data.dataset_config import DatasetConfig
from rosetta_t5.data.pipeline.first_examples import first_examples
from rosetta_t5.data.pipeline.task_lookup import has_split
from rosetta_t5.data.prepared import PreparedTask
from rosetta_t5.data.prepared.token_stream import losses_of_folders
from rosetta_t5.data.reading.file_facts import digest_of
from rosetta_t5.data.tensorflow_import import seqio
from rosetta_t5.data.vocabularies.lost_text import count_lost, describe_lost, lost_text_problems

_MAX_SHARED = 0.01  # fraction of the examples that two splits may share
_TEXTS = 64  # number of texts that are encoded and decoded
_EXAMPLES = 20_000  # number of examples of each split that are compared


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


def check_splits(cfg: DatasetConfig, task: Any) -> Iterator[str]:
  """Checks that examples of the other splits, as their source yields them, are not in this one."""
  others = [split for split in task.splits if split != cfg.split]
  if isinstance(task, PreparedTask) or cfg.split not in task.splits:
    return

  def digests(split: str) -> set[str]:
    return {digest_of([b"\x1f".join(fields)]) for fields in _source_texts(task, split, _EXAMPLES)}

  first = digests(cfg.split) if others else set()
  for other in others:
    second = digests(other)
    text = (
      f"{len(first & second)} of {len(second)} examples (of the first {_EXAMPLES:,} of each split) of "
      f"'{other}' are also in '{cfg.split}'"
    )
    print(text)
    if len(first & second) > _MAX_SHARED * len(second):
      yield text


def _source_texts(task: Any, split: str, limit: int) -> Iterator[list[bytes]]:
  """Yields the texts of each example, without ids, before any preprocessor."""
  for part in seqio.get_subtasks(task):
    if has_split(part, split):
      dataset = part.source.get_dataset(split=split, shuffle=False)
      for example in itertools.islice(dataset.as_numpy_iterator(), limit):
        fields = example if isinstance(example, Mapping) else {"line": example}
        texts = [value for name, value in sorted(fields.items()) if name not in ("id", "idx")]
        yield [text for text in texts if isinstance(text, bytes)]
