"""Writes one shard of prepared data: the tokens of some input files, with an index.

A job needs nothing but its own fields and the files, so any executor can run it on any machine that
can read them. A shard that was not finished never looks complete.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from rosetta_t5.data.reading import (
  BadExamples,
  BlockReader,
  ReadOptions,
  is_in_validation,
  make_converter,
)
from rosetta_t5.data.vocabularies.lost_text import count_lost, count_unknown
from rosetta_t5.data.vocabularies.sentencepiece_models import load_sentencepiece
from rosetta_t5.files import read_json_object, unfinished_path, write_atomically

MANIFEST = "manifest.json"
VOCABULARY = "vocabulary.model"
SPLITS = ("train", "validation")
# A longer document is stored in several records, so that a segment can be read without all of it.
TOKENS_PER_RECORD = 4096
_CHARACTERS_PER_PIECE = 50_000  # Longer texts are slow to tokenize and need much memory.
_CHECKED_TEXTS = 64  # number of texts of a shard that are decoded again, to count what they lose
_CHECKED_CHARACTERS = 4000  # of each of them


@dataclasses.dataclass(frozen=True)
class ShardJob:
  """The specification of one shard, whose content depends on nothing else.

  Attributes:
    number: the shard's number, from 0.
    shards: the number of all shards.
    files: input files, each as (path, bytes, modification time in ns).
    out: the folder of the prepared data.
    vocabulary: a SentencePiece model's file.
    vocabulary_sha256: the digest of this file.
    text: the column that contains the text, or a template.
    read_options: how the files' bytes become records.
    validation_percent: percentage of the documents, chosen by their hash, in the validation split.
    append_end: whether an end token follows each document.
    on_bad_example: "skip" or "refuse".
  """

  number: int
  shards: int
  files: tuple[tuple[str, int, int], ...]
  out: str
  vocabulary: str
  vocabulary_sha256: str
  text: str
  read_options: ReadOptions
  validation_percent: float
  append_end: bool
  on_bad_example: str

  def fingerprint(self) -> str:
    """Returns a digest of everything that the shard's content depends on, under the names of older versions."""
    fields = {**dataclasses.asdict(self), "out": "", "vocabulary": ""}
    fields["layout"] = fields.pop("read_options")
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

  def file(self, split: str) -> pathlib.Path:
    """Returns the file that contains a split's tokens."""
    name = f"{split}-{self.number:05}-of-{self.shards:05}.array_record"
    return pathlib.Path(self.out, name)

  @property
  def summary_file(self) -> pathlib.Path:
    """The file with what `run_job` returns. It is written last, when the shard is complete."""
    return pathlib.Path(self.out, "shards", f"{self.number:05}.json")

  def stored_summary(self) -> dict[str, Any] | None:
    """Returns what `run_job` has returned if it has completed the shard earlier, else None."""
    try:
      summary = read_json_object(self.summary_file)
    except (OSError, ValueError):
      return None
    if summary.get("fingerprint") != self.fingerprint():
      return None
    files = [(pathlib.Path(self.out, s["file"]), s["bytes"]) for s in summary["splits"].values()]
    is_complete = all(path.exists() and path.stat().st_size == size for path, size in files)
    return summary if is_complete else None


def run_job(job: ShardJob) -> dict[str, Any]:
  """Writes the shard unless it is complete already, and returns its files, counts and bad examples."""
  if (stored := job.stored_summary()) is not None:
    return stored
  job.summary_file.parent.mkdir(parents=True, exist_ok=True)
  job.summary_file.unlink(missing_ok=True)
  bad = BadExamples(job.on_bad_example)
  losses: collections.Counter[str] = collections.Counter()
  text_bytes = 0
  writers = {split: _SplitWriter(job.file(split)) for split in SPLITS}
  for split, tokens, size in _documents(job, bad, losses):
    writers[split].add(tokens)
    text_bytes += size
  splits = {split: writer.finish() for split, writer in writers.items()}
  summary = {
    "fingerprint": job.fingerprint(),
    "sources": [list(file) for file in job.files],
    "splits": {split: entry for split, entry in splits.items() if entry},
    "text_bytes": text_bytes,
    "losses": losses,
    "bad_examples": dict(bad.counts),
    "first_bad_example": str(bad.first) if bad.first else None,
  }
  write_atomically(job.summary_file, json.dumps(summary, indent=1))
  return summary


