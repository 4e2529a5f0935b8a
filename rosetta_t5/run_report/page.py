"""Writes the page: one HTML file with its data, its program and plotly inside."""

from __future__ import annotations

import base64
import datetime
import gzip
import html
import importlib.resources
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from rosetta_t5.run_report.decimation import decimate, without_repeated_steps
from rosetta_t5.run_report.event_files import Series
from rosetta_t5.run_report.panels import choose_panels, missing_titles
from rosetta_t5.run_report.run_folder import Run, Variable
from rosetta_t5.run_report.summary_row import COLUMNS, summary_row

_MAX_POINTS = 160_000  # of all charts together: about 3 MB of the page
_MAX_POINTS_OF_SERIES = 3000
_PROGRESS = ("timing/uptime", "loss_per_nonpadding_target_token", "loss")


def build_page(runs: Sequence[Run], refresh_seconds: float = 0) -> str:
  """Returns the page of these runs.

  Args:
    runs: at least one run.
    refresh_seconds: the interval at which the page asks its server for new data; 0 for a file.
  """
  title = "Run report: " + ", ".join(run.name for run in runs)
  parts = {
    "title": html.escape(title),
    "style": _page_file("page.css"),
    "refresh": f"{refresh_seconds:g}",
    "data": encode_data(runs),
    "plotly": _compress(_plotly_source().encode()),
    "program": _page_file("page.js"),
  }
  return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _page_file("page.html"))


