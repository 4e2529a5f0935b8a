"""The tokens of a prepared split, as one long stream with random access."""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
import os
import pathlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rosetta_t5 import manifest as file_manifest
from rosetta_t5.data.prepared.prepare import MANIFEST, VOCABULARY
from rosetta_t5.data.vocabularies.sentencepiece_models import load_sentencepiece
from rosetta_t5.files import read_json_object


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns the manifest of a prepared folder.

  Raises:
    ValueError: the folder has no manifest, because it is incomplete or is not prepared data; or the
      manifest is damaged.
  """
  path = pathlib.Path(folder) / MANIFEST
  if path.exists():
    file_manifest.verify(folder, {MANIFEST}.__contains__)
    return read_json_object(path)
  done = len(list(path.parent.glob("shards/*.json")))
  state = f"only {done} shards are complete" if done else "the folder is not prepared data"
  raise ValueError(
    f"There is no {path}: {state}. Prepare it: rosetta-t5 prepare --input FILES --vocab MODEL "
    f"--out {folder}"
  )


def losses_of_folders(folders: Iterable[str | os.PathLike[str]]) -> collections.Counter[str]:
  """Returns what texts lost when the folders were prepared; older folders do not say it. See `count_lost`."""
  losses = (collections.Counter(read_manifest(folder).get("losses", {})) for folder in folders)
  return sum(losses, collections.Counter())


class DamagedRecordError(ValueError):
  """A record of a shard cannot be read; other records may still be intact."""


class TokenStream:
  """All tokens of a split, one document after the other.

  Attributes:
    folder: the prepared folder.
    manifest: the folder's manifest.
    size: number of tokens.
    digest: a hash of all tokens.
  """

  def __init__(self, folder: str | os.PathLike[str], split: str):
    """Reads the manifest; shards and their indices are opened when they are needed.

    Raises:
      ValueError: the folder is not prepared data or lacks the split; or a shard is missing, or its
        size differs from the manifest.
    """
    self.folder = pathlib.Path(folder)
    self._split = split
    self.manifest = read_manifest(folder)
    file_manifest.verify(folder)
    splits = {name: facts["shards"] for name, facts in self.manifest["splits"].items()}
    shards = splits.get(split)
    if not shards:
      existing = ", ".join(repr(name) for name in splits if splits[name])
      raise ValueError(f"{folder} has no split '{split}'; it has {existing}")
    dtype = np.dtype(f"<u{self.manifest['bytes_a_token']}")
    self._shards = [_Shard(self.folder, dtype, facts) for facts in shards]
    self._starts = np.cumsum([0, *(facts["tokens"] for facts in shards)])
    self.size = int(self._starts[-1])
    digests = "".join(facts["sha256_of_tokens"] for facts in shards)
    self.digest = hashlib.sha256(digests.encode()).hexdigest()

  def __reduce__(self) -> Any:
    """Makes another process that receives the stream open the files itself."""
    return TokenStream, (self.folder, self._split)

  @property
  def vocabulary(self) -> str:
    """The path of the vocabulary with which the folder was prepared."""
    return str(self.folder / VOCABULARY)

  def encode(self, text: str) -> list[int]:
    """Tokenizes a text with the vocabulary."""
    return load_sentencepiece(self.vocabulary).encode(text)

  def read(self, starts: Sequence[int], count: int) -> np.ndarray:
    """Returns `count` tokens from each start on, as int32 [len(starts), count].

    Raises:
      DamagedRecordError: a record is damaged.
      ValueError: the index of a shard is damaged, or the split has fewer tokens.
    """
    if max(starts, default=0) + count > self.size:
      raise ValueError(
        f"{self.folder} has only {self.size} tokens in its split '{self._split}', which is less than one "
        f"row of {count}: prepare more text"
      )
    rows = [list(self._parts(start, count)) for start in starts]
    wanted: dict[int, set[int]] = collections.defaultdict(set)
    for shard, records, _ in itertools.chain.from_iterable(rows):
      wanted[shard].update(records)
    tokens = {shard: self._shards[shard].read(sorted(records)) for shard, records in wanted.items()}

    def join(shard: int, records: range, positions: slice) -> np.ndarray:
      return np.concatenate([tokens[shard][record] for record in records])[positions]

    joined = [np.concatenate([join(*part) for part in parts]) for parts in rows]
    return np.stack(joined).astype(np.int32)

  def _parts(self, start: int, count: int) -> Iterator[tuple[int, range, slice]]:
    """Yields where `count` tokens are stored: in each shard the records, and the slice of these."""
    while count > 0:
      shard = int(np.searchsorted(self._starts, start, side="right")) - 1
      ends = self._shards[shard].ends
      offset = start - int(self._starts[shard])
      size = min(count, int(self._starts[shard + 1]) - start)
      first, last = np.searchsorted(ends, [offset + 1, offset + size])
      skip = offset - int(ends[first - 1])
      yield shard, range(int(first) - 1, int(last)), slice(skip, skip + size)
      start, count = start + size, count - size


class _Shard:
  """An ArrayRecord file of tokens with its index; both are opened when they are first needed."""

  def __init__(self, folder: pathlib.Path, dtype: np.dtype, facts: Mapping[str, Any]):
    path, size = folder / facts["file"], facts["bytes"]
    if not path.exists():
      raise ValueError(_damaged_text(path, "it is missing"))
    if path.stat().st_size != size:
      raise ValueError(_damaged_text(path, f"{path.stat().st_size} bytes instead of {size}"))
    self._path, self._dtype, self._tokens = path, dtype, facts["tokens"]
    self._lock = threading.Lock()

  @functools.cached_property
  def ends(self) -> np.ndarray:
    """0, and the position in the shard's tokens at which each record ends; mapped into memory."""
    path = self._path.with_suffix(".ends.npy")
    return np.load(path, mmap_mode="r")

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
      raise DamagedRecordError(_damaged_text(self._path, reason)) from error
    tokens = {n: np.frombuffer(r, self._dtype) for n, r in zip(numbers, records, strict=True)}
    for number, found in tokens.items():
      if len(found) != int(self.ends[number + 1]) - int(self.ends[number]):
        reason = f"record {number} has {len(found)} tokens"
        raise DamagedRecordError(_damaged_text(self._path, reason))
    return tokens


def _damaged_text(path: pathlib.Path, reason: str) -> str:
  return (
    f"The prepared shard {path} is damaged ({reason}). To repair it, delete the file and repeat the "
    "command that prepared it; the other shards are kept."
  )
