"""The data of `rosetta-t5 finetune`: files of rows or SeqIO tasks, checked and measured before a run."""

import argparse
import dataclasses
import glob
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rosetta_t5.argument_types import check_one_of, near_hint
from rosetta_t5.cli.finetune.choices import Choice, Code
from rosetta_t5.data import reading, task_metrics
from rosetta_t5.data.tasks.known_tasks import TASKS
from rosetta_t5.user_errors import ConfigError

_LONG = 1 << 20  # tokens: no example is truncated when lengths are measured
# Of the rows, if no file is given for the evaluation; and the number of rows that are enough.
_EVAL_PART, _EVAL_ROWS = {"validation_percent": 10.0}, 500
_OF_FILES = ("inputs", "targets", "eval", "metrics")
# The splits of a folder of files, by the names of files or of folders in it.
_TRAIN = re.compile(r"(^|[/_.-])train(?![a-z])")
_VALIDATION = re.compile(r"(^|[/_.-])(validation|valid|val|dev)(?![a-z])")


class Measured(NamedTuple):
  """What the first examples show, how many there are, and how the gin file names them.

  Attributes:
    task: the name of the task that is evaluated.
    lengths: the numbers of tokens of each feature of the first examples, with the end token.
    metrics: the names of the task's metrics; none if there are several tasks.
    train: the number of examples that are trained on; None if it is unknown.
    evaluated: the number of those that are not.
    bindings: those of the task, without its metrics.
  """

  task: str
  lengths: Mapping[str, Any]
  metrics: Sequence[str]
  train: int | None
  evaluated: int | None
  bindings: Sequence[Choice] = ()


class Files:
  """Files of rows.

  Attributes:
    targets: the targets of the first rows.
  """

  def __init__(self, options: argparse.Namespace):
    """Reads the first rows.

    Raises:
      ValueError: there is no such file, a file has no rows, or a column or template does not fit it.
    """
    for metric in options.metrics or ():
      check_one_of("--metrics", metric, task_metrics.METRICS)
    columns = {name: getattr(options, name) or name for name in ("inputs", "targets")}
    train, held_out = _split(options.data)
    held_out = [os.path.abspath(name) for name in options.eval or held_out]
    part: dict[str, Any] = {"validation_files": held_out} if held_out else _EVAL_PART
    self.arguments = {"files": train, "objective": "seq2seq", **columns, **part}
    convert, files = reading.make_converter(columns), reading.find_files([*train, *held_out])
    rows: list[Mapping[str, str]] = []
    try:
      for file in files:
        found, _ = reading.BlockReader(convert).read(file, 0)
        if not found:
          raise ValueError(f"{file} contains no rows")
        rows += found
    except ValueError as error:
      hint = "--inputs and --targets are columns, or templates such as 'question: {question}'"
      raise ConfigError(f"{error}\n  {hint}") from error
    self.targets = [row["targets"] for row in rows]
    stem = pathlib.Path(options.data[0]).name.partition(".")[0]
    self.name = re.sub(r"\W+", "_", stem).strip("_") or "rows"

  def measure(self, vocabulary: Any, code: Code) -> Measured:
    """Tokenizes the first rows, and counts all; lowers the share of the rows that is evaluated if they are many.

    Args:
      vocabulary: the SeqIO vocabulary.
      code: the gin value that is this vocabulary.
    """
    from rosetta_t5.data import file_task

    # The name is made of the arguments: the run registers a task of its own.
    found = _measure(file_task(**self.arguments, vocabulary=vocabulary), self.name)
    total = (found.train or 0) + (found.evaluated or 0)
    if not found.train or not found.evaluated:
      raise ConfigError(
        f"{total} rows are too few to evaluate a part of them (equal rows stay together): give rows for the "
        "evaluation, --eval FILE"
      )
    values = {**self.arguments, "vocabulary": code, "name": self.name}
    about = ""
    if values.get("validation_percent", 0) * total > 100 * _EVAL_ROWS:
      about = "about "
      percent = values["validation_percent"] = round(max(0.1, 100 * _EVAL_ROWS / total), 1)
      evaluated = round(total * percent / 100)
      found = found._replace(evaluated=evaluated, train=total - evaluated)
    share = f"{about}{found.evaluated:,} rows that are never trained on; {found.train:,} are"
    reasons = {"validation_percent": share}
    given = [Choice(f"data.file_task.{n}", x, reasons.get(n, "")) for n, x in values.items()]
    task = Choice("MIXTURE_OR_TASK_NAME", Code("@data.file_task()"))
    return found._replace(bindings=[task, *given])


