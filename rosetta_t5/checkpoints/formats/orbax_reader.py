"""Reads Orbax's checkpoints, including those of early versions, which have no file of metadata."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from etils import epath

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray, as_stored_array
from rosetta_t5.checkpoints.arrays.state_dicts import flatten_state_dict, read_state_dict
from rosetta_t5.checkpoints.formats.tensorstores import inner_path, kvstore, open_arrays
from rosetta_t5.checkpoints.model_dir import checkpoint_folders
from rosetta_t5.files import expect_content, read_json_object

# Older versions wrote a msgpack file of small values and, for each array, a prefix and its path.
_AGGREGATE = "checkpoint"
_PLACEHOLDER = "PLACEHOLDER://"
_METADATA = "_METADATA"


def read_arrays(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
  """Returns {flat name: array} of the Orbax checkpoint at `path`; the values are read later.

  Args:
    path: the checkpoint's folder, or the folder `state` in it.
  """
  # Orbax itself would read the outer folder's metadata, which may name handlers of T5X.
  folder = checkpoint_folders.state_path(path)
  has_metadata = (folder / _METADATA).exists()
  values: dict[str, StoredArray] = {}
  specs: dict[str, dict[str, Any]] = {}
  if not has_metadata or (folder / _AGGREGATE).exists():
    values, specs = _read_aggregate(folder)
  if has_metadata:
    specs = _read_metadata(folder)
  return {**values, **open_arrays(specs)}


def _read_metadata(folder: epath.Path) -> dict[str, dict[str, Any]]:
  """Returns TensorStore's spec of each array in the file of metadata."""
  file = folder / _METADATA
  metadata = read_json_object(file)
  driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
  is_ocdbt = (folder / "manifest.ocdbt").exists()
  specs = {}
  with expect_content(file, "the arrays of a checkpoint"):
    for entry in metadata["tree_metadata"].values():
      keys = [str(key["key"]) for key in entry["key_metadata"]]
      value = entry["value_metadata"]
      # Other types are empty parts of an optimizer's state, None and text.
      is_array = value["value_type"] in ("jax.Array", "np.ndarray", "scalar")
      if not is_array or value.get("skip_deserialize"):
        continue
      inner = ".".join(keys)
      database = {"driver": "ocdbt", "base": kvstore(folder), "path": inner + "/"}
      store = database if is_ocdbt else kvstore(inner_path(folder, inner))
      specs["/".join(keys)] = {"driver": driver, "kvstore": store}
  return specs


def _read_aggregate(folder: epath.Path) -> tuple[dict[str, StoredArray], dict[str, dict[str, Any]]]:
  """Returns the values, and TensorStore's specs of arrays, in the msgpack file of older versions."""
  values, specs = {}, {}
  tree = read_state_dict(folder / _AGGREGATE)
  with expect_content(folder / _AGGREGATE, "the arrays of a checkpoint"):
    if "_optimizer" in tree:  # T5X's first versions with Orbax stored the whole train state.
      tree = {**tree["_optimizer"], "flax_mutables": tree.get("flax_mutables")}
    flat = flatten_state_dict(tree)
  for name, value in flat.items():
    if isinstance(value, str) and value.startswith(_PLACEHOLDER):
      store = kvstore(inner_path(folder, value.removeprefix(_PLACEHOLDER)))
      specs[name] = {"driver": "zarr", "kvstore": store}
    elif isinstance(value, np.ndarray | int | float):
      values[name] = as_stored_array(value)
  return values, specs
