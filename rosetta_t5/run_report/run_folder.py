"""Reads the files that a training run leaves in MODEL_DIR, ours or T5X's. Nothing in them is executed.

The series of TensorBoard's event files are also reduced here, to as many points as a screen can show.
"""

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
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from rosetta_t5.telemetry.event_files import Series, read_event_file

_CHECKPOINT = re.compile(r"checkpoint_(\d+)")
_VARIABLE = re.compile(r"Variable (\S+)\s+size (\d{1,18})\s+shape (\(.*\))\s+partition spec (.*)")
_TOTAL = re.compile(r"Total number of parameters: (\d{1,18})")
_PREDICTIONS = re.compile(r"(?P<task>.+)-(?P<step>\d+)\.jsonl")
# A gin binding; the further lines of its value are indented or begin with a bracket.
_BINDING = re.compile(r"^([\w./]+)\s*=\s*(.*(?:\n[ \t)\]}].*)*)", re.MULTILINE)
_MAX_EVALUATIONS = 24  # of which predictions are shown
_MAX_EXAMPLES = 12
_MAX_CHARACTERS = 1000

Texts = tuple[str, str, str]  # input, target, prediction


class Curve(NamedTuple):
  """What a chart shows of a series.

  Attributes:
    points: all finite values, or the smallest and largest of each of n equal parts, in their order.
    means: the mean of each part, at its middle; None if no value was left out.
    nonfinite_steps: the steps whose value is infinite or NaN.
  """

  points: Series
  means: Series | None
  nonfinite_steps: Int[np.ndarray, " k"]


@dataclasses.dataclass
class Run:
  """What the files of a run say.

  Attributes:
    folder: MODEL_DIR.
    name: a short name, different for each run of a report.
    series: {group: {tag: series}}; a group is a folder of event files, such as `training_eval/TASK`.
    log: the lines of run-log.jsonl that have a time; T5X writes none.
    kept_checkpoints: the steps of the checkpoints that exist.
    config: the effective configuration, {name: value} as text.
    variables: (name, shape, size, partition spec) of each array of the train state.
    num_parameters: the number of parameters; NaN if unknown.
    samples: {task: {step: [(input, target, prediction)]}}.
  """

  folder: pathlib.Path
  name: str
  series: dict[str, dict[str, Series]]
  log: list[dict[str, Any]]
  kept_checkpoints: list[int]
  config: dict[str, str]
  variables: list[tuple[str, str, int, str]]
  num_parameters: float
  samples: dict[str, dict[int, list[Texts]]]

  @property
  def setup(self) -> dict[str, Any]:
    """What the last start recorded about model, mesh and devices."""
    return next((line for line in reversed(self.log) if line.get("event") == "start"), {})

  @property
  def first_step(self) -> int:
    """The number of completed steps when the run first started; 0 if it was not recorded."""
    starts = [line["step"] for line in self.log if isinstance(line.get("step"), int)]
    return starts[0] if starts else 0

  @property
  def last_step(self) -> int:
    """The last step with metrics of training."""
    return max((int(x.steps.max()) for x in self.series.get("train", {}).values()), default=0)

  @property
  def last_time(self) -> float:
    """When the run last wrote something, in seconds since 1970."""
    times = [float(series.times.max()) for tags in self.series.values() for series in tags.values()]
    return max([*times, *(line["time"] for line in self.log)])

  @property
  def seconds_spent(self) -> float:
    """The duration of all starts of the run, without the time between them."""
    tags = [series.times for group in self.series.values() for series in group.values()]
    ends = [line["time"] for line in self.log if line.get("event") == "end"]
    times = np.unique(np.concatenate([*tags, ends]))
    starts = [line["time"] for line in self.log if line.get("event") == "start"] or [times[0]]
    parts = np.split(times, np.searchsorted(times, starts))[1:]
    return sum(float(x[-1]) - start for x, start in zip(parts, starts, strict=True) if x.size)

  @property
  def header(self) -> list[tuple[str, str]]:
    """The lines of the header that the last start printed, as (name, text)."""
    lines = (line.partition(" ") for line in str(self.setup.get("header", "")).splitlines())
    return [(name, text.strip()) for name, _, text in lines if name]


def read_runs(folders: Sequence[str]) -> list[Run]:
  """Reads runs; a folder that is given twice is read once.

  Raises:
    ValueError: a folder contains no metrics of a run.
  """
  paths = list(dict.fromkeys(pathlib.Path(os.path.realpath(folder)) for folder in folders))
  names = [path.name for path in paths]
  if len(set(names)) < len(names):
    names = [os.path.relpath(path, os.path.commonpath(paths)) for path in paths]
  return [_read_run(path, name) for path, name in zip(paths, names, strict=True)]


