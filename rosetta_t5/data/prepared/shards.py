"""The shards of prepared data: a job writes each one, and a `TokenStream` reads all of a split.

A job needs nothing but its own fields and the files, so any executor can run it on any machine that
can read them. A shard that was not finished never looks complete.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rosetta_t5 import files
from rosetta_t5.data import reading
from rosetta_t5.data.vocabularies import sentencepiece_models
from rosetta_t5.data.vocabularies.task_vocabularies import tokenizer_vocabulary
from rosetta_t5.data.vocabularies.tokenizer_folder import TOKENIZER

MANIFEST = "manifest.json"
FORMAT = 2  # Version 0.1.0 wrote format 1, whose records have other sizes.
VOCABULARY = "vocabulary.model"
SPLITS = ("train", "validation")
# All records but a shard's last one have so many tokens, so the record of a token is known by its position.
TOKENS_PER_RECORD = 1024
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
    out: the folder of the prepared data, which contains the vocabulary.
    vocabulary_sha256: the digest of the vocabulary.
    text: the column that contains the text, or a template.
    validation_percent: percentage of the documents, chosen by their hash, in the validation split.
    append_end: whether an end token follows each document.
  """

  number: int
  shards: int
  files: tuple[tuple[str, int, int], ...]
  out: str
  vocabulary_sha256: str
  text: str
  validation_percent: float
  append_end: bool

  def fingerprint(self) -> str:
    """Returns a digest of everything that the shard's content depends on."""
    fields = {**dataclasses.asdict(self), "out": "", "format": FORMAT}
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
    with contextlib.suppress(OSError, ValueError, KeyError):
      summary = files.read_json_object(self.summary_file)
      if summary.get("fingerprint") == self.fingerprint():
        for entry in summary["splits"].values():
          if pathlib.Path(self.out, entry["file"]).stat().st_size != entry["bytes"]:
            return None
        return summary
    return None


class StoredVocabulary(NamedTuple):
  """What is needed of a vocabulary, without sentinels that are its last ids.

  Attributes:
    tokenizer: the SentencePiece processor, or the `tokenizers.Tokenizer`.
    encode: converts a text to ids.
    decode: converts ids to a text.
    size: the number of ids.
    end: the id of the end token; negative if there is none.
    unknown: the id of unknown pieces, or None.
  """

  tokenizer: Any
  encode: Any
  decode: Any
  size: int
  end: int
  unknown: int | None


def open_vocabulary(path: str | os.PathLike[str]) -> StoredVocabulary:
  """Returns the vocabulary of a prepared folder, of a tokenizer.json or of a SentencePiece model.

  Raises:
    ValueError: the file is neither.
  """
  if os.path.isdir(path):
    files_of_it = (os.path.join(path, name) for name in (TOKENIZER, VOCABULARY))
    path = next(filter(os.path.exists, files_of_it))
  if os.path.basename(path) == TOKENIZER:
    made: Any = tokenizer_vocabulary(os.fspath(path))
    size = made.vocab_size - made.extra_ids
    return StoredVocabulary(made.tokenizer, made.encode, made.decode, size, made.eos_id, None)
  model = sentencepiece_models.load_sentencepiece(path)
  ids = model.get_piece_size(), model.eos_id(), model.unk_id()
  return StoredVocabulary(model, model.encode, model.decode, *ids)


