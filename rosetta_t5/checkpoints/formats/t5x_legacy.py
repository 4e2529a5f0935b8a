"""T5X's layout before Orbax: a msgpack file `checkpoint`, and beside it one zarr array a parameter.

The published T5 checkpoints have it. A folder is written under another name and renamed at the end.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from etils import epath
from flax import serialization

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray, as_stored_array
from rosetta_t5.checkpoints.arrays.state_dicts import flatten_state_dict, unflatten_state_dict
from rosetta_t5.checkpoints.formats import tensorstores

INDEX = "checkpoint"
VERSION = 3
# T5X's chunks: large enough for distant storage, small enough to be read in parts.
CHUNK_BYTES = 64 * 1024 * 1024


def index_file(path: str | os.PathLike[str]) -> epath.Path:
  """Returns the msgpack file of the checkpoint at `path`, its folder or the file itself."""
  given = epath.Path(path)
  return given / INDEX if given.is_dir() else given


def read_arrays(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
  """Returns {flat name: array} of the checkpoint at `path`; values are read later."""
  index = index_file(path)
  contents = serialization.msgpack_restore(index.read_bytes())
  state = contents.get("optimizer", contents)
  flat = flatten_state_dict(state)
  specs = {n: _spec(index.parent, value) for n, value in flat.items() if isinstance(value, dict)}
  values = {
    name: as_stored_array(value)
    for name, value in flat.items()
    if isinstance(value, np.ndarray | np.generic | int | float)
  }
  return {**values, **tensorstores.open_arrays(specs)}


def _spec(folder: epath.Path, value: Mapping[str, Any]) -> dict[str, Any]:
  # TensorStore before 0.1.14 wrote the path outside `kvstore`.
  inner = value["kvstore"].get("path") or value["path"]
  return {"driver": value["driver"], "kvstore": tensorstores.kvstore(folder / inner.strip("/"))}


class LegacyWriter:
  """Writes one checkpoint array by array; nothing has its name before `finish`."""

  def __init__(self, folder: str | os.PathLike[str]):
    """Begins the checkpoint that will be `folder`."""
    self.folder = epath.Path(folder)
    self.unfinished = self.folder.parent / f"{self.folder.name}.tmp-{os.getpid()}"
    if self.unfinished.exists():
      self.unfinished.rmtree()
    self.unfinished.mkdir(parents=True)
    self._index: dict[str, Any] = {}

  def write(self, name: str, array: Any) -> None:
    """Writes one array; a scalar or an array of one value goes into the msgpack file."""
    array = as_stored_array(array)
    if array.size <= 1:
      self._index[name] = array.get()
      return
    inner = name.replace("/", ".")
    chunks = chunk_shape(array.shape, CHUNK_BYTES // array.dtype.itemsize)
    metadata = {
      "shape": list(array.shape),
      "chunks": chunks,
      "compressor": {"id": "gzip", "level": 1},
    }
    dtype = jnp.dtype(array.dtype).name
    spec = {
      "driver": "zarr",
      "dtype": dtype,
      "kvstore": tensorstores.kvstore(self.unfinished / inner),
      "metadata": metadata,
    }
    write_in_parts(ts.open(spec, create=True).result(), array)
    # The path is relative, so that the checkpoint can be moved.
    driver = "gcs" if os.fspath(self.folder).startswith("gs://") else "file"
    place = {"driver": driver, "path": inner + "/"}
    if driver == "gcs":
      place["bucket"] = "t5x-dummy-bucket"
    self._index[name] = {"driver": "zarr", "dtype": dtype, "kvstore": place, "metadata": metadata}

  def finish(self, empty: Mapping[str, Any] | None = None) -> epath.Path:
    """Writes the msgpack file, gives the folder its name and returns it.

    Args:
      empty: leaves without a value (None, {}), which keep the state's structure.
    """
    state = unflatten_state_dict({**(empty or {}), **self._index})
    contents = serialization.msgpack_serialize({"version": VERSION, "optimizer": state})
    (self.unfinished / INDEX).write_bytes(contents)
    self.unfinished.rename(self.folder)
    return self.folder


def write_in_parts(store: ts.TensorStore, array: StoredArray) -> None:
  """Writes an array into its store, a row of chunks in memory at a time."""
  if not array.shape or not array.sliceable:
    store.write(array.get()).result()
    return
  rows = int((store.chunk_layout.write_chunk.shape or array.shape)[0] or 1)
  for start in range(0, array.shape[0], rows):
    part = (slice(start, start + rows), *(slice(None) for _ in array.shape[1:]))
    values = array.read(part)
    store[start : start + len(values)].write(values).result()


def remove_unfinished(directory: str | os.PathLike[str]) -> None:
  """Deletes what saves that were killed have left under `directory`."""
  for entry in epath.Path(directory).glob("checkpoint_*.tmp-*"):
    if re.fullmatch(r"checkpoint_\d+\.tmp-\d+", entry.name):
      entry.rmtree()


def chunk_shape(shape: Sequence[int], target: int) -> list[int]:
  """Returns the shape of equal chunks of at most `target` values, cut along the largest dimensions."""
  chunks = list(shape)
  while math.prod(chunks) > max(target, 1):
    largest = max(range(len(chunks)), key=chunks.__getitem__)
    chunks[largest] = next(
      size for size in range(chunks[largest] - 1, 0, -1) if shape[largest] % size == 0
    )
  return chunks
