"""The command `rosetta-t5 report`: writes a page, or serves one that follows running jobs."""

from __future__ import annotations

import argparse
import http.server
import pathlib
import sys
import threading
from collections.abc import Sequence
from typing import Any

from rosetta_t5.files import write_atomically
from rosetta_t5.run_report.page import build_page, encode_data
from rosetta_t5.run_report.run_folder import files_of_run, read_runs
from rosetta_t5.terminal import machine_path
from rosetta_t5.user_errors import ConfigError

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
  if not options.follow:
    _write(options.folders, pathlib.Path(options.out or _PAGE))
    return 0
  if options.out:
    raise ConfigError("--follow serves the page and writes no file: leave out --out")
  with ReportServer(options.folders, options.port) as server:
    print(f"{server.address}  refreshes every {REFRESH_SECONDS:g} s; Ctrl-C ends it", flush=True)
    server.serve_forever()
  return 0


def _write(folders: Sequence[str], out: pathlib.Path) -> None:
  if out.is_file() and not out.read_bytes().startswith(_BEGIN):
    raise ConfigError(f"--out {out} exists and is not a page of this command: set another file")
  runs = read_runs(folders)
  page = build_page(runs)
  out.parent.mkdir(parents=True, exist_ok=True)
  write_atomically(out, page)
  for run in runs:
    for note in run.notes:
      print(f"note: {run.name}: {note}")
  names = ", ".join(run.name for run in runs)
  print(f"{out}  {len(page) / 1e6:.1f} MB, {names}: open it in a browser; it needs no network")


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
    self._folders = folders
    self._lock = threading.Lock()
    self._state: object = None
    self._data = ""
    self._refresh_seconds = refresh_seconds
    read_runs(folders)  # Errors are reported before anything is served.
    try:
      super().__init__((_HOST, port), _Handler)
    except (OSError, OverflowError) as error:
      raise ConfigError(f"--port {port} cannot be used ({error}): give another one") from error

  @property
  def address(self) -> str:
    """The URL of the page."""
    return f"http://{_HOST}:{self.server_port}/"

  def content(self, path: str) -> tuple[str, bytes] | None:
    """Returns the type and the content of a path; None if it does not exist."""
    if path == "/":
      page = build_page(read_runs(self._folders), self._refresh_seconds)
      return "text/html; charset=utf-8", page.encode()
    return ("text/plain; charset=utf-8", self._current_data().encode()) if path == "/data" else None

  def handle_error(self, request: Any, client_address: Any) -> None:
    """Prints the traceback of an error, unless the browser has closed the connection."""
    if not isinstance(sys.exception(), ConnectionError):
      super().handle_error(request, client_address)

  def _current_data(self) -> str:
    with self._lock:
      # Before the files are read: what is written meanwhile changes the state of the next call.
      state = [
        (file, status.st_size, status.st_mtime_ns)
        for folder in self._folders
        for file in files_of_run(pathlib.Path(folder))
        for status in [file.stat()]
      ]
      if state != self._state:
        self._data = encode_data(read_runs(self._folders))
        self._state = state
      return self._data


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
    try:
      found = self.server.content(self.path.partition("?")[0])
    except (ValueError, OSError) as error:
      self.send_error(500, explain=str(error))  # A status line cannot contain all characters.
      return
    if found is None:
      self.send_error(404)
      return
    kind, content = found
    self.send_response(200)
    self.send_header("Content-Type", kind)
    self.send_header("Content-Length", str(len(content)))
    self.send_header("Cache-Control", "no-store")
    self.end_headers()
    self.wfile.write(content)

  def log_message(self, format: str, *args: object) -> None:
    """Prints nothing: the page asks every few seconds."""
