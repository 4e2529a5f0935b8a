"""Reads the files that a training run leaves in MODEL_DIR, ours or T5X's. Nothing in them is executed."""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rosetta_t5.run_report.series import Events, Series, read_event_file
from rosetta_t5.telemetry.run_files import RUN_LOG

GROUPS = ("train", "training_eval", "inference_eval")
_FILES = (RUN_LOG, "config.gin", "model-info.txt")
_CHECKPOINT = re.compile(r"checkpoint_(\d+)")
_VARIABLE = re.compile(r"Variable (\S+)\s+size (\d{1,18})\s+shape (\(.*\))\s+partition spec (.*)")
_TOTAL = re.compile(r"Total number of parameters: (\d{1,18})")
_PREDICTIONS = re.compile(r"(?P<task>.+)-(?P<step>\d+)\.jsonl")
_METRICS = "-metrics.jsonl"
_BINDING = re.compile(r"(?P<name>[\w./]+)\s*=\s*(?P<value>.*)", re.DOTALL)
_MAX_EVALUATIONS = 24  # of which predictions are shown
_MAX_EXAMPLES = 12
_MAX_CHARACTERS = 1000

Texts = tuple[str, str, str]  # input, target, prediction


class Variable(NamedTuple):
  """A line of model-info.txt: an array of the train state, and where it lives."""

  name: str
  size: int
  shape: str
  partition: str


class Start(NamedTuple):
  """A start of the training program.

  Attributes:
    time: in seconds since 1970.
    step: the number of steps completed before it; None if nothing was written.
    end: how it ended, as in the run log; None if no end is recorded.
  """

  time: float
  step: int | None
  end: dict[str, Any] | None


@dataclasses.dataclass
class Run:
  """What the files of a run say.

  Attributes:
    folder: MODEL_DIR.
    name: a short name, different for each run of a report.
    series: {group: {tag: series}}; a group is a folder of event files, such as `training_eval/TASK`.
    starts: each start of the training program.
    checkpoints: {step: time} of each saved checkpoint.
    kept_checkpoints: the steps of the checkpoints that exist.
    config: the effective configuration, {name: value} as text.
    variables: parameters and other arrays of the train state, with their partitioning.
    num_parameters: the number of parameters; None if unknown.
    setup: what the last start recorded about model, mesh and devices.
    samples: {task: {step: [(input, target, prediction)]}}.
    notes: what could not be read.
  """

  folder: pathlib.Path
  name: str
  series: dict[str, dict[str, Series]]
  starts: list[Start]
  checkpoints: dict[int, float]
  kept_checkpoints: list[int]
  config: dict[str, str]
  variables: list[Variable]
  num_parameters: int | None
  setup: dict[str, Any]
  samples: dict[str, dict[int, list[Texts]]]
  notes: list[str]


def read_runs(folders: Sequence[str]) -> list[Run]:
  """Reads runs; a folder that is given twice is read once.

  Raises:
    ValueError: a folder does not exist, contains no run, or is in the cloud.
  """
  for folder in folders:
    if "://" in folder:
      raise ValueError(
        f"{folder} is in the cloud, and a report reads folders of this machine: copy it first, without "
        f"its checkpoints, e.g. gcloud storage rsync -r -x 'checkpoint_.*' {folder} run"
      )
  paths = list(dict.fromkeys(pathlib.Path(os.path.realpath(folder)) for folder in folders))
  names = [_root(path).name for path in paths]
  if len(set(names)) < len(names):
    names = [os.path.relpath(path, os.path.commonpath(paths)) for path in paths]
  return [_read_run(path, name) for path, name in zip(paths, names, strict=True)]


