"""Prepared tokens as one long stream that can be read anywhere."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rosetta_t5.data.prepared.prepare import MANIFEST, VOCABULARY


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns a prepared folder's manifest.

  Raises:
    ValueError: there is none: no prepared data, or not complete.
  """
  path = pathlib.Path(folder) / MANIFEST
  if path.exists():
    return json.loads(path.read_text())
  done = len(list(path.parent.glob("shards/*.json")))
  state = f"{done} shards are done, but not all" if done else "it is no prepared data"
  raise ValueError(
    f"There is no {path}: {state}. Prepare it: rosetta-t5 prepare --input FILES --vocab MODEL "
    f"--out {folder}"
  )


class TokenStream:
  """All tokens of a split, its documents one after the other.

  Attributes:
    size: how many tokens.
    digest: of all its tokens.
    manifest: the folder's.
  """

  def __init__(self, folder: str | os.PathLike[str], split: str):
    """Opens nothing but the manifest and the index.

    Raises:
      ValueError: no prepared data, no such split in it, or a shard is missing or of another size.
    """
    self.folder = pathlib.Path(folder)
    self.manifest = read_manifest(folder)
    facts = self.manifest["splits"].get(split) or {"shards": []}
    if not facts["shards"]:
      given = [name for name, of_split in self.manifest["splits"].items() if of_split["shards"]]
      raise ValueError(f"{folder} has no split '{split}'; it has {', '.join(map(repr, given))}")
    self._kind = np.dtype("<u2" if self.manifest["bytes_a_token"] == 2 else "<u4")
    self._files = [self.folder / shard["file"] for shard in facts["shards"]]
    for path, shard in zip(self._files, facts["shards"], strict=True):
      _check_shard(path, shard)
    self._starts = np.cumsum([0, *(shard["tokens"] for shard in facts["shards"])])
    self.size = int(self._starts[-1])
    told = "".join(shard["sha256_of_tokens"] for shard in facts["shards"])
    self.digest = hashlib.sha256(told.encode()).hexdigest()
    self._indices: dict[int, np.ndarray] = {}
    self._readers: dict[int, Any] = {}
    self._lock = threading.Lock()

  @property
  def vocabulary(self) -> str:
    """The vocabulary's file."""
    return str(self.folder / VOCABULARY)

  def encode(self, text: str) -> list[int]:
    """Returns a text's tokens."""
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=self.vocabulary).encode(text)

  def __getstate__(self) -> dict[str, Any]:
    """Open files stay behind when this goes to another process."""
    return {**self.__dict__, "_indices": {}, "_readers": {}, "_lock": None}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state, _lock=threading.Lock())

  def read(self, starts: Sequence[int], count: int) -> np.ndarray:
    """Returns the tokens [len(starts), count] from each start on, int32; over all borders.

    Raises:
      ValueError: a shard is damaged.
    """
    wanted: dict[int, set[int]] = {}
    plan = [list(self._places(start, count)) for start in starts]
    for shard, records, _ in (place for places in plan for place in places):
      wanted.setdefault(shard, set()).update(records)
    found = {
      (shard, record): tokens
      for shard, records in wanted.items()
      for record, tokens in self._records(shard, sorted(records))
    }
    rows = np.empty((len(plan), count), np.int32)
    for row, places in zip(rows, plan, strict=True):
      parts = [
        np.concatenate([found[shard, record] for record in records])[inside]
        for shard, records, inside in places
      ]
      row[:] = np.concatenate(parts)
    return rows

  def _places(self, start: int, count: int) -> Iterator[tuple[int, range, slice]]:
    """Yields where tokens lie: shard, its records, and the part of these records' tokens."""
    while count > 0:
      shard = int(np.searchsorted(self._starts, start, side="right")) - 1
      ends = self._index(shard)
      inside = start - int(self._starts[shard])
      here = min(count, int(self._starts[shard + 1]) - start)
      first, last = np.searchsorted(ends, [inside + 1, inside + here])
      skip = inside - int(ends[first - 1])
      yield shard, range(int(first) - 1, int(last)), slice(skip, skip + here)
      start, count = start + here, count - here

  def _records(self, shard: int, numbers: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Reads records, all in one call, for each call costs as much as many records."""
    path, ends = self._files[shard], self._index(shard)
    try:
      with self._lock:  # the reader's position is its own
        records = self._reader(shard).read(list(numbers))
    except (RuntimeError, ValueError, IndexError) as error:
      raise ValueError(_damaged(path, str(error).splitlines()[0][:200])) from error
    for number, record in zip(numbers, records, strict=True):
      tokens = np.frombuffer(record, self._kind)
      if len(tokens) != int(ends[number + 1]) - int(ends[number]):
        raise ValueError(_damaged(path, f"record {number} has {len(tokens)} tokens"))
      yield number, tokens

  def _index(self, shard: int) -> np.ndarray:
    """Where each record begins and ends in its shard; stays on disk until it is looked at."""
    if shard not in self._indices:
      path = self._files[shard].with_suffix(".ends.npy")
      self._indices[shard] = np.load(path, mmap_mode="r")
    return self._indices[shard]

  def _reader(self, shard: int) -> Any:
    from array_record.python import array_record_module

    if shard not in self._readers:
      self._readers[shard] = array_record_module.ArrayRecordReader(
        str(self._files[shard]), "readahead_buffer_size:0,max_parallelism:0"
      )
    return self._readers[shard]


def _check_shard(path: pathlib.Path, facts: dict[str, Any]) -> None:
  if not path.exists():
    raise ValueError(_damaged(path, "it is missing"))
  if path.stat().st_size != facts["bytes"]:
    raise ValueError(_damaged(path, f"{path.stat().st_size} bytes in place of {facts['bytes']}"))


def _damaged(path: pathlib.Path, what: str) -> str:
  return (
    f"The prepared shard {path} is damaged ({what}). The command that prepared it mends it: "
    "delete the file and run it again; the other shards are kept."
  )
