"""Reads what Orbax wrote: today's checkpoints and those from before it had a file of metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath
from flax import serialization

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray, as_stored_array
from rosetta_t5.checkpoints.arrays.state_dicts import flatten_state_dict
from rosetta_t5.checkpoints.formats import tensorstores
from rosetta_t5.checkpoints.formats.tensorstores import open_arrays
from rosetta_t5.checkpoints.model_dir import checkpoint_folders

_AGGREGATE = "checkpoint"
_PLACEHOLDER = "PLACEHOLDER://"
_METADATA = "_METADATA"
_ARRAYS = ("jax.Array", "np.ndarray", "scalar")


def read_arrays(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
  """Returns {flat name: array} of the Orbax checkpoint at `path`; values are read later.

  Args:
    path: the checkpoint's folder, or that of its item `state`.
  """
  # The item's own folder is read, not the step's: T5X's step metadata names handlers of T5X.
  folder = checkpoint_folders.state_path(path)
  if not (folder / _METADATA).exists():
    return _read_aggregate(folder)
  metadata = json.loads((folder / _METADATA).read_text())
  aggregated = _aggregated_values(folder)
  base = _base_spec(folder, bool(metadata.get("use_zarr3")))
  specs = {}
  for entry in metadata["tree_metadata"].values():
    keys = [str(key["key"]) for key in entry["key_metadata"]]
    value = entry["value_metadata"]
    # Empty parts of an optimizer's state, None and text are no arrays.
    if value["value_type"] in _ARRAYS and not value.get("skip_deserialize"):
      specs["/".join(keys)] = _spec(base, folder, ".".join(keys))
  return {
    **{name: as_stored_array(value) for name, value in aggregated.items()},
    **open_arrays(specs),
  }


def _base_spec(folder: epath.Path, zarr3: bool) -> dict[str, Any]:
  driver = "zarr3" if zarr3 else "zarr"
  if (folder / "manifest.ocdbt").exists():
    return {"driver": driver, "kvstore": {"driver": "ocdbt", "base": tensorstores.url(folder)}}
  return {"driver": driver}


def _spec(base: Mapping[str, Any], folder: epath.Path, name: str) -> dict[str, Any]:
  if "kvstore" in base:
    return {**base, "kvstore": {**base["kvstore"], "path": name + "/"}}
  return {**base, "kvstore": tensorstores.kvstore(folder / name)}


def _aggregated_values(folder: epath.Path) -> dict[str, Any]:
  """Returns the small values that older versions kept together in one msgpack file."""
  file = folder / _AGGREGATE
  if not file.exists():
    return {}
  flat = flatten_state_dict(serialization.msgpack_restore(file.read_bytes()))
  return {
    name: value for name, value in flat.items() if isinstance(value, np.ndarray | int | float)
  }


def _read_aggregate(folder: epath.Path) -> dict[str, StoredArray]:
  """Reads a checkpoint whose msgpack file has values, or the names of the arrays' folders."""
  tree = serialization.msgpack_restore((folder / _AGGREGATE).read_bytes())
  values, specs = {}, {}
  for name, value in flatten_state_dict(_without_wrapper(tree)).items():
    if isinstance(value, str) and value.startswith(_PLACEHOLDER):
      place = tensorstores.kvstore(folder / value.removeprefix(_PLACEHOLDER))
      specs[name] = {"driver": "zarr", "kvstore": place}
    elif isinstance(value, np.ndarray | int | float):
      values[name] = as_stored_array(value)
  return {**values, **open_arrays(specs)}


def _without_wrapper(tree: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns the state dict inside what T5X's first Orbax versions stored: the train state itself."""
  if "_optimizer" in tree:
    mutables = tree.get("flax_mutables") or {}
    return {**tree["_optimizer"], **({"flax_mutables": mutables} if mutables else {})}
  return tree
