"""Tokenises files into shards: in parallel, over machines if wanted, going on where it was killed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import multiprocessing
import os
import pathlib
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rosetta_t5.data.local_files.local_assets import local_path
from rosetta_t5.data.prepared.shard_job import ShardJob, finished, run_job, write_atomically
from rosetta_t5.data.reading import Layout, find_files

MANIFEST = "manifest.json"
VOCABULARY = "vocabulary.model"
_SHARD_BYTES = 256 << 20
_LEAST_SHARDS = 16  # so that a small corpus is prepared in parallel too

Executor = concurrent.futures.Executor
Progress = Callable[[int, int, int, int], None]


def prepare(
  inputs: str | Sequence[str],
  vocabulary: str,
  out: str | os.PathLike[str],
  *,
  text: str = "text",
  validation_percent: float = 1.0,
  append_end: bool = False,
  layout: Layout | None = None,
  on_bad_example: str = "skip",
  workers: int | None = None,
  executor: Executor | None = None,
  progress: Progress | None = None,
) -> dict[str, Any]:
  """Tokenises files into `out` and returns its manifest.

  Shards that are there already, made of the same files with the same settings, are kept. The
  manifest is written when all are there; without it a folder is not taken for prepared data.

  Args:
    inputs: patterns of files, or folders.
    vocabulary: a SentencePiece model's file; a copy goes into `out`.
    out: a folder for this data alone.
    text: the column with the text, or a template such as "{title} {body}".
    validation_percent: of the documents, by the hash of their text, become the validation split.
    append_end: put an end token after each document (causal language models want it).
    layout: format, columns and text unit of the files.
    on_bad_example: "skip" counts and logs what cannot be read; "refuse" stops.
    workers: processes; None for one a core.
    executor: runs the jobs in place of a process pool, such as a Dask client's `get_executor()`.
    progress: called twice a second with shards done, shards, documents and bytes of text so far.

  Raises:
    ValueError: no files, no vocabulary, no document in the files, or `out` holds something else.
  """
  files = find_files(inputs)
  folder = pathlib.Path(out)
  model = pathlib.Path(local_path(vocabulary))
  (folder / "shards").mkdir(parents=True, exist_ok=True)
  _check_folder(folder)
  copy = folder / VOCABULARY
  if not (copy.exists() and copy.read_bytes() == model.read_bytes()):
    shutil.copyfile(model, copy)
  jobs = _plan(
    files,
    out=str(folder.absolute()),
    vocabulary=str(copy.absolute()),
    vocabulary_sha256=hashlib.sha256(model.read_bytes()).hexdigest(),
    text=text,
    layout=layout or Layout(),
    validation_percent=validation_percent,
    append_end=append_end,
    on_bad_example=on_bad_example,
  )
  (folder / MANIFEST).unlink(missing_ok=True)
  _remove_others(folder, jobs)
  facts = _run(jobs, executor, workers, progress)
  manifest = _manifest(jobs, facts)
  write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1))
  return manifest


def _plan(files: Sequence[str], **settings: Any) -> list[ShardJob]:
  """Groups files into shards by size alone, so that the same input always gives the same shards."""
  stats = [(str(pathlib.Path(f).absolute()), os.stat(f)) for f in files]
  facts = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
  target = min(_SHARD_BYTES, -(-sum(size for _, size, _ in facts) // _LEAST_SHARDS))
  groups: list[list[tuple[str, int, int]]] = []
  room = 0
  for fact in facts:
    if not groups or room < fact[1]:
      groups.append([])
      room = target
    groups[-1].append(fact)
    room -= fact[1]
  return [
    ShardJob(number=number, shards=len(groups), files=tuple(group), **settings)
    for number, group in enumerate(groups)
  ]


def _check_folder(folder: pathlib.Path) -> None:
  foreign = [
    path.name
    for path in folder.iterdir()
    if path.name not in ("shards", MANIFEST, VOCABULARY)
    and ".array_record" not in path.name
    and not path.name.endswith(".ends.npy")
  ]
  if foreign:
    raise ValueError(
      f"{folder} holds {', '.join(sorted(foreign)[:3])}, which is no prepared data: give --out a "
      "folder of its own"
    )


def _remove_others(folder: pathlib.Path, jobs: Sequence[ShardJob]) -> None:
  """Removes shards of another plan, and what killed runs left."""
  ours = {job.file(split).name for job in jobs for split in ("train", "validation")}
  ours |= {name.replace(".array_record", ".ends.npy") for name in ours}
  for path in folder.iterdir():
    is_data = ".array_record" in path.name or path.name.endswith(".npy")
    if is_data and path.name not in ours:
      path.unlink()
  numbers = {job.facts_file.name for job in jobs}
  for path in (folder / "shards").iterdir():
    if path.name not in numbers:
      path.unlink()


def _run(
  jobs: Sequence[ShardJob],
  executor: Executor | None,
  workers: int | None,
  progress: Progress | None,
) -> list[dict[str, Any]]:
  """Runs the jobs that are not done, largest first, and returns all facts in order."""
  done = {job.number: facts for job in jobs if (facts := finished(job))}
  left = sorted((j for j in jobs if j.number not in done), key=lambda j: -j.input_bytes)
  with _pool(executor, workers, len(left)) as pool:
    pending = {pool.submit(run_job, job): job for job in left}
    try:
      while pending:
        if not _collect(pending, done):
          time.sleep(0.05 if len(jobs) < 64 else 0.5)
        if progress is not None:
          progress(len(done), len(jobs), *_so_far(done.values(), pending.values()))
    except BaseException:
      for future in pending:
        future.cancel()
      raise
  return [done[job.number] for job in jobs]


def _collect(pending: dict[Any, ShardJob], done: dict[int, dict[str, Any]]) -> bool:
  """Moves the facts of jobs that have ended to `done`; tells whether there were any."""
  ended = [future for future in pending if future.done()]
  for future in ended:
    done[pending.pop(future).number] = future.result()
  return bool(ended)


def _pool(executor: Executor | None, workers: int | None, jobs: int) -> Any:
  """Returns a context with the executor: the given one, which stays open, or a pool of processes."""
  if executor is not None:
    return contextlib.nullcontext(executor)
  count = max(1, min(workers or os.cpu_count() or 1, jobs or 1))
  # Forked processes of a program with threads (JAX has them) can hang.
  context = multiprocessing.get_context("spawn")
  return concurrent.futures.ProcessPoolExecutor(count, mp_context=context)


def _so_far(done: Any, running: Any) -> tuple[int, int]:
  """Documents and bytes of text up to now."""
  documents = sum(f["documents"] for facts in done for f in facts["splits"].values())
  text_bytes = sum(facts["text_bytes"] for facts in done)
  for job in running:
    try:
      job_documents, job_bytes = job.progress_file.read_text().split()
    except (OSError, ValueError):
      continue
    documents, text_bytes = documents + int(job_documents), text_bytes + int(job_bytes)
  return documents, text_bytes


def _manifest(jobs: Sequence[ShardJob], facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  import sentencepiece

  job = jobs[0]
  bad = sum((Counter(shard["bad_examples"]) for shard in facts), Counter())
  splits = {split: _split_facts(facts, split) for split in ("train", "validation")}
  if not splits["train"]["documents"]:
    first = next((f["first_bad_example"] for f in facts if f["first_bad_example"]), "none")
    raise ValueError(
      f"No document for training came out of {len(_sources(facts))} files "
      f"({splits['validation']['documents']} for validation, {sum(bad.values())} bad examples; the "
      f"first: {first})"
    )
  tokenizer = sentencepiece.SentencePieceProcessor(model_file=job.vocabulary)
  return {
    "format": 1,
    "vocabulary": {
      "file": VOCABULARY,
      "sha256": job.vocabulary_sha256,
      "pieces": tokenizer.get_piece_size(),
    },
    "bytes_a_token": 2 if tokenizer.get_piece_size() <= 1 << 16 else 4,
    "text": job.text,
    "append_end": job.append_end,
    "validation_percent": job.validation_percent,
    "text_bytes": sum(shard["text_bytes"] for shard in facts),
    "splits": splits,
    "bad_examples": dict(bad),
    "first_bad_example": next((f["first_bad_example"] for f in facts if bad), None),
    "sources": _sources(facts),
  }


def _sources(facts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  return [{"file": path, "bytes": size} for shard in facts for path, size, _ in shard["sources"]]


def _split_facts(facts: Sequence[Mapping[str, Any]], split: str) -> dict[str, Any]:
  shards = [shard["splits"][split] for shard in facts if split in shard["splits"]]
  lengths: Counter[str] = sum((Counter(shard["lengths"]) for shard in shards), Counter())
  return {
    "documents": sum(shard["documents"] for shard in shards),
    "tokens": sum(shard["tokens"] for shard in shards),
    "lengths": dict(sorted(lengths.items(), key=lambda item: int(item[0]))),
    "shards": [{k: v for k, v in shard.items() if k != "lengths"} for shard in shards],
  }


def statistics(manifest: Mapping[str, Any]) -> Iterator[str]:
  """Yields lines on what was prepared."""
  for split, facts in manifest["splits"].items():
    yield f"  {split:<11}{facts['documents']:>12,} documents {facts['tokens']:>15,} tokens"
  tokens = sum(facts["tokens"] for facts in manifest["splits"].values())
  yield f"  {manifest['text_bytes'] / 1e6:,.1f} MB of text, {manifest['text_bytes'] / tokens:.2f} bytes a token"
  bad = manifest["bad_examples"]
  if bad:
    reasons = ", ".join(f"{count} × {reason}" for reason, count in bad.items())
    yield f"  bad examples left out: {reasons}; the first: {manifest['first_bad_example']}"
  yield f"  vocabulary {manifest['vocabulary']['sha256'][:16]}, {manifest['vocabulary']['pieces']} pieces"
