"""The row of a run in the table of results: size, devices, speed, time and scores."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rosetta_t5.run_report.decimation import without_repeated_steps
from rosetta_t5.run_report.event_files import Series
from rosetta_t5.run_report.gin_text import value_of
from rosetta_t5.run_report.run_folder import Run

UNKNOWN = "–"
_SECONDS_PER_DAY = 86400.0
# As in the README of NVIDIA's T5X.
COLUMNS = (
  "Run",
  "Size",
  "GPU",
  "Precision",
  "#GPUs",
  "TP",
  "BS / GPU",
  "Sequences/s",
  "Seq/s/GPU",
  "Est. walltime",
  "GPU-days",
  "MNLI (acc.)",
  "SQuAD v1.1 (EM / F1)",
)


def summary_row(run: Run) -> list[str]:
  """Returns the cells of COLUMNS for a run; UNKNOWN where its files do not say."""
  devices = count_devices(run)
  batch = _positive(run.facts.get("batch_size") or value_of(run.config, "BATCH_SIZE", "batch_size"))
  steps = _positive(run.facts.get("total_steps") or value_of(run.config, "TRAIN_STEPS"))
  speed = _median(run, "timing/seqs_per_second")
  days = steps * batch / speed / _SECONDS_PER_DAY
  return [
    run.name,
    _format_size(run.num_parameters),
    str(run.facts.get("device") or UNKNOWN).removeprefix("NVIDIA "),
    _precision(run),
    _format(devices, ",.0f"),
    _format(_tensor_parallelism(run), ".0f"),
    _format(batch / devices, ",.4g"),
    _format(speed, ",.4g"),
    _format(speed / devices, ",.4g"),
    _format_days(days),
    _format(days * devices, ",.3g"),
    _score(run, "mnli", ("accuracy",)),
    _score(run, "squad", ("em", "f1")),
  ]


def count_devices(run: Run) -> float:
  """Returns the number of devices; NaN if unknown."""
  recorded = _positive(run.facts.get("devices"))
  if not math.isnan(recorded):
    return recorded
  # T5X writes both rates, and their ratio is the number of devices.
  per_device = _median(run, "timing/seqs_per_second_per_core")
  ratio = _median(run, "timing/seqs_per_second") / per_device
  return ratio if math.isnan(ratio) else round(ratio)


def _tensor_parallelism(run: Run) -> float:
  mesh = run.facts.get("mesh")
  if isinstance(mesh, dict) and "model" in mesh:
    return _positive(mesh["model"])
  return _positive(value_of(run.config, "num_partitions", "NUM_PARTITIONS"))


def _precision(run: Run) -> str:
  dtype = value_of(run.config, "T5Config.dtype", "TransformerConfig.dtype", "dtype", "DTYPE")
  computes = str(run.facts.get("computes", ""))
  fp8 = " + fp8" if "; fp8 " in computes and "; fp8 off" not in computes else ""
  name = computes.partition(";")[0] or (dtype if isinstance(dtype, str) else UNKNOWN)
  return {"bfloat16": "bf16", "float32": "fp32"}.get(name, name) + fp8


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
  values = without_repeated_steps(series).values
  # SeqIO's accuracies are fractions or percentages, depending on the task.
  factor = 100 if (values <= 1).all() else 1
  return f"{factor * values[-1]:.2f}"


def _positive(value: Any) -> float:
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  return float(value) if is_number and 0 < value < 1e18 else math.nan


def _format(value: float, spec: str) -> str:
  return format(value, spec) if math.isfinite(value) else UNKNOWN


def _format_size(count: int | None) -> str:
  if count is None:
    return UNKNOWN
  for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
    if count >= unit:
      return f"{count / unit:.3g}\N{NO-BREAK SPACE}{name}"
  return str(count)


def _format_days(days: float) -> str:
  if math.isnan(days):
    return UNKNOWN
  for unit, name in ((1.0, "days"), (1 / 24, "h"), (1 / 1440, "min")):
    if days >= unit:
      return f"{days / unit:,.3g} {name}"
  return f"{days * _SECONDS_PER_DAY:.3g} s"