def run_job(job: ShardJob) -> dict[str, Any]:
  """Writes the shard, and returns its files, counts and bad examples."""
  job.summary_file.unlink(missing_ok=True)
  bad, losses = reading.BadExamples(), Counter[str]()
  tokenizer = open_vocabulary(job.out)
  end = [tokenizer.end] if job.append_end else []
  stored = token_type(tokenizer.size)
  writers = {split: _SplitWriter(job.file(split)) for split in SPLITS}
  reader = reading.BlockReader(reading.make_converter({"text": job.text}), bad_examples=bad)
  for fields in itertools.chain.from_iterable(reader.examples(path) for path, _, _ in job.files):
    text, tokens = fields["text"], []
    for piece in cut_at_spaces(text, _CHARACTERS_PER_PIECE):
      tokens.append(np.array(tokenizer.encode(piece), stored))
      if tokenizer.unknown in tokens[-1]:
        losses.update(sentencepiece_models.count_unknown(piece, tokenizer))
    if losses["texts"] < _CHECKED_TEXTS:
      beginning = text[:_CHECKED_CHARACTERS]
      losses.update(sentencepiece_models.count_lost(beginning, tokenizer))
    split = "validation" if reading.is_in_validation(fields, job.validation_percent) else "train"
    writers[split].add(np.concatenate([*tokens, np.array(end, stored)]))
  splits = {split: writer.finish() for split, writer in writers.items()}
  summary = {
    "fingerprint": job.fingerprint(),
    "sources": [list(file) for file in job.files],
    "splits": {split: entry for split, entry in splits.items() if entry},
    "losses": losses,
    "bad_examples": dict(bad.counts),
    "first_bad_example": bad.first,
  }
  files.write_atomically(job.summary_file, json.dumps(summary, indent=1))
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


