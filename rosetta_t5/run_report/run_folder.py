"""Reads the files that a training run leaves in MODEL_DIR, ours or T5X's."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rosetta_t5.run_report.event_files import Events, Series, read_event_file
from rosetta_t5.run_report.gin_text import gin_of_markdown, parse_bindings
from rosetta_t5.telemetry.run_files import RUN_LOG

GROUPS = ("train", "training_eval", "inference_eval")
_EVENT_FILE = "tfevents"
_CHECKPOINT = re.compile(r"checkpoint_(\d+)")
_VARIABLE = re.compile(r"Variable (\S+)\s+size (\d{1,18})\s+shape (\(.*\))\s+partition spec (.*)")
_TOTAL = re.compile(r"Total number of parameters: (\d{1,18})")
_SAMPLES = re.compile(r"(?P<task>.+)-(?P<step>\d+)\.jsonl")
_METRICS = "-metrics.jsonl"
_MAX_EVALUATIONS = 24  # of which predictions are shown
_MAX_EXAMPLES = 12
_MAX_CHARACTERS = 1000


@dataclasses.dataclass(frozen=True)
class Variable:
  """A line of model-info.txt: an array of the train state, and where it lives."""

  name: str
  size: int
  shape: str
  partition: str


@dataclasses.dataclass(frozen=True)
class Start:
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
    facts: what the last start recorded about model, mesh and devices.
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
  facts: dict[str, Any]
  samples: dict[str, dict[int, list[tuple[str, str, str]]]]
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
  return [_read_run(path, name) for path, name in zip(paths, _short_names(paths), strict=True)]


def files_of_run(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the files that a report depends on, in the order of their names."""
  files = []
  for parent, folders, names in os.walk(folder):
    # A checkpoint can have a million files, and none of them is needed.
    folders[:] = [name for name in folders if not name.startswith((".", "checkpoint_"))]
    wanted = (RUN_LOG, "config.gin", "model-info.txt")
    files += [
      pathlib.Path(parent, n)
      for n in names
      if (_EVENT_FILE in n or n.endswith(".jsonl") or n in wanted)
      and os.path.isfile(os.path.join(parent, n))  # and not a pipe or a device
    ]
  return sorted(files)


def _root(folder: pathlib.Path) -> pathlib.Path:
  """Returns MODEL_DIR, also if only a folder in it was given, such as T5X's MODEL_DIR/train."""
  return folder.parent if folder.name in GROUPS else folder


def _short_names(paths: Sequence[pathlib.Path]) -> list[str]:
  names = [_root(path).name for path in paths]
  if len(set(names)) == len(names):
    return names
  common = os.path.commonpath(paths)
  return [os.path.relpath(path, common) for path in paths]


def _read_run(folder: pathlib.Path, name: str) -> Run:
  if not folder.is_dir():
    what = "is a file" if folder.exists() else "does not exist"
    raise ValueError(f"{folder} {what}: give the MODEL_DIR of a training run")
  notes: list[str] = []
  by_group = _read_event_files(folder, notes)
  series = _read_metric_files(folder / "inference_eval", notes)
  series |= {group: _join(events) for group, events in by_group.items()}
  log = _read_json_lines(folder / RUN_LOG, notes)
  facts = [line for line in log if line.get("event") == "start"]
  variables, num_parameters = _read_model_info(folder / "model-info.txt")
  saved, kept = _saved_checkpoints(series.get("train", {})), _kept_checkpoints(folder)
  return Run(
    folder=folder,
    name=name,
    series=series,
    starts=_find_starts(by_group.get("train", []), log),
    checkpoints=kept | saved,
    kept_checkpoints=sorted(kept),
    config=parse_bindings(_config_text(folder, by_group)),
    variables=variables,
    num_parameters=num_parameters,
    facts=facts[-1] if facts else {},
    samples=_read_samples(folder, notes),
    notes=notes,
  )


def _read_event_files(folder: pathlib.Path, notes: list[str]) -> dict[str, list[Events]]:
  """Returns the content of the event files by group, each group in the order of time."""
  root = _root(folder)
  by_group: dict[str, list[Events]] = collections.defaultdict(list)
  for file in files_of_run(folder):
    if _EVENT_FILE in file.name:
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
    tag: Series(*(np.concatenate([getattr(s, f) for s in all_of]) for f in _SERIES_FIELDS))
    for tag, all_of in parts.items()
  }


_SERIES_FIELDS = [field.name for field in dataclasses.fields(Series)]


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


def _saved_checkpoints(train: dict[str, Series]) -> dict[int, float]:
  """Returns the checkpoints that were saved and when, as training recorded it (T5X too)."""
  saved = train.get("timing/checkpoint_seconds")
  return dict(zip(saved.steps.tolist(), saved.times.tolist(), strict=True)) if saved else {}


