"""T5X's older layout, which the published T5 checkpoints have: a msgpack file and zarr arrays.

The file `checkpoint` contains small values and the paths of the arrays, one folder for each parameter.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
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
from rosetta_t5.files import expect_content

INDEX = "checkpoint"
VERSION = 3


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


def write(folder: str | os.PathLike[str], arrays: Iterable[tuple[str, Any]]) -> None:
  """Writes the checkpoint `folder`, which does not exist yet, array by array.

  Args:
    folder: the checkpoint's folder.
    arrays: pairs of a flat name and an array or None. An array of a single value becomes a part of the
      msgpack file, and so does None, which keeps the state's structure.
  """
  root = epath.Path(folder)
  root.mkdir(parents=True)
  index: dict[str, Any] = {}
  stored: dict[str, checksums.ArrayChecksums] = {}
  for name, value in arrays:
    array = None if value is None else as_stored_array(value)
    if array is None:
      index[name] = None
    elif array.size <= 1:
      index[name], stored[name] = array.get(), checksums.compute(array)
    else:
      inner = name.replace("/", ".")
      store = tensorstores.kvstore(root / inner)
      compressor = {"id": "gzip", "level": 1}
      spec, stored[name] = tensorstores.write_array(store, array, compressor=compressor)
      # The path is relative, and the bucket is T5X's placeholder, so that the checkpoint can be moved.
      bucket = {"bucket": "t5x-dummy-bucket"} if "bucket" in store else {}
      index[name] = {**spec, "kvstore": {**store, "path": inner + "/", **bucket}}
  contents = {"version": VERSION, "optimizer": unflatten_state_dict(index)}
  (root / INDEX).write_bytes(serialization.msgpack_serialize(contents))
  checksums.write(root, stored)
