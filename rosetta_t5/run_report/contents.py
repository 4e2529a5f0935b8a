"""What a report shows of each run: a summary, a row in the table of runs, and the charts of metrics."""

import ast
import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rosetta_t5.run_report.run_folder import Run, drop_repeated_steps
from rosetta_t5.telemetry.event_files import Series
from rosetta_t5.terminal import format_duration, format_number

UNKNOWN = "–"
_SECONDS_PER_DAY = 86400.0
_SILENT_SECONDS = 1800.0  # A run that has written nothing for so long is no longer training.
_FALLS = re.compile(r"loss|perplexity|error|\b[wct]er\b|edit")  # metrics that are better when lower
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
_PER_POSITION = "_per_all_target_tokens"
_LOSS_PARTS = {"cross_ent_loss": "cross-entropy", "z_loss": "z-loss"}
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
      measured = [group for group in held_out if (group, tag) in recorded]
      # With more tasks the chart would be hard to read; each has a line in its own chart below.
      if title in _EVALUATED and len(measured) in (1, 2):
        labels = [_task(group) for group in measured] if len(measured) > 1 else ["held-out"]
        pairs = zip(measured, labels, strict=True)
        lines = [lines[0]._replace(label="training")]
        lines += [Line(group, tag, label, factor) for group, label in pairs]
      yield Panel(TRAINING, title, unit, tuple(lines))
    if title == "Loss":
      yield from _loss_parts(recorded)


def _loss_parts(recorded: Metrics) -> Iterator[Panel]:
  for ending, unit in ((_PER_POSITION, "nats per position, with padding"), ("", "nats per batch")):
    labels = {part + ending: label for part, label in _LOSS_PARTS.items()}
    lines = tuple(Line("train", tag, labels[tag]) for tag in labels if ("train", tag) in recorded)
    if lines:
      yield Panel(TRAINING, "Parts of the loss", unit, lines)
      return


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
  """Returns the run's row of the table of runs, as {column: text}.

  The columns are tags, notes, and those of the tables in NVIDIA's T5X: model size, GPUs, speed, estimated time and
  scores. What the run did not record is UNKNOWN.
  """
  setup, mesh, computes = run.setup, run.setup.get("mesh"), dict(run.header).get("computes", "")
  # T5X records no setup, but both rates, whose ratio is the number of devices.
  speed = _median(run, "timing/seqs_per_second")
  devices = _positive(setup.get("devices"))
  if math.isnan(devices):
    devices = np.round(speed / _median(run, "timing/seqs_per_second_per_core"))
  batch = _positive(setup.get("batch_size", run.config.get("BATCH_SIZE")))
  days = (_total_steps(run) - run.first_step) * batch / speed / _SECONDS_PER_DAY
  fp8 = " + fp8" if "; fp8 " in computes and "; fp8 off" not in computes else ""
  row = {
    "Run": run.name,
    "Size": _number(run.num_parameters / 1e6, unit="\N{NO-BREAK SPACE}M"),
    "GPU": str(setup.get("device") or UNKNOWN).removeprefix("NVIDIA "),
    "Precision": (computes.partition(";")[0] or UNKNOWN) + fp8,
    "#GPUs": _number(devices),
    "TP": _number(_positive(mesh.get("model") if isinstance(mesh, dict) else None)),
    "BS / GPU": _number(batch / devices),
    "Sequences/s": _number(speed),
    "Seq/s/GPU": _number(speed / devices),
    "Est. walltime": format_duration(days * _SECONDS_PER_DAY) if math.isfinite(days) else UNKNOWN,
    "GPU-days": _number(days * devices, 3),
    "MNLI (acc.)": _score(run, "mnli", ("accuracy",)),
    "SQuAD v1.1 (EM / F1)": _score(run, "squad", ("em", "f1")),
    "Tags": ", ".join(_macro_texts(run, "TAGS")) or UNKNOWN,
    "Notes": " ".join(_macro_texts(run, "NOTES")) or UNKNOWN,
  }
  if setup.get("device") == "cpu":
    row |= dict.fromkeys([name for name in row if name == "TP" or "GPU" in name], UNKNOWN)
  return row


