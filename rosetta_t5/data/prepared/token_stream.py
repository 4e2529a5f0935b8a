"""Prepared tokens as one long stream that can be read anywhere."""

from __future__ import annotations

import json
import os
import pathlib
import threading
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
    self._indices: dict[int, np.ndarray] = {}
    self._readers: dict[int, Any] = {}
    self._lock = threading.Lock()

  @property
  def vocabulary(self) -> str:
    """The vocabulary's file."""
    return str(self.folder / VOCABULARY)

  def __getstate__(self) -> dict[str, Any]:
    """Open files stay behind when this goes to another process."""
    return {**self.__dict__, "_indices": {}, "_readers": {}, "_lock": None}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state, _lock=threading.Lock())

  def read(self, start: int, count: int) -> np.ndarray:
    """Returns the tokens [count] from `start` on, int32; over documents' and shards' borders."""
    parts = []
    while count > 0:
      shard = int(np.searchsorted(self._starts, start, side="right")) - 1
      first = start - int(self._starts[shard])
      here = min(count, int(self._starts[shard + 1]) - start)
      parts.append(self._read_shard(shard, first, here))
      start, count = start + here, count - here
    return (parts[0] if len(parts) == 1 else np.concatenate(parts)).astype(np.int32)

  def _read_shard(self, shard: int, start: int, count: int) -> np.ndarray:
    ends = self._index(shard)
    first = int(np.searchsorted(ends, start, side="right")) - 1
    last = int(np.searchsorted(ends, start + count, side="left"))
    records = self._records(shard, first, last)
    tokens = np.frombuffer(b"".join(records), self._kind)
    skip = start - int(ends[first])
    if len(tokens) < skip + count:
      raise ValueError(_damaged(self._files[shard], f"records {first} to {last} are too short"))
    return tokens[skip : skip + count]

  def _records(self, shard: int, first: int, last: int) -> list[bytes]:
    try:
      with self._lock:  # the reader's position is its own
        return self._reader(shard).read(list(range(first, last)))
    except (RuntimeError, ValueError, IndexError) as error:
      text = f"records {first} to {last}: {str(error).splitlines()[0][:200]}"
      raise ValueError(_damaged(self._files[shard], text)) from error

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