def token_type(pieces: int) -> np.dtype:
  """Returns the type in which the tokens of a vocabulary of so many pieces are stored."""
  return np.dtype("<u2" if pieces <= 1 << 16 else "<u4")


def cut_at_spaces(text: str, longest: int) -> Iterator[str]:
  """Cuts a long text before spaces and newlines, which leaves its tokens unchanged."""
  start = 0
  while len(text) - start > longest:
    end = start + longest
    cut = max(text.rfind(" ", start + 1, end), text.rfind("\n", start + 1, end))
    cut = cut if cut > start else end
    yield text[start:cut]
    start = cut
  yield text[start:]


def _documents(
  job: ShardJob, bad_examples: BadExamples, losses: collections.Counter[str]
) -> Iterator[tuple[str, np.ndarray, int]]:
  """Yields the split, the tokens and the size in bytes of each document; counts what texts lose."""
  tokenizer = load_sentencepiece(job.vocabulary)
  stored = token_type(tokenizer.get_piece_size())
  end = [np.array([tokenizer.eos_id()], stored)] if job.append_end else []
  convert = make_converter({"text": job.text})
  reader = BlockReader(convert, job.read_options, bad_examples=bad_examples)
  for fields in itertools.chain.from_iterable(reader.examples(path) for path, _, _ in job.files):
    text, tokens = fields["text"], []
    for piece in cut_at_spaces(text, _CHARACTERS_PER_PIECE):
      tokens.append(np.array(tokenizer.encode(piece), stored))
      if tokenizer.unk_id() in tokens[-1]:
        losses.update(count_unknown(piece, tokenizer))
    if losses["texts"] < _CHECKED_TEXTS:
      losses.update(count_lost(text[:_CHECKED_CHARACTERS], tokenizer))
    split = "validation" if is_in_validation(fields, job.validation_percent) else "train"
    yield split, np.concatenate([*tokens, *end]), len(text.encode())


class _SplitWriter:
  """Writes the records of a split into a scratch file, which is renamed when it is complete."""

  def __init__(self, path: pathlib.Path):
    self.documents = 0
    self._path, self._scratch = path, unfinished_path(path)
    self._ends = [0]
    self._digest = hashlib.sha256()

  @functools.cached_property
  def _writer(self) -> Any:
    from array_record.python import array_record_module

    options = "group_size:1,uncompressed"
    return array_record_module.ArrayRecordWriter(str(self._scratch), options)

  def add(self, tokens: np.ndarray) -> None:
    if not len(tokens):
      return
    self.documents += 1
    for start in range(0, len(tokens), TOKENS_PER_RECORD):
      record = tokens[start : start + TOKENS_PER_RECORD]
      self._writer.write(record.tobytes())
      self._digest.update(record.tobytes())
      self._ends.append(self._ends[-1] + len(record))

  def finish(self) -> dict[str, Any] | None:
    """Renames the complete files and returns the split's entry of the manifest; None for an empty split."""
    if not self.documents:
      self._path.unlink(missing_ok=True)
      return None
    self._writer.close()
    index = io.BytesIO()
    np.save(index, np.array(self._ends, np.uint64))
    write_atomically(self._path.with_suffix(".ends.npy"), index.getvalue())
    self._scratch.replace(self._path)
    return {
      "file": self._path.name,
      "bytes": self._path.stat().st_size,
      "documents": self.documents,
      "records": len(self._ends) - 1,
      "tokens": self._ends[-1],
      "sha256_of_tokens": self._digest.hexdigest(),
    }
