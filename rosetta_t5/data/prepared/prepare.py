"""Tokenizes files into shards, in parallel. A call that was killed can be repeated to finish it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, wait
from typing import Any

from rosetta_t5 import manifest as file_manifest
from rosetta_t5.data.local_copies import local_path
from rosetta_t5.data.prepared.shard_job import SPLITS, ShardJob, run_job
from rosetta_t5.data.reading import DEFAULT_OPTIONS, ReadOptions, find_files
from rosetta_t5.data.vocabularies.sentencepiece_models import load_sentencepiece
from rosetta_t5.files import exclusive_output, read_json_object, write_atomically

MANIFEST = "manifest.json"
VOCABULARY = "vocabulary.model"
_MAX_SHARD_BYTES = 256 << 20
_MIN_SHARDS = 16  # so that a small corpus is prepared in parallel too
# The files that a call writes, in `out`; those of a killed call have the names of `unfinished_path`.
_OWN_FILES = re.compile(
  r"(\.?(train|validation)-\d+-of-\d+\.(array_record|ends\.npy)|shards/\.?\d+\.(json|progress)"
  r"|\.?(manifest|checksums)\.json|\.?vocabulary\.model)(\.\d+)?"
)

Facts = Mapping[str, Any]
Progress = Callable[[int, int, int, int], None]


def prepare(
  inputs: str | Sequence[str],
  vocabulary: str,
  out: str | os.PathLike[str],
  *,
  text: str = "text",
  validation_percent: float = 1.0,
  append_end: bool = False,
  layout: ReadOptions = DEFAULT_OPTIONS,
  on_bad_example: str = "skip",
  workers: int | None = None,
  executor: Executor | None = None,
  progress: Progress | None = None,
) -> dict[str, Any]:
  """Tokenizes files into the folder `out`, and returns its manifest.

  Shards that an earlier call wrote from the same files with the same settings are kept. The manifest
  is written when all shards are complete; a folder without it is not accepted as prepared data.

  Args:
    inputs: patterns of files, or folders.
    vocabulary: a SentencePiece model's file, which is copied into `out`.
    out: the folder to write, which must contain nothing else.
    text: the column that contains the text, or a template such as "{title} {body}".
    validation_percent: percentage of the documents, chosen by the hash of their text, that become
      the validation split.
    append_end: whether to append an end token to each document (for causal language models).
    layout: format, columns and text unit of the files.
    on_bad_example: "skip" counts and logs unreadable examples; "refuse" stops at the first.
    workers: number of processes; None for one per core.
    executor: runs the jobs instead of a process pool, such as a Dask client's `get_executor()`.
    progress: called at least twice a second with the number of completed shards, of all shards, and
      of the documents and bytes of text that have been tokenized.

  Raises:
    ValueError: there is no file or no document, the vocabulary is not valid, `out` contains
      something else, another process writes to it, or it is complete and was prepared with another
      vocabulary or other settings.
  """
  folder = pathlib.Path(os.path.abspath(out))
  files = _find_inputs(inputs, folder)
  model = pathlib.Path(local_path(vocabulary)).read_bytes()
  tokenizer = load_sentencepiece(local_path(vocabulary))
  if append_end and tokenizer.eos_id() < 0:
    raise ValueError(f"{vocabulary} has no end token: omit --append-eos (append_end)")
  _check_files(folder)
  (folder / "shards").mkdir(parents=True, exist_ok=True)
  settings = {"text": text, "append_end": append_end, "validation_percent": validation_percent}
  with contextlib.ExitStack() as stack:
    stack.enter_context(exclusive_output(folder))
    _check_settings(folder, model, settings)
    write_atomically(folder / VOCABULARY, model)
    jobs = _plan(
      files,
      out=str(folder),
      vocabulary=str(folder / VOCABULARY),
      vocabulary_sha256=hashlib.sha256(model).hexdigest(),
      layout=layout,
      on_bad_example=on_bad_example,
      **settings,
    )
    (folder / MANIFEST).unlink(missing_ok=True)
    _remove_other_shards(folder, jobs)
    pool = executor or stack.enter_context(_process_pool(workers, jobs))
    shards = _run(jobs, pool, progress)
    manifest = _manifest(jobs[0], tokenizer.get_piece_size(), shards)
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1))
    # ArrayRecord detects damage of the shards themselves.
    indices = [path.name for path in folder.glob("*.ends.npy")]
    file_manifest.write(folder, [VOCABULARY, MANIFEST, *indices])
  return manifest


def _find_inputs(patterns: str | Sequence[str], out: pathlib.Path) -> list[str]:
  """Returns the files to tokenize; an input folder may contain `out`, with what an earlier call wrote."""
  paths = {file: pathlib.Path(os.path.abspath(file)) for file in find_files(patterns)}
  files = [file for file, path in paths.items() if out not in path.parents]
  if not files:
    raise ValueError(f"--input contains no file outside --out {out}")
  return files


def _plan(files: Sequence[str], **settings: Any) -> list[ShardJob]:
  """Groups files into shards by size alone, so that the same input always gives the same shards."""
  stats = [(str(pathlib.Path(file).absolute()), os.stat(file)) for file in files]
  total = sum(stat.st_size for _, stat in stats)
  target = min(_MAX_SHARD_BYTES, -(-total // _MIN_SHARDS))
  groups: list[list[tuple[str, int, int]]] = []
  remaining = 0
  for path, stat in stats:
    if not groups or remaining < stat.st_size:
      groups.append([])
      remaining = target
    groups[-1].append((path, stat.st_size, stat.st_mtime_ns))
    remaining -= stat.st_size
  return [
    ShardJob(number=number, shards=len(groups), files=tuple(group), **settings)
    for number, group in enumerate(groups)
  ]


def _list_files(folder: pathlib.Path) -> list[tuple[pathlib.Path, str]]:
  """Returns what is in the folder and in its folder `shards`, with names relative to the folder."""
  paths = (*folder.glob("*"), *folder.glob("shards/*"))
  return [(path, path.relative_to(folder).as_posix()) for path in paths if path.name != "shards"]


def _check_files(folder: pathlib.Path) -> None:
  """Raises ValueError if the folder contains anything that `prepare` does not write."""
  found = _list_files(folder)
  foreign = sorted(n for path, n in found if path.is_fifo() or not _OWN_FILES.fullmatch(n))
  if foreign:
    raise ValueError(
      f"{folder} contains {', '.join(foreign[:3])}, which is not prepared data: set --out to a "
      "folder that contains nothing else"
    )


def _check_settings(folder: pathlib.Path, vocabulary: bytes, settings: Mapping[str, Any]) -> None:
  """Raises ValueError if the folder is complete and has other tokens, which runs may be using."""
  try:
    manifest = read_json_object(folder / MANIFEST)
    has_other_vocabulary = (folder / VOCABULARY).read_bytes() != vocabulary
  except (OSError, ValueError):
    return  # There is nothing to lose: the folder is not complete, or damaged.
  others = ["another vocabulary"] if has_other_vocabulary else []
  for name, value in settings.items():
    if manifest.get(name, value) != value:
      others.append(f"{name} = {manifest[name]!r} instead of {value!r}")
  if others:
    raise ValueError(
      f"{folder} was prepared with {' and '.join(others)}: set --out to another folder, or delete this one"
    )


def _remove_other_shards(folder: pathlib.Path, jobs: Sequence[ShardJob]) -> None:
  """Removes the shards of calls with another number of shards, and what killed calls have left."""
  tokens = [job.file(split) for job in jobs for split in SPLITS]
  indices = [path.with_suffix(".ends.npy") for path in tokens]
  facts = [job.facts_file for job in jobs]
  kept = {VOCABULARY, *(path.name for path in (*tokens, *indices, *facts))}
  for path, name in _list_files(folder):
    if path.name not in kept and _OWN_FILES.fullmatch(name):
      path.unlink()


def _process_pool(workers: int | None, jobs: Sequence[ShardJob]) -> Executor:
  count = min(workers or os.cpu_count() or 1, len(jobs))
  # A fork of a process that has threads, as JAX has, can hang.
  context = multiprocessing.get_context("spawn")
  return ProcessPoolExecutor(count, mp_context=context, initializer=_end_with_parent)


def _end_with_parent() -> None:
  """Ends this process when its parent is killed, so that it does not write shards of a later call."""
  parent = multiprocessing.parent_process()
  assert parent is not None

  def wait_for_parent() -> None:
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)

  threading.Thread(target=wait_for_parent, daemon=True).start()


def _run(jobs: Sequence[ShardJob], executor: Executor, progress: Progress | None) -> list[Facts]:
  """Runs the jobs whose shards are not complete, largest first, and returns the facts of all."""
  done = {job.number: facts for job in jobs if (facts := job.stored_facts())}
  incomplete = [job for job in jobs if job.number not in done]
  incomplete.sort(key=lambda job: job.input_bytes, reverse=True)
  with _new_processes_ignore_ctrl_c():
    pending = {executor.submit(run_job, job): job for job in incomplete}
  try:
    while pending:
      ended, _ = wait(pending, timeout=0.5, return_when="FIRST_COMPLETED")
      for future in ended:
        done[pending.pop(future).number] = future.result()
      if progress is not None:
        progress(len(done), len(jobs), *_count_documents(done.values(), pending.values()))
  except BaseException:
    for future in pending:
      future.cancel()
    raise
  return [done[job.number] for job in jobs]


@contextlib.contextmanager
def _new_processes_ignore_ctrl_c() -> Iterator[None]:
  """Blocks SIGINT in processes that start inside the `with`; this one handles Ctrl-C and ends them."""
  before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
  try:
    yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _count_documents(done: Iterable[Facts], running: Iterable[ShardJob]) -> tuple[int, int]:
  """Returns the documents and bytes of text that have been tokenized so far."""
  documents = sum(split["documents"] for facts in done for split in facts["splits"].values())
  text_bytes = sum(facts["text_bytes"] for facts in done)
  for job in running:
    with contextlib.suppress(OSError, ValueError):
      job_documents, job_bytes = map(int, job.progress_file.read_text().split())
      documents, text_bytes = documents + job_documents, text_bytes + job_bytes
  return documents, text_bytes


def _manifest(job: ShardJob, vocabulary_size: int, shards: Sequence[Facts]) -> dict[str, Any]:
  splits = {split: _split_facts(shards, split) for split in SPLITS}
  sources = [(path, size) for shard in shards for path, size, _ in shard["sources"]]
  bad_examples = _sum_counts(shard["bad_examples"] for shard in shards)
  first_bad = next(filter(None, (shard["first_bad_example"] for shard in shards)), None)
  if not splits["train"]["documents"]:
    raise ValueError(
      f"There is no document for training in {len(sources)} files "
      f"({splits['validation']['documents']} for validation, {sum(bad_examples.values())} bad "
      f"examples; the first bad example: {first_bad})"
    )
  return {
    "format": 1,
    "vocabulary": {"file": VOCABULARY, "sha256": job.vocabulary_sha256, "pieces": vocabulary_size},
    "bytes_a_token": 2 if vocabulary_size <= 1 << 16 else 4,
    "text": job.text,
    "append_end": job.append_end,
    "validation_percent": job.validation_percent,
    "text_bytes": sum(shard["text_bytes"] for shard in shards),
    "splits": splits,
    "losses": _sum_counts(shard.get("losses", {}) for shard in shards),
    "bad_examples": dict(bad_examples),
    "first_bad_example": first_bad,
    "sources": [{"file": path, "bytes": size} for path, size in sources],
  }


def _sum_counts(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
  return sum(map(Counter, counts), Counter())


def _split_facts(shards: Sequence[Facts], split: str) -> dict[str, Any]:
  facts = [shard["splits"][split] for shard in shards if split in shard["splits"]]
  lengths = _sum_counts(shard["lengths"] for shard in facts)
  return {
    "documents": sum(shard["documents"] for shard in facts),
    "tokens": sum(shard["tokens"] for shard in facts),
    "lengths": dict(sorted(lengths.items(), key=lambda item: int(item[0]))),
    "shards": [{k: v for k, v in shard.items() if k != "lengths"} for shard in facts],
  }
