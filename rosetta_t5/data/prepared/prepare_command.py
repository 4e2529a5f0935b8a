"""`rosetta-t5 prepare`: tokenizes text files into indexed shards."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any

from rosetta_t5 import terminal
from rosetta_t5.data.prepared.prepare import prepare
from rosetta_t5.data.reading import ReadOptions
from rosetta_t5.data.reading.examples import POLICIES
from rosetta_t5.data.reading.files import FORMATS, TEXT_UNITS
from rosetta_t5.data.vocabularies.lost_text import describe_lost, lost_text_problems
from rosetta_t5.terminal import machine_path, percentage, positive_integer

_GIN_FILE = """\
In a gin file:

from __gin__ import dynamic_registration
from rosetta_t5 import data

MIXTURE_OR_TASK_NAME = @data.prepared_task()
data.prepared_task.folders = {folder!r}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 prepare`."""
  add = parser.add_argument
  add("--input", nargs="+", required=True, metavar="GLOB", help="files or folders of text")
  add("--vocab", required=True, metavar="MODEL", help="a SentencePiece model")
  add(
    "--out", type=machine_path, required=True, metavar="DIR", help="the folder to write; a new one"
  )
  add("--text-key", default="text", help="the text's column, or a template: '{title} {body}'")
  add("--workers", type=positive_integer, help="number of processes; one per core by default")
  add("--validation-percent", type=percentage, default=1.0, help="size of the validation split")
  add("--append-eos", action="store_true", help="append an end token to each document (causal LM)")
  add("--format", choices=sorted(FORMATS), help="by default, each file's name shows its format")
  add("--columns", nargs="+", help="column names of csv or tsv files without a header")
  add("--text-unit", choices=TEXT_UNITS, default="line", help="one document of a text file")
  add(
    "--quoted",
    action=argparse.BooleanOptionalAction,
    help="whether fields of csv and tsv files may be in quotes; by default, the files show it",
  )
  add("--on-bad-example", choices=POLICIES, default="skip", help="skip bad examples, or stop")
  add("--dask", metavar="ADDRESS", help="address of a Dask scheduler, or 'local'")
  parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
  """Prepares data as the command line specifies; the same command continues one that was killed."""
  terminal.continue_without_output()
  columns = tuple(arguments.columns or ()) or None
  started = time.monotonic()
  with (
    _dask_executor(arguments.dask) as executor,
    terminal.progress_bar("preparing", unit="shards", stream=sys.stderr) as bar,
  ):
    manifest = prepare(
      arguments.input,
      arguments.vocab,
      arguments.out,
      text=arguments.text_key,
      validation_percent=arguments.validation_percent,
      append_end=arguments.append_eos,
      layout=ReadOptions(arguments.format, columns, arguments.text_unit, arguments.quoted),
      on_bad_example=arguments.on_bad_example,
      workers=arguments.workers,
      executor=executor,
      progress=partial(_show, bar),
    )
  print(f"{arguments.out} is complete after {time.monotonic() - started:.1f} s:")
  print("\n".join(_summary(manifest)))
  print(_GIN_FILE.format(folder=os.path.abspath(arguments.out)), end="")
  return 0


@contextlib.contextmanager
def _dask_executor(address: str | None) -> Iterator[Executor | None]:
  """Yields the executor of a Dask cluster, or None for a pool of processes."""
  if address is None:
    yield None
    return
  try:
    from dask import distributed
  except ImportError:
    raise ValueError("--dask needs Dask: pip install 'rosetta-t5[cluster]'") from None
  with distributed.Client(None if address == "local" else address) as client:
    yield client.get_executor()


def _show(bar: terminal.Bar, done: int, shards: int, documents: int, text_bytes: int) -> None:
  bar.update(done, shards, f"{documents:,} documents  {text_bytes / 1e6:,.1f} MB")


def _summary(manifest: Mapping[str, Any]) -> Iterator[str]:
  splits, vocabulary = manifest["splits"], manifest["vocabulary"]
  for split, facts in splits.items():
    yield f"  {split:<11}{facts['documents']:>12,} documents {facts['tokens']:>15,} tokens"
  text_bytes = manifest["text_bytes"]
  bytes_per_token = text_bytes / sum(facts["tokens"] for facts in splits.values())
  yield f"  {text_bytes / 1e6:,.1f} MB of text, {bytes_per_token:.2f} bytes per token"
  losses = manifest["losses"]
  yield from (f"  {line}" for line in describe_lost(losses))
  yield from (f"  note: {problem}" for problem in lost_text_problems(losses))
  if manifest["bad_examples"]:
    counts = manifest["bad_examples"].items()
    reasons = ", ".join(f"{count} × {reason}" for reason, count in counts)
    yield f"  bad examples left out: {reasons}; the first: {manifest['first_bad_example']}"
  yield f"  vocabulary {vocabulary['sha256'][:16]}, {vocabulary['pieces']} pieces"