def _kept_checkpoints(folder: pathlib.Path) -> dict[int, float]:
  """Returns the checkpoints in the folder and when they were last changed, in seconds since 1970."""
  kept = {}
  for entry in folder.iterdir():
    if match := _CHECKPOINT.fullmatch(entry.name):
      with contextlib.suppress(FileNotFoundError):  # A running job deletes old checkpoints.
        kept[int(match[1])] = entry.stat().st_mtime
  return kept


def _config_text(folder: pathlib.Path, by_group: dict[str, list[Events]]) -> str:
  """Returns config.gin, else the configuration in TensorBoard's text, else nothing."""
  file = folder / "config.gin"
  if file.is_file():
    return file.read_text(encoding="utf-8", errors="replace")
  texts = (e.texts.get(tag) for e in by_group.get("train", []) for tag in ("config", "gin_config"))
  return next((gin_of_markdown(found[-1].text) for found in texts if found), "")


def _read_model_info(file: pathlib.Path) -> tuple[list[Variable], int | None]:
  """Returns the arrays of model-info.txt, and the number of parameters."""
  variables, total = [], None
  text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
  for line in text.splitlines():
    if match := _VARIABLE.fullmatch(line):
      name, size, shape, partition = match.groups()
      variables.append(Variable(name, int(size), shape, partition))
    elif match := _TOTAL.fullmatch(line):
      total = int(match[1])
  return variables, total


def _read_json_lines(file: pathlib.Path, notes: list[str], limit: int | None = None) -> list[Any]:
  """Returns the objects of the first lines of a file; lines that are not JSON objects are noted."""
  rows: list[Any] = []
  if not file.is_file():
    return rows
  damaged = 0
  with file.open(encoding="utf-8", errors="replace") as lines:
    for line in lines:
      try:
        row = json.loads(line)
      except (ValueError, RecursionError):
        row = None
      if isinstance(row, dict):
        rows.append(row)
      damaged += not isinstance(row, dict)
      if len(rows) == limit:
        break
  if damaged:
    notes.append(f"{file.name}: {damaged} line(s) left out, which are not JSON objects")
  return rows


def _read_metric_files(folder: pathlib.Path, notes: list[str]) -> dict[str, dict[str, Series]]:
  """Returns the metrics of predictions in SeqIO's TASK-metrics.jsonl, as event files would have them.

  The files have no times, so all values have that of the last one.
  """
  by_group = {}
  for file in sorted(folder.glob(f"*{_METRICS}")):
    found: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for row in _read_json_lines(file, notes):
      for name, value in row.items():
        if name != "step" and not math.isnan(step := _number(row.get("step"))):
          found[f"eval/{name}"].append((step, _number(value)))
    time = file.stat().st_mtime
    by_group[f"inference_eval/{file.name.removesuffix(_METRICS)}"] = {
      tag: Series(
        np.array([step for step, _ in rows], np.int64),
        np.full(len(rows), time),
        np.array([value for _, value in rows]),
      )
      for tag, rows in found.items()
      if not all(math.isnan(value) for _, value in rows)
    }
  return by_group


def _read_samples(
  folder: pathlib.Path, notes: list[str]
) -> dict[str, dict[int, list[tuple[str, str, str]]]]:
  """Returns the first predictions of each task at each evaluation, or at some if there are many."""
  files: dict[str, dict[int, pathlib.Path]] = collections.defaultdict(dict)
  for file in sorted((folder / "inference_eval").glob("*.jsonl")):
    if match := _SAMPLES.fullmatch(file.name):
      files[match["task"]][int(match["step"])] = file
  samples = {}
  for task, by_step in files.items():
    rows = {
      step: _read_json_lines(by_step[step], notes, limit=_MAX_EXAMPLES) for step in _spread(by_step)
    }
    samples[task] = {step: [_texts_of(row) for row in found] for step, found in rows.items()}
  # Of a step that a restart has repeated, the last prediction of each input remains.
  others: dict[str, dict[int, dict[str, tuple[str, str, str]]]] = {}
  for row in _read_json_lines(folder / "samples.jsonl", notes):
    if not math.isnan(step := _number(row.get("step"))):
      texts = _texts_of(row)
      others.setdefault(str(row.get("task")), {}).setdefault(int(step), {})[texts[0]] = texts
  for task, by_input in others.items():
    shown = {step: list(by_input[step].values())[:_MAX_EXAMPLES] for step in _spread(by_input)}
    samples.setdefault(task, shown)
  return samples


def _spread(steps: Iterable[int]) -> list[int]:
  """Returns the steps in order, or some that are evenly spread if there are many."""
  steps = sorted(steps)
  shown = np.linspace(0, len(steps) - 1, min(len(steps), _MAX_EVALUATIONS)).astype(int)
  return [steps[n] for n in np.unique(shown)]


def _texts_of(row: dict[str, Any]) -> tuple[str, str, str]:
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