def encode_data(runs: Sequence[Run]) -> str:
  """Returns everything that the page shows, as base64 of compressed JSON.

  Neither markup nor a script in a name or a text can become part of the page: base64 contains no
  `<`, and the page's program inserts all of it as text.
  """
  panels = choose_panels(runs)
  count = sum(len(tags) for run in runs for tags in run.series.values())
  max_points = min(_MAX_POINTS_OF_SERIES, max(20, _MAX_POINTS // count))
  data = {
    "created": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
    "columns": COLUMNS,
    "panels": [
      {
        "section": panel.section,
        "title": panel.title,
        "unit": panel.unit,
        "lines": [vars(line) for line in panel.lines],
      }
      for panel in panels
    ],
    "missing": missing_titles(panels),
    "runs": [_describe_run(run, max_points) for run in runs],
  }
  return _compress(json.dumps(data, allow_nan=False).encode())


def _describe_run(run: Run, max_points: int) -> dict[str, Any]:
  first_time, last_time = _first_and_last_time(run)
  return {
    "name": run.name,
    "folder": str(run.folder),
    "row": summary_row(run),
    "notes": run.notes,
    "duration": last_time - first_time,
    "tokensPerStep": _tokens_per_step(run.facts),
    "facts": _facts(run),
    "config": run.config,
    "variables": [
      [v.name, v.shape, v.size, v.partition, _placement(v, run.facts)] for v in run.variables
    ],
    "series": {
      group: {tag: _encode_series(s, first_time, max_points) for tag, s in tags.items()}
      for group, tags in run.series.items()
    },
    "timeline": _timeline(run, first_time),
    "samples": run.samples,
  }


def _first_and_last_time(run: Run) -> tuple[float, float]:
  times = [start.time for start in run.starts]
  for tags in run.series.values():
    times += [float(edge) for s in tags.values() for edge in (s.times.min(), s.times.max())]
  return min(times), max(times)


def _encode_series(series: Series, first_time: float, max_points: int) -> dict[str, Any]:
  curve = decimate(without_repeated_steps(series), max_points)
  encoded = {
    "count": int(series.steps.size),
    "points": _encode_points(curve.points, first_time),
    "nonfinite": curve.nonfinite_steps[:100].tolist(),
    "nonfiniteCount": int(curve.nonfinite_steps.size),
  }
  if curve.means is not None:
    encoded["means"] = _encode_points(curve.means, first_time)
  return encoded


def _encode_points(series: Series, first_time: float) -> dict[str, str]:
  """Returns steps, seconds since `first_time` and values as base64 of float64 and float32."""
  return {
    "steps": _base64(series.steps.astype("<f8")),
    "seconds": _base64((series.times - first_time).astype("<f4")),
    "values": _base64(series.values.astype("<f4")),
  }


def _timeline(run: Run, first_time: float) -> dict[str, Any]:
  """Returns the steps over time, and what happened when, in seconds since `first_time`."""
  train = run.series.get("train", {})
  name = max(train, key=lambda tag: (train[tag].steps.size, tag in _PROGRESS), default=None)
  restarts = [start.time for start in run.starts[1:]]
  progress = None if name is None else _with_gaps(_thin_out(train[name], 1000), restarts)
  ends = [
    {
      "seconds": start.end["time"] - first_time,
      "step": step if isinstance(step := start.end.get("step"), int) else None,
      "reason": str(start.end.get("reason")),
    }
    for start in run.starts
    if start.end
  ]
  return {
    "progress": progress and _encode_points(progress, first_time),
    "starts": [
      {"seconds": start.time - first_time, "step": start.step, "hasEnd": bool(start.end)}
      for start in run.starts
    ],
    "ends": ends,
    "checkpoints": [
      {"seconds": time - first_time, "step": step, "kept": step in run.kept_checkpoints}
      for step, time in sorted(run.checkpoints.items())
    ],
  }


def _thin_out(series: Series, max_points: int) -> Series:
  chosen = np.unique(np.linspace(0, series.steps.size - 1, max_points).astype(int))
  return Series(series.steps[chosen], series.times[chosen], series.values[chosen])


def _with_gaps(series: Series, times: Sequence[float]) -> Series:
  """Returns steps over time with a gap at each of these times."""
  at = np.searchsorted(series.times, times)
  steps = np.insert(series.steps.astype(float), at, np.nan)
  return Series(steps, np.insert(series.times, at, times), np.insert(series.values, at, np.nan))


def _facts(run: Run) -> list[tuple[str, str]]:
  """Returns what is known about model and machine, as (name, text)."""
  lines = str(run.facts.get("header", "")).splitlines()
  rows = [(name, text.strip()) for name, _, text in (line.partition(" ") for line in lines) if name]
  if run.num_parameters is not None and not rows:
    rows.append(("model", f"{run.num_parameters:,} parameters"))
  starts, kept = len(run.starts), ", ".join(f"{step:,}" for step in run.kept_checkpoints)
  rows.append(("starts", f"{starts:,}" if starts else "none recorded"))
  rows.append(("checkpoints", f"{len(run.checkpoints):,} saved; kept: {kept or 'none'}"))
  return [*rows, ("folder", str(run.folder))]


def _tokens_per_step(facts: dict[str, Any]) -> float | None:
  """Returns the positions of inputs and targets in a batch, with padding; None if unknown."""
  lengths, batch = facts.get("lengths"), facts.get("batch_size")
  if not isinstance(lengths, dict) or not isinstance(batch, int):
    return None
  shown = ("encoder_input_tokens", "decoder_target_tokens")
  per_example = sum(n for name in shown if isinstance(n := lengths.get(name), int))
  return float(batch * per_example) or None


def _placement(variable: Variable, facts: dict[str, Any]) -> str:
  """Returns over which axes of the mesh an array is split."""
  mesh = facts.get("mesh")
  sizes = mesh if isinstance(mesh, dict) else {}
  axes = re.findall(r"'([^']*)'", variable.partition)
  split = {axis: sizes.get(axis) for axis in axes if sizes.get(axis) != 1}
  if not split:
    return "a copy on every device"
  parts = " × ".join(f"{axis} ({n})" if n else axis for axis, n in split.items())
  return f"split over {parts}"


def _plotly_source() -> str:
  import plotly

  return (importlib.resources.files(plotly) / "package_data" / "plotly.min.js").read_text("utf-8")


def _page_file(name: str) -> str:
  return (importlib.resources.files(__package__) / "page_files" / name).read_text("utf-8")


def _compress(content: bytes) -> str:
  return base64.b64encode(gzip.compress(content, compresslevel=6, mtime=0)).decode()


def _base64(array: np.ndarray) -> str:
  return base64.b64encode(array.tobytes()).decode()
