"""`rosetta-t5 prepare`: tokenizes files into shards, in parallel. A call that was killed can be repeated to finish it."""

import argparse
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import pathlib
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any

from rosetta_t5 import terminal
from rosetta_t5.data.local_copies import local_path
from rosetta_t5.data.prepared import shards
from rosetta_t5.data.prepared.shards import ShardJob
from rosetta_t5.data.reading import find_files
from rosetta_t5.data.vocabularies import sentencepiece_models
from rosetta_t5.data.vocabularies.tokenizer_folder import TOKENIZER, copy_vocabulary
from rosetta_t5.files import CHECKSUMS_NAME, exclusive_output, write_atomically, write_checksums
from rosetta_t5.terminal import machine_path, percentage, positive_integer

_MAX_SHARD_BYTES = 256 << 20
_MIN_SHARDS = 16  # so that a small corpus is prepared in parallel too
# The files that a call may leave in its folder; those of a killed call have the names of `unfinished_path`.
_OWN_FILES = ("train-*-of-*", "validation-*-of-*", ".*.[0-9]*", "shards/*.json", "shards/.*.[0-9]*")
_GIN_FILE = """\
In a gin file:

from __gin__ import dynamic_registration
from rosetta_t5 import data

MIXTURE_OR_TASK_NAME = @data.prepared_task()
data.prepared_task.folders = {folder!r}
"""


def prepare(
  inputs: str | Sequence[str],
  vocabulary: str,
  out: str | os.PathLike[str],
  *,
  text: str = "text",
  validation_percent: float = 1.0,
  append_end: bool = False,
  workers: int | None = None,
  executor: Executor | None = None,
) -> dict[str, Any]:
  """Tokenizes files into the folder `out`, and returns its manifest.

  Shards that an earlier call wrote from the same files with the same settings are kept. The manifest
  is written when all shards are complete; a folder without it is not accepted as prepared data.

  Args:
    inputs: patterns of files, or folders.
    vocabulary: a SentencePiece model's file, a tokenizer.json or a folder with one; copied into `out`.
    out: the folder to write, which must contain nothing else.
    text: the column that contains the text, or a template such as "{title} {body}".
    validation_percent: percentage of the documents, chosen by the hash of their text, that become
      the validation split.
    append_end: whether to append an end token to each document (for causal language models).
    workers: number of processes; None for one per core.
    executor: runs the jobs instead of a process pool, such as a Dask client's `get_executor()`.

  Raises:
    ValueError: there is no file or no document, the vocabulary is not valid, `out` contains
      something else, another process writes to it, or it is complete and was prepared with another
      vocabulary or other settings.
  """
  folder = pathlib.Path(os.path.abspath(out))
  # An input folder may contain `out`, with what an earlier call wrote.
  files = [f for f in find_files(inputs) if folder not in pathlib.Path(os.path.abspath(f)).parents]
  if not files:
    raise ValueError(f"--input contains no file outside --out {folder}")
  file = os.path.join(vocabulary, TOKENIZER) if os.path.isdir(vocabulary) else vocabulary
  source = pathlib.Path(local_path(file))
  tokenizer = shards.open_vocabulary(source)
  if append_end and tokenizer.end < 0:
    raise ValueError(f"{vocabulary} has no end token: omit --append-eos (append_end)")
  if not (folder / "shards").exists() and folder.exists() and any(folder.iterdir()):
    raise ValueError(f"{folder} contains other files: set --out to a folder that does not exist")
  (folder / "shards").mkdir(parents=True, exist_ok=True)
  settings = {
    "text": text,
    "append_end": append_end,
    "validation_percent": validation_percent,
    "vocabulary_sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
  }
  with exclusive_output(folder):
    before = _settings_of(folder, settings)
    if before is not None and before != settings:  # Runs may be using the tokens.
      raise ValueError(
        f"{folder} was prepared with {before}, got {settings}: set --out to another folder, or delete it"
      )
    copy = folder / (TOKENIZER if source.name == TOKENIZER else shards.VOCABULARY)
    copy_vocabulary(source, copy)
    jobs = _plan(files, out=str(folder), **settings)
    for name in (CHECKSUMS_NAME, shards.MANIFEST):
      (folder / name).unlink(missing_ok=True)
    _remove_other_shards(folder, jobs)
    summaries = _run(jobs, workers, executor)
    manifest = _manifest(jobs[0], copy.name, tokenizer.size, summaries)
    write_atomically(folder / shards.MANIFEST, json.dumps(manifest, indent=1))
    # ArrayRecord detects damage of the shards.
    write_checksums(folder, [copy.name, shards.MANIFEST])
  return manifest


def _settings_of(folder: pathlib.Path, names: Iterable[str]) -> dict[str, Any] | None:
  """Returns the settings of a folder that is complete; None if it is not, or if its manifest is damaged."""
  try:
    stored = shards.read_manifest(folder)
    return {name: stored.get(name, stored["vocabulary"]["sha256"]) for name in names}
  except (OSError, ValueError, KeyError):
    return None


