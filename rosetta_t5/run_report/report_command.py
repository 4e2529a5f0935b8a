"""The command `rosetta-t5 report`: writes a page, or serves one that follows running jobs.

The page is one HTML file with its data, its program and plotly inside.
"""

import argparse
import base64
import contextlib
import datetime
import gzip
import html
import http.server
import importlib.resources
import json
import pathlib
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from rosetta_t5.files import write_atomically
from rosetta_t5.run_report.contents import UNKNOWN, choose_panels, summarize, summary_row
from rosetta_t5.run_report.run_folder import Run, decimate, drop_repeated_steps, read_runs
from rosetta_t5.telemetry.event_files import Series
from rosetta_t5.terminal import machine_path
from rosetta_t5.user_errors import ConfigError

_MAX_POINTS = 160_000  # of all charts together: about 3 MB of the page
_MAX_POINTS_OF_SERIES = 3000
REFRESH_SECONDS = 5.0
_HOST = "127.0.0.1"
_PAGE = "report.html"
_BEGIN = b"<!DOCTYPE html>"  # how a page begins; a file that begins otherwise is not replaced


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 report`."""
  add = parser.add_argument
  add("folders", nargs="+", metavar="MODEL_DIR", help="the folder of a run")
  add("--out", type=machine_path, metavar="FILE", help=f"the page (default: {_PAGE})")
  add("--follow", action="store_true", help="serve the page on this machine and keep it up to date")
  add("--port", type=int, default=6010, help="the port of --follow (default: %(default)s)")
  parser.set_defaults(run=report_runs)


def report_runs(options: argparse.Namespace) -> int:
  """Writes the page, or serves it; returns the exit status."""
  out = pathlib.Path(options.out or _PAGE)
  if options.follow:
    if options.out:
      raise ConfigError("--follow serves the page and writes no file: leave out --out")
    with ReportServer(options.folders, options.port) as server:
      print(f"{server.address}  refreshes every {REFRESH_SECONDS:g} s; Ctrl-C ends it", flush=True)
      server.serve_forever()
    return 0
  if out.is_file() and not out.read_bytes().startswith(_BEGIN):
    raise ConfigError(f"--out {out} exists and is not a page of this command: set another file")
  runs = read_runs(options.folders)
  page = build_page(runs)
  out.parent.mkdir(parents=True, exist_ok=True)
  write_atomically(out, page)
  names = ", ".join(run.name for run in runs)
  print(f"{out}  {len(page) / 1e6:.1f} MB, {names}: open it in a browser; it needs no network")
  return 0


class ReportServer(http.server.ThreadingHTTPServer):
  """Answers `/` with the page and `/data` with its current data, to this machine only."""

  daemon_threads = True

  def __init__(self, folders: Sequence[str], port: int, refresh_seconds: float = REFRESH_SECONDS):
    """Builds a server, which answers once `serve_forever` runs.

    Args:
      folders: the MODEL_DIR of each run.
      port: the port; 0 for any that is free.
      refresh_seconds: how often the page asks for new data.

    Raises:
      ValueError: a folder contains no run, or the port is in use.
    """
    self.folders = folders
    self.refresh_seconds = refresh_seconds
    read_runs(folders)  # Errors are reported before anything is served.
    try:
      super().__init__((_HOST, port), _Handler)
    except (OSError, OverflowError) as error:
      raise ConfigError(f"--port {port} cannot be used ({error}): give another one") from error

  @property
  def address(self) -> str:
    """The URL of the page."""
    return f"http://{_HOST}:{self.server_port}/"


class _Handler(http.server.BaseHTTPRequestHandler):
  server: ReportServer
  error_content_type = "text/plain; charset=utf-8"  # The page shows an error's text.
  error_message_format = "%(message)s: %(explain)s"

  def do_GET(self) -> None:
    """Answers a request."""
    # A web site that resolves its own name to this machine must not read the report.
    if self.headers.get("Host", "").partition(":")[0] not in (_HOST, "localhost"):
      self.send_error(403, "this report is only for this machine")
      return
    path = self.path.partition("?")[0]
    if path not in ("/", "/data"):
      self.send_error(404)
      return
    try:
      runs = read_runs(self.server.folders)
      text = build_page(runs, self.server.refresh_seconds) if path == "/" else encode_data(runs)
    except (ValueError, OSError) as error:
      self.send_error(500, explain=str(error))  # A status line cannot contain all characters.
      return
    content = text.encode()
    self.send_response(200)
    self.send_header("Content-Type", f"text/{'html' if path == '/' else 'plain'}; charset=utf-8")
    self.send_header("Content-Length", str(len(content)))
    self.send_header("Cache-Control", "no-store")
    with contextlib.suppress(ConnectionError):  # The browser does not wait for it.
      self.end_headers()
      self.wfile.write(content)

  def log_message(self, format: str, *args: object) -> None:
    """Prints nothing: the page asks every few seconds."""


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
    "plotly": _compress(_page_file("plotly.min.js", "plotly.package_data").encode()),
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
  rows = [summary_row(run) for run in runs]
  columns = [name for name in rows[0] if any(row[name] != UNKNOWN for row in rows)]
  data = {
    "created": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
    "columns": columns,
    "panels": [
      panel._asdict() | {"lines": [line._asdict() for line in panel.lines]} for panel in panels
    ],
    "runs": [
      _describe_run(run, max_points) | {"row": [row[name] for name in columns]}
      for run, row in zip(runs, rows, strict=True)
    ],
  }
  return _compress(json.dumps(data, allow_nan=False).encode())


def _describe_run(run: Run, max_points: int) -> dict[str, Any]:
  all_series = [series for tags in run.series.values() for series in tags.values()]
  times = [*(line["time"] for line in run.log), *(float(s.times.min()) for s in all_series)]
  first_time = min(times)
  # The positions of inputs and targets in a batch, with padding.
  lengths = run.setup.get("lengths", {})
  features = ("encoder_input_tokens", "decoder_target_tokens")
  positions = run.setup.get("batch_size", 0) * sum(lengths.get(name, 0) for name in features)
  kept = ", ".join(f"{step:,}" for step in run.kept_checkpoints) or "none"
  return {
    "name": run.name,
    "folder": str(run.folder),
    **summarize(run, time.time()),
    "duration": run.last_time - first_time,
    "tokensPerStep": positions or None,
    "about": [*run.header, ("checkpoints", f"kept: {kept}"), ("folder", str(run.folder))],
    "config": run.config,
    "variables": run.variables,
    "series": {
      group: {tag: _encode_series(s, first_time, max_points) for tag, s in tags.items()}
      for group, tags in run.series.items()
    },
    "timeline": _timeline(run, first_time),
    "samples": run.samples,
  }


def _encode_series(series: Series, first_time: float, max_points: int) -> dict[str, Any]:
  curve = decimate(drop_repeated_steps(series), max_points)
  return {
    "count": int(series.steps.size),
    "points": _encode_points(curve.points, first_time),
    "nonfinite": curve.nonfinite_steps[:100].tolist(),
    "nonfiniteCount": int(curve.nonfinite_steps.size),
    "means": curve.means and _encode_points(curve.means, first_time),
  }


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
  saved = train.get("timing/checkpoint_seconds", Series(*[np.array([])] * 3))
  longest = max(train.values(), key=lambda series: series.steps.size, default=None)
  return {
    "progress": longest and _encode_points(decimate(longest, 1000).points, first_time),
    "log": [
      {"kind": line["event"], "seconds": line["time"] - first_time, "step": line.get("step")}
      | {"reason": line.get("reason")}
      for line in run.log
      if line.get("event") in ("start", "end")
    ],
    "checkpoints": [
      {"seconds": time - first_time, "step": step, "kept": step in run.kept_checkpoints}
      for step, time in zip(saved.steps.tolist(), saved.times.tolist(), strict=True)
    ],
  }


def _page_file(name: str, package: str = f"{__package__}.page_files") -> str:
  return (importlib.resources.files(package) / name).read_text("utf-8")


def _compress(content: bytes) -> str:
  return base64.b64encode(gzip.compress(content, compresslevel=6, mtime=0)).decode()


def _base64(array: np.ndarray) -> str:
  return base64.b64encode(array.tobytes()).decode()