def files_of_run(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the files that a report depends on, in the order of their names."""
  files = []
  for parent, folders, names in os.walk(folder):
    # A checkpoint can have a million files, and none of them is needed.
    folders[:] = [name for name in folders if not name.startswith((".", "checkpoint_"))]
    wanted = (n for n in names if "tfevents" in n or n.endswith(".jsonl") or n in _FILES)
    files += [pathlib.Path(parent, name) for name in wanted]
  return sorted(files)


def _root(folder: pathlib.Path) -> pathlib.Path:
  """Returns MODEL_DIR, also if only a folder in it was given, such as T5X's MODEL_DIR/train."""
  return folder.parent if folder.name in GROUPS else folder


def _read_run(folder: pathlib.Path, name: str) -> Run:
  if not folder.is_dir():
    what = "is a file" if folder.exists() else "does not exist"
    raise ValueError(f"{folder} {what}: give the MODEL_DIR of a training run")
  notes: list[str] = []
  by_group = _read_event_files(folder, notes)
  series = _read_metric_files(folder / "inference_eval", notes)
  series |= {group: _join(events) for group, events in by_group.items()}
  log = _read_json_lines(folder / RUN_LOG, notes)
  setups = [line for line in log if line.get("event") == "start"]
  # A running job deletes old checkpoints.
  kept: dict[int, float] = {}
  for entry in folder.iterdir():
    with contextlib.suppress(FileNotFoundError):
      if match := _CHECKPOINT.fullmatch(entry.name):
        kept[int(match[1])] = entry.stat().st_mtime
  # Training records when it saves a checkpoint, T5X too.
  saved = series.get("train", {}).get("timing/checkpoint_seconds")
  times = dict(zip(saved.steps.tolist(), saved.times.tolist(), strict=True)) if saved else {}
  info = _text_of(folder / "model-info.txt").splitlines()
  variables = [match.groups() for line in info if (match := _VARIABLE.fullmatch(line))]
  totals = [int(match[1]) for line in info if (match := _TOTAL.fullmatch(line))]
  return Run(
    folder=folder,
    name=name,
    series=series,
    starts=_find_starts(by_group.get("train", []), log),
    checkpoints=kept | times,
    kept_checkpoints=sorted(kept),
    config=parse_bindings(_text_of(folder / "config.gin") or _config_of(by_group.get("train", []))),
    variables=[Variable(name, int(size), *rest) for name, size, *rest in variables],
    num_parameters=totals[-1] if totals else None,
    setup=setups[-1] if setups else {},
    samples=_read_samples(folder, notes),
    notes=notes,
  )


def _text_of(file: pathlib.Path) -> str:
  return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _read_event_files(folder: pathlib.Path, notes: list[str]) -> dict[str, list[Events]]:
  """Returns the content of the event files by group, each group in the order of time."""
  root = _root(folder)
  by_group: dict[str, list[Events]] = collections.defaultdict(list)
  for file in files_of_run(folder):
    if "tfevents" in file.name:
      status = file.stat()
      events = _read_unchanged(file, status.st_size, status.st_mtime_ns)
      if events.problem:
        notes.append(f"{file.relative_to(root)}: {events.problem}")
      by_group[os.fspath(file.parent.relative_to(root))].append(events)
  if not any(events.series for group in by_group.values() for events in group):
    found = "its event files contain no metrics" if by_group else "it has no event files"
    raise ValueError(
      f"{folder} contains no metrics of a run ({found}): give a MODEL_DIR, whose folders train, "
      "training_eval and inference_eval contain TensorBoard's events.out.tfevents files"
    )
  runs = {group.rpartition("/")[0] for group in by_group if group.endswith("/train")}
  if runs and "train" not in by_group:
    names = " ".join(os.fspath(folder / run) for run in sorted(runs))
    raise ValueError(f"{folder} contains several runs: give their folders instead: {names}")
  return by_group


# A page that follows a run reads only the files that have grown.
@functools.lru_cache(maxsize=256)
def _read_unchanged(file: pathlib.Path, size: int, modified: int) -> Events:
  return read_event_file(file)


def _join(events: Sequence[Events]) -> dict[str, Series]:
  """Joins the series of several files in the order in which they were written."""

  def time_written(one: Events) -> tuple[float, float]:
    # Files state in whole seconds when they were opened, and a restart may take less.
    return one.start_time or 0, min((float(s.times[0]) for s in one.series.values()), default=0)

  parts: dict[str, list[Series]] = collections.defaultdict(list)
  for one in sorted(events, key=time_written):
    for tag, series in one.series.items():
      parts[tag].append(series)
  return {
    tag: Series(*map(np.concatenate, zip(*of_tag, strict=True))) for tag, of_tag in parts.items()
  }


def _find_starts(events: Sequence[Events], log: Sequence[dict[str, Any]]) -> list[Start]:
  """Returns the starts of the program, each of which opened an event file."""
  opened = sorted(
    (e.start_time, min((int(s.steps[0]) for s in e.series.values()), default=None))
    for e in events
    if e.start_time is not None and e.series
  )
  ends = [line for line in log if line.get("event") == "end"]
  starts = []
  for n, (time, step) in enumerate(opened):
    following = opened[n + 1][0] if n + 1 < len(opened) else math.inf
    end = next((e for e in ends if time <= _number(e.get("time")) <= following), None)
    starts.append(Start(time, step, end))
  return starts


def _number(value: Any) -> float:
  is_number = isinstance(value, int | float) and abs(value) < 1e15
  return float(value) if is_number else math.nan


def _config_of(events: Sequence[Events]) -> str:
  """Returns the gin file that TensorBoard shows as an indented block; "" if there is none."""
  texts = (one.texts.get(tag) for one in events for tag in ("config", "gin_config"))
  lines = next(filter(None, texts), "").splitlines()
  return "\n".join(line.removeprefix("    ") for line in lines if line.startswith("    "))


def _read_json_lines(file: pathlib.Path, notes: list[str], limit: int | None = None) -> list[Any]:
  """Returns the objects of the first lines of a file; lines that are not JSON objects are noted."""
  if not file.is_file():
    return []
  rows: list[Any] = []
  with file.open(encoding="utf-8", errors="replace") as lines:
    for line in itertools.islice(lines, limit):
      try:
        rows.append(json.loads(line))
      except (ValueError, RecursionError):
        rows.append(None)
  objects = [row for row in rows if isinstance(row, dict)]
  if damaged := len(rows) - len(objects):
    notes.append(f"{file.name}: {damaged} line(s) left out, which are not JSON objects")
  return objects


def _read_metric_files(folder: pathlib.Path, notes: list[str]) -> dict[str, dict[str, Series]]:
  """Returns the metrics of predictions in SeqIO's TASK-metrics.jsonl, as event files would have them.

  The files have no times, so all values have that of the last one.
  """
  by_group: dict[str, dict[str, Series]] = {}
  for file in sorted(folder.glob(f"*{_METRICS}")):
    rows = [
      row for row in _read_json_lines(file, notes) if not math.isnan(_number(row.get("step")))
    ]
    group = by_group[f"inference_eval/{file.name.removesuffix(_METRICS)}"] = {}
    for name in dict.fromkeys(name for row in rows for name in row if name != "step"):
      having = [row for row in rows if name in row]
      steps = np.array([row["step"] for row in having], np.int64)
      values = np.array([_number(row[name]) for row in having])
      if not np.isnan(values).all():
        group[f"eval/{name}"] = Series(steps, np.full(steps.size, file.stat().st_mtime), values)
  return by_group


def _read_samples(folder: pathlib.Path, notes: list[str]) -> dict[str, dict[int, list[Texts]]]:
  """Returns the first predictions of each task at each evaluation, or at some if there are many."""
  files: dict[str, dict[int, pathlib.Path]] = collections.defaultdict(dict)
  for file in sorted((folder / "inference_eval").glob("*.jsonl")):
    if match := _PREDICTIONS.fullmatch(file.name):
      files[match["task"]][int(match["step"])] = file
  # Of a step that a restart has repeated, the last prediction of each input remains.
  others: dict[str, dict[int, dict[str, Texts]]] = {}
  for row in _read_json_lines(folder / "samples.jsonl", notes):
    if not math.isnan(step := _number(row.get("step"))):
      texts = _texts_of(row)
      others.setdefault(str(row.get("task")), {}).setdefault(int(step), {})[texts[0]] = texts
  samples = {
    task: {step: list(by_step[step].values())[:_MAX_EXAMPLES] for step in _spread(by_step)}
    for task, by_step in others.items()
  }
  for task, file_of in files.items():
    rows = {
      step: _read_json_lines(file_of[step], notes, _MAX_EXAMPLES) for step in _spread(file_of)
    }
    samples[task] = {step: [_texts_of(row) for row in found] for step, found in rows.items()}
  return samples


def _spread(steps: Iterable[int]) -> list[int]:
  """Returns the steps in order, or some that are evenly spread if there are many."""
  steps = sorted(steps)
  shown = np.linspace(0, len(steps) - 1, min(len(steps), _MAX_EVALUATIONS)).astype(int)
  return [steps[n] for n in np.unique(shown)]


def _texts_of(row: dict[str, Any]) -> Texts:
  """Returns input, target and prediction of a line that SeqIO's JSONLogger wrote."""
  inputs = row.get("input", row.get("inputs", {}))
  if not isinstance(inputs, dict):
    inputs = {"inputs": inputs}
  target = row.get("target", inputs.get("targets_pretokenized", ""))
  outputs = (row[name] for name in ("prediction", "output", "score") if name in row)
  shown = inputs.get("inputs_pretokenized", inputs.get("inputs", ""))
  return _shorten(shown), _shorten(target), _shorten(next(outputs, ""))


def _shorten(value: Any) -> str:
  text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
  return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"


def parse_bindings(text: str) -> dict[str, str]:
  """Returns {name: value} of a gin file as text; the last binding of a name counts.

  A report may be made of a folder that somebody else sent, so nothing is imported, evaluated or included.
  """
  statements: list[str] = []
  for line in text.splitlines():
    if not line.strip() or line.lstrip().startswith("#"):
      continue
    if line.startswith((" ", "\t", ")", "]", "}")) and statements:
      statements[-1] = f"{statements[-1].removesuffix(chr(92)).rstrip()} {line.strip()}"
    else:
      statements.append(line.rstrip())
  found = (_BINDING.fullmatch(statement) for statement in statements)
  return {match["name"]: match["value"].strip() for match in found if match}


def value_of(bindings: Mapping[str, str], *names: str) -> Any:
  """Returns the value of the first binding that ends with one of `names`; None if there is none.

  Macros are followed. The value is a number, a string, a list and so on, or the text of a reference.
  """
  found = (
    text
    for name in names
    for bound, text in bindings.items()
    if bound == name or bound.endswith((f".{name}", f"/{name}"))
  )
  text = next(found, "")
  for _ in bindings:  # A chain of macros is never longer than this.
    if text.startswith("%"):
      text = bindings.get(text[1:], bindings.get(f"{text[1:]}/macro.value", ""))
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    return text or None