class _SplitWriter:
  """Writes the records of a split into a scratch file, which is renamed when it is complete."""

  def __init__(self, path: pathlib.Path):
    from array_record.python import array_record_module

    self._documents = self._tokens = 0
    self._path, self._scratch = path, files.unfinished_path(path)
    self._unwritten = bytearray()
    self._digest = hashlib.sha256()
    options = "group_size:1,uncompressed"
    self._writer = array_record_module.ArrayRecordWriter(str(self._scratch), options)

  def add(self, tokens: np.ndarray) -> None:
    self._documents += bool(len(tokens))
    self._tokens += len(tokens)
    self._digest.update(tokens.tobytes())
    self._unwritten += tokens.tobytes()
    size = TOKENS_PER_RECORD * tokens.itemsize
    while len(self._unwritten) >= size:
      self._writer.write(bytes(self._unwritten[:size]))
      del self._unwritten[:size]

  def finish(self) -> dict[str, Any] | None:
    """Renames the complete file and returns the split's entry of the manifest; None for an empty split."""
    if self._unwritten:
      self._writer.write(bytes(self._unwritten))
    self._writer.close()
    if not self._documents:
      self._scratch.unlink()
      self._path.unlink(missing_ok=True)
      return None
    self._scratch.replace(self._path)
    return {
      "file": self._path.name,
      "bytes": self._path.stat().st_size,
      "documents": self._documents,
      "tokens": self._tokens,
      "sha256_of_tokens": self._digest.hexdigest(),
    }


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns the manifest of a prepared folder.

  Raises:
    ValueError: the folder has no manifest, because it is incomplete or is not prepared data; the
      manifest or the vocabulary is damaged; or another version wrote the folder.
  """
  path = pathlib.Path(folder) / MANIFEST
  if not path.exists():
    raise ValueError(
      f"There is no {path}: the folder is not prepared data, or was not completed. Prepare it: "
      f"rosetta-t5 prepare --input FILES --vocab MODEL --out {folder}"
    )
  files.verify_checksums(folder, (MANIFEST, VOCABULARY, TOKENIZER).__contains__)
  manifest = files.read_json_object(path)
  if (found := manifest.get("format")) != FORMAT:
    raise ValueError(f"{path} must have the format {FORMAT}, got {found}: prepare the folder again")
  return manifest


class TokenStream:
  """All tokens of a split, one document after the other.

  Attributes:
    folder: the prepared folder.
    size: number of tokens.
    digest: a hash of all tokens.
  """

  def __init__(self, folder: str | os.PathLike[str], split: str):
    """Reads the manifest; shards are opened when they are needed.

    Raises:
      ValueError: the folder is not prepared data or lacks the split; or a shard is missing, or its
        size differs from the manifest.
    """
    self.folder = pathlib.Path(folder)
    self._split = split
    manifest = read_manifest(folder)
    splits = {name: entry["shards"] for name, entry in manifest["splits"].items()}
    shards = splits.get(split)
    if not shards:
      existing = ", ".join(repr(name) for name in splits if splits[name])
      raise ValueError(f"{folder} has no split '{split}'; it has {existing}")
    dtype = token_type(manifest["vocabulary"]["pieces"])
    self._shards = [_Shard(self.folder, dtype, shard) for shard in shards]
    self._starts = np.cumsum([0, *(shard["tokens"] for shard in shards)])
    self.size = int(self._starts[-1])
    digests = "".join(shard["sha256_of_tokens"] for shard in shards)
    self.digest = hashlib.sha256(digests.encode()).hexdigest()

  def __reduce__(self) -> Any:
    """Makes another process that receives the stream open the files itself."""
    return TokenStream, (self.folder, self._split)

  def read(self, starts: Sequence[int], count: int) -> np.ndarray:
    """Returns `count` tokens from each start on, as int32 [len(starts), count].

    Raises:
      ValueError: a record of a shard is damaged.
    """
    rows = [list(self._parts(start, count)) for start in starts]
    wanted = defaultdict[int, set[int]](set)
    for shard, records, _ in itertools.chain.from_iterable(rows):
      wanted[shard].update(records)
    tokens = {shard: self._shards[shard].read(sorted(records)) for shard, records in wanted.items()}

    def join(shard: int, records: range, part: slice) -> np.ndarray:
      return np.concatenate([tokens[shard][record] for record in records])[part]

    joined = [np.concatenate([join(*part) for part in parts]) for parts in rows]
    return np.stack(joined).astype(np.int32)

  def _parts(self, start: int, count: int) -> Iterator[tuple[int, range, slice]]:
    """Yields where `count` tokens are stored: in each shard the records, and the slice of these."""
    while count > 0:
      shard = int(np.searchsorted(self._starts, start, side="right")) - 1
      first, skip = divmod(start - int(self._starts[shard]), TOKENS_PER_RECORD)
      size = min(count, int(self._starts[shard + 1]) - start)
      last = first + (skip + size - 1) // TOKENS_PER_RECORD
      yield shard, range(first, last + 1), slice(skip, skip + size)
      start, count = start + size, count - size


class _Shard:
  """An ArrayRecord file of tokens, which is opened when it is first needed."""

  def __init__(self, folder: pathlib.Path, dtype: np.dtype, entry: Mapping[str, Any]):
    self._path, self._dtype, size = folder / entry["file"], dtype, entry["bytes"]
    found = self._path.stat().st_size if self._path.exists() else 0
    if found != size:
      raise ValueError(_damaged_text(self._path, f"{found} bytes instead of {size}"))
    self._lock = threading.Lock()

  @functools.cached_property
  def _reader(self) -> Any:
    from array_record.python import array_record_module

    options = "readahead_buffer_size:0,max_parallelism:0"
    return array_record_module.ArrayRecordReader(str(self._path), options)

  def read(self, numbers: Sequence[int]) -> dict[int, np.ndarray]:
    """Reads several records in one call of the reader, which is much faster than one by one."""
    try:
      with self._lock:  # The reader is not thread-safe, because it has a position.
        records = self._reader.read(list(numbers))
    except (RuntimeError, ValueError, IndexError) as error:
      reason = str(error).splitlines()[0][:200]
      raise ValueError(_damaged_text(self._path, reason)) from error
    return {n: np.frombuffer(r, self._dtype) for n, r in zip(numbers, records, strict=True)}


def _damaged_text(path: pathlib.Path, reason: str) -> str:
  return (
    f"The prepared shard {path} is damaged ({reason}). To repair it, delete the file and repeat the "
    "command that prepared it; the other shards are kept."
  )
