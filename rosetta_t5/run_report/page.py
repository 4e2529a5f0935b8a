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

from rosetta_t5.run_report.contents import COLUMNS, choose_panels, missing_titles, summary_row
from rosetta_t5.run_report.run_folder import Run
from rosetta_t5.run_report.series import Series, decimate, without_repeated_steps

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
      panel._asdict() | {"lines": [line._asdict() for line in panel.lines]} for panel in panels
    ],
    "missing": missing_titles(panels),
    "runs": [_describe_run(run, max_points) for run in runs],
  }
  return _compress(json.dumps(data, allow_nan=False).encode())


def _describe_run(run: Run, max_points: int) -> dict[str, Any]:
  all_series = [series for tags in run.series.values() for series in tags.values()]
  times = [*(start.time for start in run.starts), *(float(s.times.min()) for s in all_series)]
  first_time, last_time = min(times), max(float(series.times.max()) for series in all_series)
  return {
    "name": run.name,
    "folder": str(run.folder),
    "row": summary_row(run),
    "notes": run.notes,
    "duration": last_time - first_time,
    "tokensPerStep": _tokens_per_step(run),
    "about": _about(run),
    "config": run.config,
    "variables": [
      [v.name, v.shape, v.size, v.partition, _placement(v.partition, run)] for v in run.variables
    ],
    "series": {
      group: {tag: _encode_series(s, first_time, max_points) for tag, s in tags.items()}
      for group, tags in run.series.items()
    },
    "timeline": _timeline(run, first_time),
    "samples": run.samples,
  }


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
  ends = [start.end for start in run.starts if start.end]
  return {
    "progress": _progress(run, first_time),
    "starts": [
      {"seconds": start.time - first_time, "step": start.step, "hasEnd": bool(start.end)}
      for start in run.starts
    ],
    "ends": [
      {"seconds": end["time"] - first_time, "step": end.get("step"), "reason": end.get("reason")}
      for end in ends
    ],
    "checkpoints": [
      {"seconds": time - first_time, "step": step, "kept": step in run.kept_checkpoints}
      for step, time in sorted(run.checkpoints.items())
    ],
  }


def _progress(run: Run, first_time: float) -> dict[str, str] | None:
  """Returns the steps over time with a gap at each restart; None if no metrics of training were written."""
  train = run.series.get("train", {})
  name = max(train, key=lambda tag: (train[tag].steps.size, tag in _PROGRESS), default=None)
  if name is None:
    return None
  chosen = np.unique(np.linspace(0, train[name].steps.size - 1, 1000).astype(int))
  steps, times, values = train[name].take(chosen)
  restarts = [start.time for start in run.starts[1:]]
  at = np.searchsorted(times, restarts)
  with_gaps = Series(
    np.insert(steps.astype(float), at, np.nan),
    np.insert(times, at, restarts),
    np.insert(values, at, np.nan),
  )
  return _encode_points(with_gaps, first_time)


def _about(run: Run) -> list[tuple[str, str]]:
  """Returns what is known about model and machine, as (name, text)."""
  lines = str(run.setup.get("header", "")).splitlines()
  rows = [(name, text.strip()) for name, _, text in (line.partition(" ") for line in lines) if name]
  if run.num_parameters is not None and not rows:
    rows.append(("model", f"{run.num_parameters:,} parameters"))
  starts, kept = len(run.starts), ", ".join(f"{step:,}" for step in run.kept_checkpoints)
  rows.append(("starts", f"{starts:,}" if starts else "none recorded"))
  rows.append(("checkpoints", f"{len(run.checkpoints):,} saved; kept: {kept or 'none'}"))
  return [*rows, ("folder", str(run.folder))]


def _tokens_per_step(run: Run) -> float | None:
  """Returns the positions of inputs and targets in a batch, with padding; None if unknown."""
  lengths = run.setup.get("lengths", {})
  features = ("encoder_input_tokens", "decoder_target_tokens")
  per_example = sum(lengths.get(name, 0) for name in features)
  return float(run.setup.get("batch_size", 0) * per_example) or None


def _placement(partition: str, run: Run) -> str:
  """Returns over which axes of the mesh an array with this partition spec is split."""
  sizes = run.setup.get("mesh", {})
  axes = [axis for axis in re.findall(r"'([^']*)'", partition) if sizes.get(axis) != 1]
  parts = " × ".join(f"{axis} ({sizes[axis]})" if axis in sizes else axis for axis in axes)
  return f"split over {parts}" if parts else "a copy on every device"


def _plotly_source() -> str:
  import plotly

  return (importlib.resources.files(plotly) / "package_data" / "plotly.min.js").read_text("utf-8")


def _page_file(name: str) -> str:
  return (importlib.resources.files(__package__) / "page_files" / name).read_text("utf-8")


def _compress(content: bytes) -> str:
  return base64.b64encode(gzip.compress(content, compresslevel=6, mtime=0)).decode()


def _base64(array: np.ndarray) -> str:
  return base64.b64encode(array.tobytes()).decode()
