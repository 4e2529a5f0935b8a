"""The command `rosetta-t5 report`: a page, or a page that follows running jobs."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

from rosetta_t5.files import write_atomically
from rosetta_t5.run_report.page import build_page
from rosetta_t5.run_report.run_folder import read_runs
from rosetta_t5.terminal import machine_path
from rosetta_t5.user_errors import ConfigError

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
  if options.follow:
    if options.out:
      raise ConfigError("--follow serves the page and writes no file: leave out --out")
    from rosetta_t5.run_report.page_server import serve

    serve(options.folders, options.port)
  else:
    _write(options.folders, pathlib.Path(options.out or _PAGE))
  return 0


def _write(folders: Sequence[str], out: pathlib.Path) -> None:
  if out.is_dir():
    raise ConfigError(f"--out {out} is a folder: give the name of a file, such as {out / _PAGE}")
  if out.is_file() and not out.read_bytes().startswith(_BEGIN):
    raise ConfigError(f"--out {out} exists and is not a page of this command: set another file")
  runs = read_runs(folders)
  page = build_page(runs)
  try:
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page)
  except OSError as error:
    raise ConfigError(f"--out {out} cannot be written: {error.strerror}") from error
  for run in runs:
    for note in run.notes:
      print(f"note: {run.name}: {note}")
  names = ", ".join(run.name for run in runs)
  print(f"{out}  {len(page) / 1e6:.1f} MB, {names}: open it in a browser; it needs no network")
