"""`rosetta-t5 prepare`: text files become tokenised, indexed shards."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rosetta_t5.data.prepared.prepare import prepare, statistics
from rosetta_t5.data.reading import Layout
from rosetta_t5.data.reading.file_formats import FORMATS, TEXT_UNITS


def main(argv: Sequence[str]) -> int:
  """Runs the verb. A second call goes on with what a killed one left."""
  parser = _parser()
  arguments = parser.parse_args(argv)
  started = time.monotonic()
  try:
    with _executor(arguments.dask) as executor, _progress_bar() as progress:
      manifest = prepare(
        arguments.input,
        arguments.vocab,
        arguments.out,
        text=arguments.text_key,
        validation_percent=arguments.validation_percent,
        append_end=arguments.append_eos,
        layout=Layout(
          arguments.format, tuple(arguments.columns or ()) or None, arguments.text_unit
        ),
        on_bad_example=arguments.on_bad_example,
        workers=arguments.workers,
        executor=executor,
        progress=progress,
      )
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print("Stopped. The same command goes on from the shards that are done.", file=sys.stderr)
    return 130
  print(f"{arguments.out}, in {time.monotonic() - started:.1f} s:")
  print("\n".join(statistics(manifest)))
  print("In a gin file:\n  from rosetta_t5 import data\n  data.prepared_task.folders = "
        f"'{os.path.abspath(arguments.out)}'\n  MIXTURE_OR_TASK_NAME = @data.prepared_task()")  # fmt: skip
  return 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser("rosetta-t5 prepare", description=__doc__)
  add = parser.add_argument
  add("--input", nargs="+", required=True, metavar="GLOB", help="files or folders of text")
  add("--vocab", required=True, metavar="MODEL", help="a SentencePiece model")
  add("--out", required=True, metavar="DIR")
  add("--text-key", default="text", help="column, or a template such as '{title} {body}'")
  add("--workers", type=int, help="processes; by default one a core")
  add("--validation-percent", type=float, default=1.0)
  add("--append-eos", action="store_true", help="an end token after each document (causal LM)")
  add("--format", choices=sorted(set(FORMATS.values())))
  add("--columns", nargs="+", help="names of csv or tsv columns that have none")
  add("--text-unit", choices=TEXT_UNITS, default="line", help="one document of a text file")
  add("--on-bad-example", choices=("skip", "refuse"), default="skip")
  add("--dask", metavar="ADDRESS", help="a Dask scheduler's address, or 'local'")
  return parser


def _executor(address: str | None) -> Any:
  """Returns a context with Dask's executor, or with None for a pool of processes."""
  import contextlib

  if address is None:
    return contextlib.nullcontext()

  @contextlib.contextmanager
  def connected() -> Any:
    try:
      from dask import distributed
    except ImportError:
      raise ValueError("--dask needs Dask: pip install 'rosetta-t5[cluster]'") from None
    with distributed.Client(None if address == "local" else address) as client:
      yield client.get_executor()

  return connected()


class _progress_bar:
  """Shows shards, documents and megabytes a second, where somebody looks."""

  def __enter__(self) -> Callable[[int, int, int, int], None] | None:
    from rich import progress

    self._bar = progress.Progress(
      progress.TextColumn("{task.completed}/{task.total} shards"),
      progress.BarColumn(),
      progress.TextColumn("{task.fields[rates]}"),
      progress.TimeElapsedColumn(),
      disable=not sys.stderr.isatty(),
    )
    self._bar.start()
    self._task = self._bar.add_task("", total=None, rates="")
    self._first: tuple[float, int, int] | None = None
    return self._show

  def _show(self, done: int, shards: int, documents: int, text_bytes: int) -> None:
    now = time.monotonic()
    # Shards that were there already are no speed.
    self._first = self._first or (now, documents, text_bytes)
    seconds = max(now - self._first[0], 1e-3)
    docs, megabytes = documents - self._first[1], (text_bytes - self._first[2]) / 1e6
    rates = f"{docs / seconds:,.0f} docs/s {megabytes / seconds:.1f} MB/s"
    self._bar.update(self._task, completed=done, total=shards, rates=rates)

  def __exit__(self, *error: Any) -> None:
    self._bar.stop()