def _plan(files: Sequence[str], **settings: Any) -> list[ShardJob]:
  """Groups files into shards by size alone, so that the same input always gives the same shards."""
  stats = [(str(pathlib.Path(file).absolute()), os.stat(file)) for file in files]
  target = min(_MAX_SHARD_BYTES, -(-sum(stat.st_size for _, stat in stats) // _MIN_SHARDS))
  groups: list[list[tuple[str, int, int]]] = []
  remaining = -1
  for path, stat in stats:
    if remaining < stat.st_size:
      groups.append([])
      remaining = target
    groups[-1].append((path, stat.st_size, stat.st_mtime_ns))
    remaining -= stat.st_size
  return [ShardJob(n, len(groups), tuple(group), **settings) for n, group in enumerate(groups)]


def _remove_other_shards(folder: pathlib.Path, jobs: Sequence[ShardJob]) -> None:
  """Removes the shards of calls with another number of shards, and what killed calls have left."""
  tokens = (job.file(split) for job in jobs for split in shards.SPLITS)
  kept = {*tokens, *(job.summary_file for job in jobs)}
  for path in itertools.chain.from_iterable(map(folder.glob, _OWN_FILES)):
    if path not in kept:
      path.unlink()


def _end_with_parent() -> None:
  """Ends this process when its parent ends, so that it does not write shards of a later call."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent.
  parent = multiprocessing.parent_process()
  assert parent is not None

  def wait_for_parent() -> None:
    parent.join()
    os._exit(1)

  threading.Thread(target=wait_for_parent, daemon=True).start()


def _run(
  jobs: Sequence[ShardJob], workers: int | None, given: Executor | None
) -> list[dict[str, Any]]:
  """Runs the jobs whose shards are not complete, largest first, and returns the summaries of all."""
  done = {job.number: summary for job in jobs if (summary := job.stored_summary())}
  incomplete = [job for job in jobs if job.number not in done]
  incomplete.sort(key=lambda job: sum(size for _, size, _ in job.files), reverse=True)
  # A fork of a process that has threads, as JAX has, can hang.
  spawn = multiprocessing.get_context("spawn")
  count = min(workers or os.cpu_count() or 1, len(jobs))
  pool = (
    contextlib.nullcontext(given) if given else ProcessPoolExecutor(count, spawn, _end_with_parent)
  )
  with pool as executor:
    results = executor.map(shards.run_job, incomplete)  # An error in one cancels those that wait.
    shown = terminal.track(results, "preparing", len(incomplete), "shards", stream=sys.stderr)
    done |= {job.number: summary for job, summary in zip(incomplete, shown, strict=True)}
  return [done[job.number] for job in jobs]


def _manifest(
  job: ShardJob, file: str, pieces: int, summaries: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
  splits: dict[str, dict[str, Any]] = {}
  for split in shards.SPLITS:
    entries = [summary["splits"][split] for summary in summaries if split in summary["splits"]]
    counts = {name: sum(entry[name] for entry in entries) for name in ("documents", "tokens")}
    splits[split] = {**counts, "shards": entries}
  losses, bad_examples = (
    sum((Counter(summary.get(name)) for summary in summaries), Counter[str]())
    for name in ("losses", "bad_examples")
  )
  first_bad = next(filter(None, (summary["first_bad_example"] for summary in summaries)), None)
  if not splits["train"]["documents"]:
    raise ValueError(
      f"There is no document for training ({splits['validation']['documents']} for validation, "
      f"{bad_examples.total()} bad examples; the first bad example: {first_bad})"
    )
  return {
    "format": shards.FORMAT,
    "vocabulary": {"file": file, "sha256": job.vocabulary_sha256, "pieces": pieces},
    "text": job.text,
    "append_end": job.append_end,
    "validation_percent": job.validation_percent,
    "splits": splits,
    "losses": losses,
    "bad_examples": bad_examples,
    "first_bad_example": first_bad,
    "sources": [
      {"file": path, "bytes": n} for summary in summaries for path, n, _ in summary["sources"]
    ],
  }


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 prepare`."""
  add = parser.add_argument
  add("--input", nargs="+", required=True, metavar="GLOB", help="files or folders of text")
  text = "a SentencePiece model, or a folder with tokenizer.json"
  add("--vocab", required=True, metavar="MODEL", help=text)
  add("--out", type=machine_path, required=True, metavar="DIR", help="a new folder to write")
  add("--text-key", default="text", help="the text's column, or a template: '{title} {body}'")
  add("--workers", type=positive_integer, help="number of processes; one per core by default")
  add("--validation-percent", type=percentage, default=1.0, help="size of the validation split")
  add("--append-eos", action="store_true", help="append an end token to each document (causal LM)")
  add("--dask", metavar="ADDRESS", help="address of a Dask scheduler, or 'local'")
  parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
  """Prepares data as the command line specifies; the same command continues one that was killed."""
  terminal.tolerate_lost_output()
  manifest = prepare(
    arguments.input,
    arguments.vocab,
    arguments.out,
    text=arguments.text_key,
    validation_percent=arguments.validation_percent,
    append_end=arguments.append_eos,
    workers=arguments.workers,
    executor=None if arguments.dask is None else _dask_executor(arguments.dask),
  )
  print(f"{arguments.out} is complete:")
  print("\n".join(_summary(manifest)))
  print(_GIN_FILE.format(folder=os.path.abspath(arguments.out)), end="")
  return 0


def _dask_executor(address: str) -> Executor:
  try:
    from dask import distributed
  except ImportError:
    raise ValueError("--dask needs Dask: pip install 'rosetta-t5[cluster]'") from None
  return distributed.Client(None if address == "local" else address).get_executor()


def _summary(manifest: Mapping[str, Any]) -> Iterator[str]:
  for name, split in manifest["splits"].items():
    yield f"  {name:<11}{split['documents']:>12,} documents {split['tokens']:>15,} tokens"
  lost = manifest["losses"]
  yield from (f"  {line}" for line in sentencepiece_models.describe_lost(lost))
  yield from (f"  note: {text}" for text in sentencepiece_models.lost_text_problems(lost))
  if manifest["bad_examples"]:
    reasons = ", ".join(f"{count} × {reason}" for reason, count in manifest["bad_examples"].items())
    yield f"  bad examples left out: {reasons}; the first: {manifest['first_bad_example']}"
