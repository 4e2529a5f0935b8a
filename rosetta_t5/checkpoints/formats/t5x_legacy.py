"""T5X's older layout, which the published T5 checkpoints have: a msgpack file and zarr arrays.

The file `checkpoint` contains small values and the paths of the arrays, one folder for each parameter.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath
from flax import serialization

from rosetta_t5.checkpoints.arrays import checksums
from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray, as_stored_array
from rosetta_t5.checkpoints.arrays.state_dicts import (
  flatten_state_dict,
  read_state_dict,
  unflatten_state_dict,
)
from rosetta_t5.checkpoints.formats import tensorstores
from rosetta_t5.checkpoints.model_dir import checkpoint_folders
from rosetta_t5.telemetry.json_files import expect_content

INDEX = "checkpoint"
_VERSION = 3


def read_arrays(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
  """Returns {flat name: array} of a checkpoint; the values are read later.

  Args:
    path: the checkpoint's folder, or the msgpack file in it.
  """
  given = epath.Path(path)
  index = given / INDEX if given.is_dir() else given
  contents = read_state_dict(index)
  with expect_content(index, "the arrays of a checkpoint"):
    flat = flatten_state_dict(contents.get("optimizer", contents))
    specs = {n: _spec(index.parent, value) for n, value in flat.items() if isinstance(value, dict)}
  values = {
    name: as_stored_array(value)
    for name, value in flat.items()
    if isinstance(value, np.ndarray | np.generic | int | float)
  }
  return {**values, **tensorstores.open_arrays(specs)}


def _spec(folder: epath.Path, value: Mapping[str, Any]) -> dict[str, Any]:
  # TensorStore before 0.1.14 wrote the path outside `kvstore`.
  inner = tensorstores.inner_path(folder, value["kvstore"].get("path") or value["path"])
  return {"driver": "zarr", "kvstore": tensorstores.kvstore(inner)}


class LegacyWriter:
  """Writes one checkpoint array by array, under a temporary name until `finish` renames its folder."""

  def __init__(self, folder: str | os.PathLike[str]):
    """Starts to write the checkpoint `folder` under a temporary name."""
    self.folder = epath.Path(folder)
    self.unfinished = self.folder.parent / f"{self.folder.name}.tmp-{os.getpid()}"
    self.unfinished.rmtree(missing_ok=True)
    self.unfinished.mkdir(parents=True)
    self._index: dict[str, Any] = {}
    self._checksums: dict[str, checksums.ArrayChecksums] = {}

  def write(self, name: str, array: Any) -> None:
    """Writes one array; an array of a single value becomes a part of the msgpack file."""
    array = as_stored_array(array)
    if array.size <= 1:
      self._index[name] = array.get()
      self._checksums[name] = checksums.compute(array)
      return
    inner = name.replace("/", ".")
    store = tensorstores.kvstore(self.unfinished / inner)
    spec, self._checksums[name] = tensorstores.write_array(
      store, array, compressor={"id": "gzip", "level": 1}
    )
    # The path is relative, and the bucket is T5X's placeholder, so that the checkpoint can be moved.
    bucket = {"bucket": "t5x-dummy-bucket"} if "bucket" in store else {}
    self._index[name] = {**spec, "kvstore": {**store, "path": inner + "/", **bucket}}

  def finish(self, empty: Mapping[str, Any] | None = None) -> epath.Path:
    """Writes the msgpack file, gives the folder its name and returns it.

    Args:
      empty: leaves without a value (None, {}), which keep the state's structure.
    """
    state = unflatten_state_dict({**(empty or {}), **self._index})
    contents = serialization.msgpack_serialize({"version": _VERSION, "optimizer": state})
    (self.unfinished / INDEX).write_bytes(contents)
    checksums.write(self.unfinished, self._checksums)
    self.unfinished.rename(self.folder)
    return self.folder


def remove_unfinished(directory: str | os.PathLike[str]) -> None:
  """Deletes the unfinished checkpoints of killed runs under `directory`."""
  for entry in checkpoint_folders.files_matching(directory, "checkpoint_*.tmp-*"):
    if re.fullmatch(r"checkpoint_\d+\.tmp-\d+", entry.name):
      entry.rmtree()