def summarize(run: Run, now: float) -> dict[str, Any]:
  """Returns a `sentence` about a run, and four `numbers` as (name, value, explanation).

  Args:
    run: the run.
    now: the time, in seconds since 1970; a run that wrote something recently is still training.
  """
  total, last = _total_steps(run), run.last_step
  state, spent = _state(run, now), format_duration(run.seconds_spent)
  progress = f"step {last:,}" + (f" of {total:,.0f}" if math.isfinite(total) else "")
  seconds_left = (total - last) / _median(run, "timing/steps_per_second")
  left = f"about {format_duration(seconds_left)} left" if math.isfinite(seconds_left) else ""
  clause, evaluation = _evaluation(run)
  speed, per_device = (_median(run, f"timing/seqs_per_second{of}") for of in ("", "_per_core"))
  of_each = _number(per_device, unit=" per device") if per_device != speed else ""
  return {
    "sentence": f"{state} at {progress} after {spent}{clause}.",
    "numbers": [
      ("State", state, progress),
      evaluation,
      ("Time spent", spent, "nothing is left" if last >= total else left),
      ("Sequences per second", _number(speed), of_each),
    ],
  }


def _state(run: Run, now: float) -> str:
  last = run.log[-1] if run.log else {}
  if last.get("event") == "end":
    return str(last.get("reason", "ended")).capitalize()
  if run.last_step >= _total_steps(run):
    return "Finished"
  return "Training" if now - run.last_time < _SILENT_SECONDS else "Ended without a record"


def _evaluation(run: Run) -> tuple[str, tuple[str, str, str]]:
  """Returns the first metric of the run's own task: a clause about its best value, and its row of "numbers"."""
  for group, tag in _evaluated_metrics(run):
    series = drop_repeated_steps(run.series[group][tag])
    series = series.take(np.isfinite(series.values))
    if series.values.size:
      best = (series.values.argmin if _FALLS.search(tag) else series.values.argmax)()
      value, last = (format_number(float(series.values[n])) for n in (int(best), -1))
      is_loss = group.startswith("training_eval/")
      name = f"{'held-out loss' if is_loss else tag.removeprefix('eval/')} of {_task(group)}"
      clause = f"; {name} was best at step {int(series.steps[best]):,}"
      return clause, (name, value, f"best; the last is {last}")
  return "", ("Evaluation", UNKNOWN, "none yet")


def _evaluated_metrics(run: Run) -> Iterator[tuple[str, str]]:
  """Yields (group, tag): metrics of predictions before held-out losses, and the run's task before others."""
  task = run.config.get("MIXTURE_OR_TASK_NAME", "").strip("'\"")
  losses = [tag for tag, *_ in _TRAINING["Loss"]]
  for parent in ("inference_eval/", "training_eval/"):
    groups = [group for group in run.series if group.startswith(parent)]
    for group in sorted(groups, key=lambda group: (_task(group) != task, group)):
      tags = run.series[group]
      names = tags if parent == "inference_eval/" else losses
      yield from ((group, tag) for tag in names if tag in tags)


def _total_steps(run: Run) -> float:
  return _positive(run.setup.get("total_steps", run.config.get("TRAIN_STEPS")))


def _macro_texts(run: Run, macro: str) -> list[str]:
  """Returns the text or the texts to which the configuration binds a macro; [] for anything else."""
  # All that literal_eval raises: a gin file may contain anything.
  with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
    value = ast.literal_eval(run.config.get(macro, "()"))
    return [value] if isinstance(value, str) else [str(text) for text in value]
  return []


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


def _number(value: float, digits: int = 4, unit: str = "") -> str:
  return format_number(value, digits) + unit if math.isfinite(value) else UNKNOWN
