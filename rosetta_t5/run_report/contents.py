"""What a report shows: the charts of metrics, and the row of each run in the table of results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rosetta_t5.run_report.run_folder import Run, Series, drop_repeated_steps
from rosetta_t5.terminal import format_duration

UNKNOWN = "–"
_SECONDS_PER_DAY = 86400.0
TRAINING, EVALUATION, OTHER = "Training", "Evaluation", "Other metrics"


Metrics = set[tuple[str, str]]  # the group and the tag of each metric that a run has recorded


class Line(NamedTuple):
  """A metric in a chart, of every run that has it.

  Attributes:
    group: the folder of event files, such as `training_eval/TASK`.
    tag: the name of the metric.
    label: what distinguishes the lines of one chart; "" if it has only one.
    factor: converts the metric to the chart's unit.
  """

  group: str
  tag: str
  label: str = ""
  factor: float = 1.0


class Panel(NamedTuple):
  """A chart.

  Attributes:
    section: the heading under which it stands.
    title: what it shows.
    unit: the unit of its values; "" if they have none.
    lines: its metrics, the main one first.
  """

  section: str
  title: str
  unit: str
  lines: tuple[Line, ...]


# Title → (tag, unit, factor), of which a run shows the first that it has.
_TRAINING = {
  "Loss": [
    ("loss_per_nonpadding_target_token", "nats per target token", 1),
    ("loss_per_all_target_tokens", "nats per position, with padding", 1),
    ("loss", "nats per batch", 1),
  ],
  "Cross-entropy": [
    ("cross_ent_loss_per_all_target_tokens", "nats per position, with padding", 1),
    ("cross_ent_loss", "nats per batch", 1),
  ],
  "z-loss": [
    ("z_loss_per_all_target_tokens", "nats per position, with padding", 1),
    ("z_loss", "nats per batch", 1),
  ],
  "Accuracy": [("accuracy", "% of target tokens", 100)],
  "Learning rate": [("learning_rate/current", "", 1), ("learning_rate", "", 1)],
  "Gradient norm": [("weight_gradient_norm", "L2 norm", 1)],
  "Throughput": [("timing/seqs_per_second", "sequences per second", 1)],
  "Model FLOPs utilization": [("timing/model_flops_utilization", "% of the devices’ peak", 100)],
  "Wait for data": [("timing/feed_wait_seconds", "ms per step", 1000)],
  "Peak memory": [
    ("memory/device_peak_gib", "GiB per device", 1),
    ("memory/host_peak_gib", "GiB of the first process", 1),
  ],
}
_EVALUATED = ("Loss", "Accuracy")  # what evaluations on held-out data show in the same units


def choose_panels(runs: Sequence[Run]) -> list[Panel]:
  """Returns the charts for these runs, and one for each further metric."""
  recorded = {(group, tag) for run in runs for group, tags in run.series.items() for tag in tags}
  panels = [*_training_panels(recorded), *_evaluation_panels(recorded)]
  shown = {(line.group, line.tag) for panel in panels for line in panel.lines}
  others = sorted(recorded - shown, key=lambda key: (key[0] != "train", key))
  return panels + [Panel(OTHER, tag, group, (Line(group, tag),)) for group, tag in others]


def _training_panels(recorded: Metrics) -> Iterator[Panel]:
  held_out = _groups(recorded, "training_eval")
  for title, choices in _TRAINING.items():
    for tag, unit, factor in [c for c in choices if ("train", c[0]) in recorded][:1]:
      lines = [Line("train", tag, factor=factor)]
      # With several tasks the chart would be hard to read; each has a line in its own chart below.
      if title in _EVALUATED and len(held_out) == 1 and (held_out[0], tag) in recorded:
        lines = [lines[0]._replace(label="training"), Line(held_out[0], tag, "held-out", factor)]
      yield Panel(TRAINING, title, unit, tuple(lines))


def _evaluation_panels(recorded: Metrics) -> Iterator[Panel]:
  held_out = _groups(recorded, "training_eval")
  for title in _EVALUATED:
    for tag, unit, factor in _TRAINING[title]:
      groups = [group for group in held_out if (group, tag) in recorded]
      if groups:
        lines = tuple(Line(group, tag, _task(group), factor) for group in groups)
        yield Panel(EVALUATION, f"{title} on held-out data", unit, lines)
        break
  for group, tag in sorted(recorded):
    if group.startswith("inference_eval/"):
      title = f"{_task(group)}: {tag.removeprefix('eval/')}"
      yield Panel(EVALUATION, title, "", (Line(group, tag),))


def _groups(recorded: Metrics, parent: str) -> list[str]:
  return sorted({group for group, _ in recorded if group.startswith(f"{parent}/")})


def _task(group: str) -> str:
  return group.partition("/")[2]


def summary_row(run: Run) -> dict[str, str]:
  """Returns a run's row in the table of NVIDIA's T5X, by column; UNKNOWN where its files do not say."""
  setup, mesh, computes = run.setup, run.setup.get("mesh"), dict(run.header).get("computes", "")
  # T5X records no setup, but both rates, whose ratio is the number of devices.
  speed = _median(run, "timing/seqs_per_second")
  devices = _positive(setup.get("devices"))
  if math.isnan(devices):
    devices = np.round(speed / _median(run, "timing/seqs_per_second_per_core"))
  batch = _positive(setup.get("batch_size", run.config.get("BATCH_SIZE")))
  steps = _positive(setup.get("total_steps", run.config.get("TRAIN_STEPS")))
  days = steps * batch / speed / _SECONDS_PER_DAY
  fp8 = " + fp8" if "; fp8 " in computes and "; fp8 off" not in computes else ""
  return {
    "Run": run.name,
    "Size": _format(run.num_parameters / 1e6, ",.4g", "\N{NO-BREAK SPACE}M"),
    "GPU": str(setup.get("device") or UNKNOWN).removeprefix("NVIDIA "),
    "Precision": (computes.partition(";")[0] or UNKNOWN) + fp8,
    "#GPUs": _format(devices, ",.0f"),
    "TP": _format(_positive(mesh.get("model") if isinstance(mesh, dict) else None), ".0f"),
    "BS / GPU": _format(batch / devices, ",.4g"),
    "Sequences/s": _format(speed, ",.4g"),
    "Seq/s/GPU": _format(speed / devices, ",.4g"),
    "Est. walltime": format_duration(days * _SECONDS_PER_DAY) if math.isfinite(days) else UNKNOWN,
    "GPU-days": _format(days * devices, ",.3g"),
    "MNLI (acc.)": _score(run, "mnli", ("accuracy",)),
    "SQuAD v1.1 (EM / F1)": _score(run, "squad", ("em", "f1")),
  }


def _median(run: Run, tag: str) -> float:
  """Returns the median of a metric of training; NaN if it was not measured.

  The first value, which includes the start, is left out if there are others.
  """
  series = run.series.get("train", {}).get(tag)
  values = series.values[np.isfinite(series.values) & (series.values > 0)] if series else ()
  return float(np.median(values[1:] if len(values) > 1 else values)) if len(values) else math.nan


def _score(run: Run, task: str, metrics: tuple[str, ...]) -> str:
  """Returns the last metrics of the first task whose name contains `task`."""
  for group, series in sorted(run.series.items()):
    if group.startswith("inference_eval/") and task in group.lower():
      by_name = {tag.removeprefix("eval/"): one for tag, one in series.items()}
      if all(name in by_name for name in metrics):
        return " / ".join(_last(by_name[name]) for name in metrics)
  return UNKNOWN


def _last(series: Series) -> str:
  """Returns the last value of a rate in percent."""
  values = drop_repeated_steps(series).values
  # SeqIO's accuracies are fractions or percentages, depending on the task.
  factor = 100 if (values <= 1).all() else 1
  return f"{factor * values[-1]:.2f}"


def _positive(value: Any) -> float:
  """Returns a positive number, which may be a text; NaN for anything else."""
  try:
    number = float(value)
  except (TypeError, ValueError, OverflowError):
    return math.nan
  return number if 0 < number < 1e18 else math.nan


def _format(value: float, spec: str, unit: str = "") -> str:
  return format(value, spec) + unit if math.isfinite(value) else UNKNOWN
