"""T5X's two layouts of checkpoints: Orbax's, and the older one, which the published T5 checkpoints have.

Runs save with Orbax itself, which needs all arrays of a checkpoint at once. The functions that write
here need a part of one array at a time, for conversions of models that do not fit into memory.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorstore as ts
from etils import epath
from flax import serialization

from rosetta_t5 import terminal
from rosetta_t5.checkpoints import checkpoint_folders
from rosetta_t5.checkpoints.arrays import state_dicts
from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray, as_stored_array
from rosetta_t5.checkpoints.formats import tensorstores
from rosetta_t5.files import expect_content, read_json_object

# The version of T5X's older layout.
VERSION = 3
# The msgpack file of small values and of the arrays' paths, in the older layout and in early Orbax.
_INDEX = "checkpoint"
_PLACEHOLDER = "PLACEHOLDER://"  # In early Orbax, the path of an array follows it.
_METADATA = "_METADATA"
_COMMITTED = "Checkpoint commit was successful"
_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_SMALL_BYTES = 100_000
_DICT_KEY = 2  # Orbax's number for a key of a dict.

Specs = dict[str, dict[str, Any]]


def read_orbax(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
  """Returns {flat name: array} of the Orbax checkpoint at `path`; the values are read later.

  Args:
    path: the checkpoint's folder, or the folder `state` in it.
  """
  # Orbax itself would read the outer folder's metadata, which may name handlers of T5X.
  folder = checkpoint_folders.state_path(path)
  has_metadata = (folder / _METADATA).exists()
  values: dict[str, StoredArray] = {}
  specs: Specs = {}
  if not has_metadata or (folder / _INDEX).exists():
    values, specs = _read_early_orbax(folder)
  if has_metadata:
    specs = _read_metadata(folder)
  return {**values, **tensorstores.open_arrays(specs)}


def _read_metadata(folder: epath.Path) -> Specs:
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
      database = {"driver": "ocdbt", "base": tensorstores.kvstore(folder), "path": inner + "/"}
      store = database if is_ocdbt else tensorstores.kvstore(tensorstores.inner_path(folder, inner))
      specs["/".join(keys)] = {"driver": driver, "kvstore": store}
  return specs


def _read_early_orbax(folder: epath.Path) -> tuple[dict[str, StoredArray], Specs]:
  """Returns the values, and TensorStore's specs of arrays, in the msgpack file of older versions."""
  values, specs = {}, {}
  tree = state_dicts.read_state_dict(folder / _INDEX)
  with expect_content(folder / _INDEX, "the arrays of a checkpoint"):
    if "_optimizer" in tree:  # T5X's first versions with Orbax stored the whole train state.
      tree = {**tree["_optimizer"], "flax_mutables": tree.get("flax_mutables")}
    flat = state_dicts.flatten_state_dict(tree)
  for name, value in flat.items():
    if isinstance(value, str) and value.startswith(_PLACEHOLDER):
      store = tensorstores.kvstore(
        tensorstores.inner_path(folder, value.removeprefix(_PLACEHOLDER))
      )
      specs[name] = {"driver": "zarr", "kvstore": store}
    elif isinstance(value, np.ndarray | int | float):
      values[name] = as_stored_array(value)
  return values, specs


def write_orbax(folder: str | os.PathLike[str], arrays: Mapping[str, StoredArray]) -> None:
  """Writes the Orbax checkpoint `folder`, which does not exist yet, array by array.

  Orbax's experimental partial saving writes another layout and keeps two copies of each array.

  Args:
    folder: the step's folder.
    arrays: the arrays by flat name.
  """
  root = epath.Path(folder)
  state = root / "state"
  state.mkdir(parents=True)
  started = time.time_ns()
  context = tensorstores.limited_cache()
  # Each commit to the database takes time, so all small arrays are written in one transaction.
  small_arrays = ts.Transaction()
  for name, array in terminal.track(arrays.items(), "writing", len(arrays), "arrays"):
    database = {
      "driver": "ocdbt",
      "base": tensorstores.kvstore(state),
      "path": name.replace("/", ".") + "/",
      "config": {"max_inline_value_bytes": 1024},
    }
    transaction = small_arrays if array.nbytes <= _SMALL_BYTES else None
    # Training runs do not compress their checkpoints either.
    tensorstores.write_array(
      database, array, compressor=None, transaction=transaction, context=context
    )
  small_arrays.commit_sync()
  (state / _METADATA).write_text(json.dumps(_tree_metadata(arrays)))
  (state / "commit_success.txt").write_text(_COMMITTED)
  step = {
    "item_handlers": {"state": _HANDLER},
    "metrics": {},
    "performance_metrics": {},
    "init_timestamp_nsecs": started,
    "commit_timestamp_nsecs": time.time_ns(),
    "custom_metadata": {},
  }
  (root / "_CHECKPOINT_METADATA").write_text(json.dumps(step))
  (root / "commit_success.txt").write_text(_COMMITTED)


def _tree_metadata(arrays: Iterable[str]) -> dict[str, Any]:
  entries = {}
  for name in arrays:
    keys = tuple(name.split("/"))
    entries[str(keys)] = {
      "key_metadata": [{"key": key, "key_type": _DICT_KEY} for key in keys],
      "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
    }
  return {
    "tree_metadata": entries,
    "use_ocdbt": True,
    "use_zarr3": False,
    "store_array_data_equal_to_fill_value": True,
    "custom_metadata": None,
  }


def read_older(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
  """Returns {flat name: array} of a checkpoint in T5X's older layout; the values are read later.

  Args:
    path: the checkpoint's folder, or the msgpack file in it.
  """
  given = epath.Path(path)
  index = given / _INDEX if given.is_dir() else given
  contents = state_dicts.read_state_dict(index)
  with expect_content(index, "the arrays of a checkpoint"):
    flat = state_dicts.flatten_state_dict(contents.get("optimizer", contents))
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


def write_older(folder: str | os.PathLike[str], arrays: Iterable[tuple[str, Any]]) -> None:
  """Writes the checkpoint `folder`, which does not exist yet, in T5X's older layout.

  Args:
    folder: the checkpoint's folder.
    arrays: pairs of a flat name and an array or None. An array of a single value becomes a part of the
      msgpack file, and so does None, which keeps the state's structure.
  """
  root = epath.Path(folder)
  root.mkdir(parents=True)
  index: dict[str, Any] = {}
  for name, value in arrays:
    array = None if value is None else as_stored_array(value)
    if array is None or array.size <= 1:
      index[name] = None if array is None else array.get()
      continue
    inner = name.replace("/", ".")
    store = tensorstores.kvstore(root / inner)
    spec = tensorstores.write_array(store, array, compressor={"id": "gzip", "level": 1})
    # The path is relative, and the bucket is T5X's placeholder, so that the checkpoint can be moved.
    bucket = {"bucket": "t5x-dummy-bucket"} if "bucket" in store else {}
    index[name] = {**spec, "kvstore": {**store, "path": inner + "/", **bucket}}
  contents = {"version": VERSION, "optimizer": state_dicts.unflatten_state_dict(index)}
  (root / _INDEX).write_bytes(serialization.msgpack_serialize(contents))
