"""One shard of prepared data: some input files in, tokens and their index out, complete or not there.

A job depends on nothing but itself, so any executor can run it, on any machine that sees the files.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rosetta_t5.data.reading import BadExamples, BlockReader, Layout
from rosetta_t5.data.reading.blocks import HashSplit
from rosetta_t5.data.reading.templates import make_converter

# A longer document goes on in the next record: reading one segment must not mean reading a library.
TOKENS_A_RECORD = 4096
_CHARACTERS_A_PIECE = 50_000  # long texts tokenise slower, and in much memory
_CHARACTERS_A_BATCH = 1_000_000
_PROGRESS_EVERY = 0.5  # seconds


@dataclasses.dataclass(frozen=True)
class ShardJob:
  """What makes one shard.

  Attributes:
    number: the shard's.
    shards: how many there are in all.
    files: input files, each (path, bytes, time of its last change).
    out: the folder of the prepared data.
    vocabulary: a SentencePiece model's file.
    vocabulary_sha256: its content's digest.
    text: the column with the text, or a template.
    layout: how the files' bytes become records.
    validation_percent: of the documents, by hash, go to the validation split.
    append_end: whether an end token follows each document.
    on_bad_example: "skip" or "refuse".
  """

  number: int
  shards: int
  files: tuple[tuple[str, int, int], ...]
  out: str
  vocabulary: str
  vocabulary_sha256: str
  text: str = "text"
  layout: Layout = dataclasses.field(default_factory=Layout)
  validation_percent: float = 1.0
  append_end: bool = False
  on_bad_example: str = "skip"

  @property
  def input_bytes(self) -> int:
    """The input files' size."""
    return sum(size for _, size, _ in self.files)

  def fingerprint(self) -> str:
    """Returns a digest of everything that the shard's content depends on."""
    facts = {**dataclasses.asdict(self), "out": "", "vocabulary": ""}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

  def file(self, split: str) -> pathlib.Path:
    """Returns where a split's tokens lie."""
    name = f"{split}-{self.number:05}-of-{self.shards:05}.array_record"
    return pathlib.Path(self.out, name)

  @property
  def facts_file(self) -> pathlib.Path:
    """Written last: a shard counts when this is there."""
    return pathlib.Path(self.out, "shards", f"{self.number:05}.json")

  @property
  def progress_file(self) -> pathlib.Path:
    """How far the job is, for whoever watches."""
    return pathlib.Path(self.out, "shards", f"{self.number:05}.progress")


def finished(job: ShardJob) -> dict[str, Any] | None:
  """Returns the facts of a shard that is there already and was made of the same, else None."""
  try:
    facts = json.loads(job.facts_file.read_text())
  except (OSError, ValueError):
    return None
  files = [(pathlib.Path(job.out, f["file"]), f["bytes"]) for f in facts.get("splits", {}).values()]
  whole = all(path.exists() and path.stat().st_size == size for path, size in files)
  return facts if whole and facts.get("fingerprint") == job.fingerprint() else None


def run_job(job: ShardJob) -> dict[str, Any]:
  """Makes the shard if it is not there, and returns its facts."""
  facts = finished(job)
  if facts is not None:
    return facts
  job.facts_file.parent.mkdir(parents=True, exist_ok=True)
  job.facts_file.unlink(missing_ok=True)
  maker = _ShardMaker(job)
  try:
    facts = maker.run()
  finally:
    maker.discard()
    job.progress_file.unlink(missing_ok=True)
  write_atomically(job.facts_file, json.dumps(facts, indent=1))
  return facts


def write_atomically(path: pathlib.Path, text: str) -> None:
  """Writes a file that appears at once and whole."""
  scratch = path.with_name(f".{path.name}.{os.getpid()}")
  scratch.write_text(text)
  scratch.replace(path)


@functools.cache
def _tokenizer(path: str, digest: str) -> Any:
  import sentencepiece

  del digest  # another content under the same path is another tokenizer
  return sentencepiece.SentencePieceProcessor(model_file=path, num_threads=1)