class Tasks:
  """SeqIO tasks, which have targets and metrics of their own."""

  targets: Sequence[str] = ()

  def __init__(self, options: argparse.Namespace):
    """Checks that no option is given that only files have.

    Raises:
      ValueError: one is given.
    """
    if given := [name for name in _OF_FILES if getattr(options, name)]:
      raise ConfigError(f"--{given[0]} is for files of rows, but {options.data[0]} is a SeqIO task")
    self.names: list[str] = options.data

  def measure(self, vocabulary: Any, code: Code) -> Measured:
    """Tokenizes the first examples of each task, and counts all; see `Files.measure`."""
    from rosetta_t5.data import known_task, mixture
    from rosetta_t5.data.tasks.catalogue import registered_names

    registered = {*registered_names(), *TASKS}
    for name in self.names:
      if name not in registered:
        files, tasks = near_hint(name, os.listdir()), near_hint(name, registered)
        raise ConfigError(f"There is no file {name!r}{files}, and no SeqIO task{tasks}")
    own = [known_task(name, vocabulary) if name in TASKS else name for name in self.names]
    known = [name for name in self.names if name in TASKS]
    parts = [Code(f"@{n}/data.known_task()") if n in known else n for n in self.names]
    data = parts[0] if len(parts) == 1 else Code("@data.mixture()")
    mixed = Choice("data.mixture.tasks", parts, "in proportion to their examples")
    bindings = [
      Choice("MIXTURE_OR_TASK_NAME", data),
      *([mixed] if len(parts) > 1 else []),
      *(Choice(f"{name}/data.known_task.name", name) for name in known),
      *(Choice(f"{name}/data.known_task.vocabulary", code) for name in known),
    ]
    name = own[0] if len(own) == 1 else mixture(own)
    return _measure(name, own[0])._replace(bindings=bindings)


def open_data(options: argparse.Namespace) -> Files | Tasks:
  """Returns the files or tasks that DATA names.

  Raises:
    ValueError: they cannot be read; see `Files` and `Tasks`.
  """
  if models := [name for name in options.data if pathlib.Path(name, "config.json").exists()]:
    raise ConfigError(f"DATA {models[0]} is the folder of a model: give it first, as MODEL")
  is_task = [re.fullmatch(r"\w+", name) and not glob.glob(name) for name in options.data]
  # Other tasks than the known ones are registered later.
  has_columns = any(getattr(options, name) for name in _OF_FILES)
  is_file = has_columns and not TASKS.keys() & {*options.data}
  try:
    return Tasks(options) if all(is_task) and not is_file else Files(options)
  except ValueError as error:
    raise ConfigError(str(error)) from error


def _split(names: Sequence[str]) -> tuple[list[str], list[str]]:
  """Returns the files that are trained on, and those that are evaluated, by the names in a folder."""
  train, held_out = [], []
  for name in map(os.path.abspath, names):
    files = reading.find_files(name) if os.path.isdir(name) else []
    if of_train := [file for file in files if _TRAIN.search(os.path.relpath(file, name))]:
      held_out += [file for file in files if _VALIDATION.search(os.path.relpath(file, name))]
    train += of_train or [name]
  return train, held_out


def _measure(name: str, task_name: str) -> Measured:
  """Measures the task or mixture of a name; `task_name` is that of the task that is evaluated."""
  import numpy as np

  from rosetta_t5.data import dataset_config
  from rosetta_t5.data.pipeline.data_description import first_examples

  lengths = {"inputs": _LONG, "targets": _LONG}
  train = dataset_config.DatasetConfig(name, lengths, "train", 1, shuffle=False, seed=0)
  parts = [each.lengths for each in first_examples(train)]
  found = {n: np.concatenate([part[n] for part in parts if n in part]) for n in lengths}
  task = dataset_config.find_task_or_mixture(train)
  counts: list[Any] = []
  for cfg in (train, dataclasses.replace(train, split="validation")):
    with_split = dataset_config.subtasks_with_split(cfg, task)
    counts.append(sum(part.num_input_examples(cfg.split) or 0 for part in with_split) or None)
  metrics = (metric.__name__ for metric in getattr(task, "metric_fns", ()))
  return Measured(task_name, found, [n for n in metrics if n in task_metrics.METRICS], *counts)
