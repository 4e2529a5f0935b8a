"""Names the files and examples that cause errors. Both are searched for only after the error."""

from __future__ import annotations

import bisect
import collections
import contextlib
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rosetta_t5.data.dataset_config import DatasetConfig
from rosetta_t5.data.pipeline.data_facts import task_files
from rosetta_t5.data.pipeline.task_lookup import find_task_or_mixture, subtasks_with_split
from rosetta_t5.data.reading import unwrap_reader_errors
from rosetta_t5.data.tensorflow_import import import_seqio, import_tensorflow

SEARCH_SECONDS = 60.0  # A host that searches must not keep the others waiting for long.

# What TensorFlow reports about files that are damaged or cannot be opened, among names of operations.
_REPORT = re.compile(
  r"^(?:.*(?:\}\} |: ))?(?P<opening>[^\n;]+; (?:No such file|Is a directory|Permission denied|"
  r"Input/output error|Too many open)[\w ]*)"
  r"|(?:corrupted|truncated) record|Could not parse example|Unsupported datatype"
  r"|(?:inflate\(\) failed|Feature: |Key: .*(?:parse|match))[^\[\n]*",
  re.MULTILINE,
)
_ADVICE = {  # by a part of the report
  "; No such file": "Restore it, or correct the task's file pattern",
  "; Is a directory": "Correct the task's file pattern",
  "; Permission denied": "Make it readable",
  "; Too many open": "Raise the limit of open files (ulimit -n)",
  "Feature: ": "Compare the file with the task's feature description",
  "Key: ": "Compare the file with the task's feature description",
  "": "Restore it from an intact copy",
}
_WINDOW = 8192  # examples that are preprocessed together in a search

Check = Callable[[Mapping[str, Any]], None]


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
    found = _find_report(error)
    if found is None:
      raise
    data = "the data"
    if cfg is not None and not found["opening"]:
      data = _search(_damaged_file, cfg, found[0]) or f"the data of the task '{cfg.name}'"
    report = (found["opening"] or found[0]).strip(" .")
    advice = next(advice for part, advice in _ADVICE.items() if part in report)
    raise ValueError(f"{data} cannot be read: {report}. {advice}") from error


@contextlib.contextmanager
def naming_example(cfg: DatasetConfig | None, check: Check) -> Iterator[None]:
  """Inside the `with`, the location of the first example that fails `check` is added to a ValueError.

  Args:
    cfg: the data that is read; None if it is not known.
    check: raises ValueError for an example {`FEATURE_tokens`: ids} that fails.
  """
  try:
    yield
  except ValueError as error:
    location = _search(_first_failure, cfg, check)
    if not location:
      raise
    raise ValueError(f"{error}. The first example that fails: {location}") from None


def _find_report(error: Exception) -> re.Match[str] | None:
  """Returns the part of an error's text in which TensorFlow reports about a file, if there is one."""
  if isinstance(error, UnicodeDecodeError):
    # TensorFlow's own text may quote bytes of the file, which are not always UTF-8.
    return _REPORT.search(error.object.decode("utf-8", "replace"))
  is_from_tensorflow = type(error).__module__.startswith("tensorflow")
  return _REPORT.search(str(error)) if is_from_tensorflow else None


def _search(find: Callable[..., str], cfg: DatasetConfig | None, wanted: Any) -> str:
  """Returns what a search finds, or "" if it fails or takes too long.

  Anything can fail in a search, for example a user's source that cannot be read twice.
  """
  with contextlib.suppress(Exception):
    return find(cfg, wanted, time.monotonic() + SEARCH_SECONDS)
  return ""


def _until(end: float, items: Iterable[Any]) -> Iterator[Any]:
  """Yields the items; raises TimeoutError when `time.monotonic()` has passed `end`."""
  for item in items:
    if time.monotonic() > end:
      raise TimeoutError
    yield item


def _files(cfg: DatasetConfig) -> Iterator[tuple[Any, str, Any]]:
  """Yields a task, the name of one of its files, and a dataset of what its source reads from it."""
  tf, seqio = import_tensorflow(), import_seqio()
  for task in subtasks_with_split(cfg, find_task_or_mixture(cfg)):
    files = task_files(task, cfg)
    for index, file in enumerate(files):
      if cfg.use_cached:
        yield task, file, tf.data.TFRecordDataset(file)
      else:
        shard = seqio.ShardInfo(index, len(files))
        yield task, file, task.source.get_dataset(cfg.split, shuffle=False, shard_info=shard)


def _damaged_file(cfg: DatasetConfig, report: str, end: float) -> str:
  """Returns the name of the first file whose reading ends with this report."""
  tf = import_tensorflow()
  for task, file, examples in _files(cfg):
    try:
      collections.deque(_until(end, examples), maxlen=0)
    except (tf.errors.OpError, UnicodeDecodeError) as error:
      found = _find_report(error)
      if found is not None and found[0] == report:
        return file if tf.io.gfile.exists(file) else f"the data of the task '{task.name}'"
  return ""


def _first_failure(cfg: DatasetConfig, check: Check, end: float) -> str:
  """Returns the file and line of the first example that fails a check, or its number in the file."""
  if cfg.use_cached:  # The run does not read the source, but the cache.
    return ""
  for task, file, examples in _files(cfg):
    windows = zip(itertools.count(0, _WINDOW), examples.window(_WINDOW), strict=False)
    for start, window in _until(end, windows):
      fails = _checker(cfg, task, import_tensorflow().data.Dataset.zip(window), check, end)
      if fails(_WINDOW):
        number = start + bisect.bisect_left(range(1, _WINDOW), True, key=fails)
        return f"{file}, example {number + 1}"
  return ""


def _checker(
  cfg: DatasetConfig, task: Any, examples: Any, check: Check, end: float
) -> Callable[[int], bool]:
  """Returns a function of a number n: whether any output for the first n examples fails the check."""
  tf = import_tensorflow()
  count = tf.Variable(0, dtype=tf.int64)  # With a variable, the preprocessors are traced only once.
  first = examples.enumerate().take_while(lambda number, _: number < count).map(lambda _, one: one)
  source = import_seqio().FunctionDataSource(
    lambda split, shuffle_files, seed=None: first, splits=[cfg.split]
  )
  outputs = task.replace(source=source).get_dataset(
    cfg.task_feature_lengths, cfg.split, shuffle=False, seed=0
  )

  def fails(number: int) -> bool:
    count.assign(number)
    try:
      for output in _until(end, outputs.as_numpy_iterator()):
        ids = {f"{name}_tokens": output[name] for name in task.output_features if name in output}
        check({**ids, "decoder_target_tokens": output["targets"]})
    except ValueError:
      return True
    return False

  return fails