class _ShardMaker:
  """Reads, tokenises and writes one shard."""

  def __init__(self, job: ShardJob):
    self._job = job
    self._tokenizer = _tokenizer(job.vocabulary, job.vocabulary_sha256)
    self._held_out = HashSplit(job.validation_percent, validation=True)
    self._bad = BadExamples(job.on_bad_example)
    self._texts: list[str] = []
    self._ends: list[str] = []  # for each text the split of the document that it ends, or ""
    self._characters = 0
    self._parts: list[np.ndarray] = []
    self._writers = {split: _Writer(job, split) for split in ("train", "validation")}
    self._text_bytes = 0
    self._started = self._told = time.monotonic()

  def run(self) -> dict[str, Any]:
    reader = BlockReader(
      make_converter({"text": self._job.text}), self._job.layout, bad_examples=self._bad
    )
    for path, _, _ in self._job.files:
      for fields in reader.examples(path):
        self._add(fields)
    self._encode()
    splits = {s: w.finish() for s, w in self._writers.items()}
    return {
      "fingerprint": self._job.fingerprint(),
      "sources": [list(file) for file in self._job.files],
      "splits": {split: facts for split, facts in splits.items() if facts},
      "text_bytes": self._text_bytes,
      "seconds": round(time.monotonic() - self._started, 3),
      "bad_examples": dict(self._bad.counts),
      "first_bad_example": str(self._bad.first) if self._bad.first else None,
    }

  def discard(self) -> None:
    """Removes what was not finished."""
    for writer in self._writers.values():
      writer.discard()

  def _add(self, fields: Mapping[str, str]) -> None:
    split = "validation" if self._held_out.takes(fields) else "train"
    *pieces, last = cut_at_spaces(fields["text"], _CHARACTERS_A_PIECE)
    for piece in pieces:
      self._gather(piece, "")
    self._gather(last, split)

  def _gather(self, text: str, ends: str) -> None:
    self._texts.append(text)
    self._ends.append(ends)
    self._characters += len(text)
    # Within a document too: tokens as Python's numbers take twenty times the text's memory.
    if self._characters >= _CHARACTERS_A_BATCH:
      self._encode()

  def _encode(self) -> None:
    """Tokenises what has gathered; a document that is not at its end waits for the next batch."""
    self._text_bytes += sum(
      len(text) if text.isascii() else len(text.encode()) for text in self._texts
    )
    end = [self._tokenizer.eos_id()] if self._job.append_end else []
    kind = self._writers["train"].kind
    encoded = self._tokenizer.encode(self._texts, out_type=int)
    for tokens, split in zip(encoded, self._ends, strict=True):
      self._parts.append(np.array(tokens + end if split else tokens, kind))
      if split:
        document = np.concatenate(self._parts) if len(self._parts) > 1 else self._parts[0]
        self._writers[split].add(document)
        self._parts = []
    self._texts, self._ends, self._characters = [], [], 0
    if time.monotonic() - self._told > _PROGRESS_EVERY:
      self._told = time.monotonic()
      documents = sum(writer.documents for writer in self._writers.values())
      self._job.progress_file.write_text(f"{documents} {self._text_bytes}")


def cut_at_spaces(text: str, longest: int) -> Iterator[str]:
  """Cuts a long text where there is a space, so that its pieces have the whole's tokens."""
  start = 0
  while len(text) - start > longest:
    cut = max(
      text.rfind(" ", start + 1, start + longest), text.rfind("\n", start + 1, start + longest)
    )
    cut = cut if cut > start else start + longest
    yield text[start:cut]
    start = cut
  yield text[start:]


class _Writer:
  """Writes one split's records under another name until they are complete."""

  def __init__(self, job: ShardJob, split: str):
    tokenizer = _tokenizer(job.vocabulary, job.vocabulary_sha256)
    self.kind = np.dtype("<u2" if tokenizer.get_piece_size() <= 1 << 16 else "<u4")
    self.documents = 0
    self._path = job.file(split)
    self._scratch = self._path.with_name(f".{self._path.name}.{os.getpid()}")
    self._ends = [0]
    self._lengths: collections.Counter[int] = collections.Counter()
    self._digest = hashlib.sha256()
    self._writer: Any = None

  def add(self, tokens: np.ndarray) -> None:
    if not len(tokens):
      return
    if self._writer is None:
      from array_record.python import array_record_module

      self._writer = array_record_module.ArrayRecordWriter(
        str(self._scratch), "group_size:1,uncompressed"
      )
    for start in range(0, len(tokens), TOKENS_A_RECORD):
      record = tokens[start : start + TOKENS_A_RECORD]
      data = record.tobytes()
      self._writer.write(data)
      self._digest.update(data)
      self._ends.append(self._ends[-1] + len(record))
    self.documents += 1
    self._lengths[len(tokens).bit_length()] += 1

  def finish(self) -> dict[str, Any] | None:
    """Gives the files their names; returns None if there is nothing in them."""
    if self._writer is None:
      self._path.unlink(missing_ok=True)
      return None
    self._writer.close()
    index = self._path.with_suffix(".ends.npy")
    scratch = index.with_name(f".{index.name}.{os.getpid()}")
    with open(scratch, "wb") as file:
      np.save(file, np.array(self._ends, np.uint64))
    scratch.replace(index)
    self._scratch.replace(self._path)
    self._writer = None
    return {
      "file": self._path.name,
      "bytes": self._path.stat().st_size,
      "documents": self.documents,
      "records": len(self._ends) - 1,
      "tokens": self._ends[-1],
      "sha256_of_tokens": self._digest.hexdigest(),
      # documents by the power of two that is above their length
      "lengths": {str(1 << bits): n for bits, n in sorted(self._lengths.items())},
    }

  def discard(self) -> None:
    if self._writer is not None:
      self._writer.close()
      self._writer = None
    self._scratch.unlink(missing_ok=True)