def _read_run(folder: pathlib.Path, name: str) -> Run:
  series = _read_series(folder)
  if not any(series.values()):
    raise ValueError(
      f"{folder} contains no metrics of a run: give a MODEL_DIR, whose folders train, training_eval and "
      "inference_eval contain TensorBoard's events.out.tfevents files"
    )
  log = _read_json_lines(folder / "run-log.jsonl")
  found = (_CHECKPOINT.fullmatch(entry) for entry in os.listdir(folder))
  info = _text_of(folder / "model-info.txt").splitlines()
  variables = [match.groups() for line in info if (match := _VARIABLE.fullmatch(line))]
  totals = [int(match[1]) for line in info if (match := _TOTAL.fullmatch(line))]
  return Run(
    folder=folder,
    name=name,
    series=series,
    log=[line for line in log if isinstance(line.get("time"), int | float)],
    kept_checkpoints=sorted(int(match[1]) for match in found if match),
    config=parse_bindings(_text_of(folder / "config.gin")),
    variables=[(name, shape, int(size), spec) for name, size, shape, spec in variables],
    num_parameters=totals[-1] if totals else math.nan,
    samples=_read_samples(folder),
  )


def _text_of(file: pathlib.Path) -> str:
  return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _read_series(folder: pathlib.Path) -> dict[str, dict[str, Series]]:
  """Returns the series by group and tag; those of several files are joined in the order of time."""
  parts: dict[str, dict[str, list[Series]]] = collections.defaultdict(dict)
  groups = (folder / name for name in ("train", "training_eval", "inference_eval"))
  for file in sorted(file for group in groups for file in group.rglob("*tfevents*")):
    status = file.stat()
    read = _read_unless_known(file, status.st_size, status.st_mtime_ns)
    for tag, series in read.items():
      parts[os.fspath(file.parent.relative_to(folder))].setdefault(tag, []).append(series)
  return {group: {tag: _join(x) for tag, x in by_tag.items()} for group, by_tag in parts.items()}


@functools.lru_cache(maxsize=256)
def _read_unless_known(path: pathlib.Path, size: int, modified: int) -> dict[str, Series]:
  """Returns the series of a file of this size and time; a page that follows a run reads only what has grown."""
  return read_event_file(path)


def _join(parts: Sequence[Series]) -> Series:
  joined = Series(*map(np.concatenate, zip(*parts, strict=True)))
  return joined.take(np.argsort(joined.times, kind="stable"))


def drop_repeated_steps(series: Series) -> Series:
  """Returns a series in the order of its steps, with the value that was written last for each.

  A run that restarts repeats the steps after its last checkpoint.
  """
  _, from_end = np.unique(series.steps[::-1], return_index=True)
  return series.take(series.steps.size - 1 - from_end)


def decimate(series: Series, max_points: int) -> Curve:
  """Reduces a series without repeated steps to about `max_points` points."""
  finite = np.isfinite(series.values)
  nonfinite_steps, series = series.steps[~finite], series.take(finite)
  count = series.steps.size
  if count <= max_points:
    return Curve(series, None, nonfinite_steps)
  per_part = -(-count // max(1, max_points // 2))
  # The last part is filled up with the last value.
  padded = np.pad(series.values, (0, -count % per_part), mode="edge").reshape(-1, per_part)
  firsts = np.arange(0, count, per_part)
  extremes = np.concatenate([padded.argmin(axis=1), padded.argmax(axis=1)])
  indices = np.minimum(extremes + np.tile(firsts, 2), count - 1)
  points = series.take(np.unique([0, *indices, count - 1]))
  sizes = np.diff(firsts, append=count)
  means = np.add.reduceat(series.values, firsts) / sizes
  middles = series.take(firsts + sizes // 2)
  return Curve(points, middles._replace(values=means), nonfinite_steps)


def _read_json_lines(file: pathlib.Path, limit: int | None = None) -> list[dict[str, Any]]:
  """Returns the objects of the first lines of a file; lines that are not JSON objects are left out."""
  if not file.is_file():
    return []
  rows: list[Any] = []
  with file.open(encoding="utf-8", errors="replace") as lines:
    for line in itertools.islice(lines, limit):
      with contextlib.suppress(ValueError):
        rows.append(json.loads(line))
  return [row for row in rows if isinstance(row, dict)]


def _read_samples(folder: pathlib.Path) -> dict[str, dict[int, list[Texts]]]:
  """Returns the first predictions of each task at its last evaluations."""
  samples: dict[str, dict[int, list[Texts]]] = collections.defaultdict(dict)
  for row in _read_json_lines(folder / "samples.jsonl"):
    if "step" in row:
      samples[str(row.get("task"))].setdefault(int(row["step"]), []).append(_example_texts(row))
  for file in sorted((folder / "inference_eval").glob("*.jsonl")):
    if match := _PREDICTIONS.fullmatch(file.name):
      texts = [*map(_example_texts, _read_json_lines(file, _MAX_EXAMPLES))]
      samples[match["task"]][int(match["step"])] = texts
  # Of a step that a restart has repeated, the last predictions remain.
  return {
    task: {step: by_step[step][-_MAX_EXAMPLES:] for step in sorted(by_step)[-_MAX_EVALUATIONS:]}
    for task, by_step in samples.items()
  }


def _example_texts(row: Mapping[str, Any]) -> Texts:
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
  return {
    name: " ".join(line.removesuffix("\\").strip() for line in value.splitlines()).strip()
    for name, value in _BINDING.findall(text)
  }
