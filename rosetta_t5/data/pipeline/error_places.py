"""Names the files and examples that cause errors. Both are searched for only after the error."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rosetta_t5.data.dataset_config import DatasetConfig
from rosetta_t5.data.pipeline.data_facts import task_files
from rosetta_t5.data.pipeline.task_lookup import find_task_or_mixture, subtasks_with_split
from rosetta_t5.data.reading import unwrap_reader_errors
from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio, import_tensorflow

# What TensorFlow reports about files that are damaged or cannot be opened, among names of operations.
_DAMAGE = re.compile(
  r"(corrupted|truncated) record|Could not parse example|Unsupported datatype|Key: .*parse.*|Feature: .*"
  r"|\S+; (No such file|Is a directory|Permission denied|Input/output error|Too many open)[\w ]*"
)
_SEARCH_SECONDS = 60.0  # A host that searches must not keep the others waiting for long.
_WINDOW = 8192  # examples that are preprocessed together in a search


@contextlib.contextmanager
def naming_files(cfg: DatasetConfig | None) -> Iterator[None]:
  """Inside the `with`, errors of TensorFlow about data files become ValueErrors that name the file.

  Args:
    cfg: the data that is read; None if it is not known.
  """
  try:
    with unwrap_reader_errors():
      yield
  except Exception as error:
    # TensorFlow's own text may quote bytes of the file, which are not always UTF-8.
    is_undecoded = isinstance(error, UnicodeDecodeError)
    is_tensorflows = type(error).__module__.startswith("tensorflow")
    text = error.object.decode("utf-8", "replace") if is_undecoded else str(error)  # type: ignore[attr-defined]
    damage = _DAMAGE.search(text) if is_undecoded or is_tensorflows else None
    if damage is None:
      raise
    files = "" if cfg is None or damage[2] else _damaged_files(cfg)
    raise ValueError(
      f"{files or 'the data'} cannot be read: {damage[0].strip()}. Restore it from an intact copy"
    ) from error


@contextlib.contextmanager
def naming_example(
  cfg: DatasetConfig | None, check: Callable[[Mapping[str, Any]], None]
) -> Iterator[None]:
  """Inside the `with`, a ValueError about a batch gets the file and line of the first such example.

  Args:
    cfg: the data that is read; None if it is not known.
    check: raises ValueError for such an example, {`FEATURE_tokens`: ids}.
  """
  try:
    yield
  except ValueError as error:
    place = ""
    # Anything can fail here, for example a user's source that cannot be read twice.
    with contextlib.suppress(Exception):
      place = _place_of_first(cfg, check) if cfg is not None else ""
    if not place:
      raise
    raise ValueError(f"{error}. The first such example: {place}") from None


def _damaged_files(cfg: DatasetConfig) -> str:
  """Returns the first TFRecord file that cannot be read, or the names of all that may be damaged."""
  tf, end = import_tensorflow(), time.monotonic() + _SEARCH_SECONDS
  tasks = subtasks_with_split(cfg, find_task_or_mixture(cfg))
  files = [*dict.fromkeys(path for task in tasks for path in task_files(task, cfg))]
  for path in files:
    try:
      any(time.monotonic() > end for _ in tf.data.TFRecordDataset(path))
    except tf.errors.DataLossError:
      return path
  more = f" and {len(files) - 3} more files" if len(files) > 3 else ""
  return f"{', '.join(files[:3])}{more}"


def _place_of_first(cfg: DatasetConfig, check: Callable[[Mapping[str, Any]], None]) -> str:
  """Returns the place of the first example that fails a check, or "" if it is not found in time."""
  tf, end = import_tensorflow(), time.monotonic() + _SEARCH_SECONDS
  for task in subtasks_with_split(cfg, find_task_or_mixture(cfg)):
    files = task.source.list_shards(cfg.split)
    for index, file in enumerate(files):
      shard = import_seqio().ShardInfo(index, len(files))
      source = task.source.get_dataset(split=cfg.split, shuffle=False, shard_info=shard)
      for start, window in zip(itertools.count(0, _WINDOW), source.window(_WINDOW), strict=False):
        if time.monotonic() > end:
          return ""
        fails = _search(cfg, task, tf.data.Dataset.zip(window), check)
        if fails(_WINDOW):
          number = start + bisect.bisect_left(range(1, _WINDOW), True, key=fails)
          line_of = getattr(task.source, "line_of", None)
          line = f"line {line_of(cfg.split, file, number)}" if line_of else f"example {number + 1}"
          return f"{os.fspath(file)}, {line}"
  return ""


def _search(
  cfg: DatasetConfig, task: Any, examples: Any, check: Callable[[Mapping[str, Any]], None]
) -> Callable[[int], bool]:
  """Returns a function of a number n: whether a check fails for what the task makes of n examples."""
  tf = import_tensorflow()
  count = tf.Variable(0, dtype=tf.int64)  # With a variable, the preprocessors are traced only once.
  first = examples.enumerate().take_while(lambda number, _: number < count).map(lambda _, one: one)
  source = import_seqio().FunctionDataSource(
    lambda split, shuffle_files, seed=None: first, splits=[cfg.split]
  )
  made = task.replace(source=source).get_dataset(
    cfg.task_feature_lengths, cfg.split, shuffle=False, seed=0
  )

  def fails(number: int) -> bool:
    count.assign(number)
    try:
      for example in made.as_numpy_iterator():
        ids = {f"{name}_tokens": example[name] for name in task.output_features if name in example}
        check({**ids, "decoder_target_tokens": example["targets"]})
    except ValueError:
      return True
    return False

  return fails
