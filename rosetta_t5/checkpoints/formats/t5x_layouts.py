"""T5X's two layouts of checkpoints: Orbax's, and the older one, which the published T5 checkpoints have.

Runs save all arrays of a checkpoint at once. The functions that write here need one array at a time, for
conversions of models that do not fit into memory.
"""

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from flax import serialization

from rosetta_t5 import terminal
from rosetta_t5.checkpoints.arrays import state_dicts
from rosetta_t5.checkpoints.arrays.lazy_arrays import Index, StoredArray, as_stored_array
from rosetta_t5.files import expect_content, read_json_object

STATE_ITEM = "state"
# The version of T5X's older layout.
VERSION = 3
# The msgpack file of small values and of the arrays' paths, in the older layout and in early Orbax.
INDEX = "checkpoint"
PLACEHOLDER = "PLACEHOLDER://"  # In early Orbax, the path of an array follows it.
METADATA = "_METADATA"
# T5X's chunk size: large enough for remote storage, small enough to be read in parts.
_CHUNK_BYTES = 64 * 1024 * 1024
_LIMITED_CACHE = {"cache_pool": {"total_bytes_limit": 100_000_000}}
_ALIGNMENT = 64

Specs = dict[str, dict[str, Any]]


def state_path(path: epath.PathLike) -> epath.Path:
  """Returns the folder that contains the arrays of the Orbax checkpoint at `path`.

  `path` may be the checkpoint's folder or, as in T5X's tools, the folder of its item `state`.
  """
  folder = epath.Path(path).absolute()  # Orbax requires absolute paths; MODEL_DIR may be relative
  return folder / STATE_ITEM if (folder / STATE_ITEM).is_dir() else folder


def read_arrays(path: epath.PathLike) -> dict[str, StoredArray]:
  """Returns {flat name: array} of a checkpoint in one of T5X's layouts; the values are read later.

  Args:
    path: the checkpoint's folder, the folder `state` in it, or the msgpack file of the older layout.
  """
  # Orbax itself would read the outer folder's metadata, which may name handlers of T5X.
  folder = state_path(path)
  index = folder / INDEX if folder.is_dir() else folder
  has_metadata = (folder / METADATA).exists()
  values, specs = _read_index(index) if index.exists() or not has_metadata else ({}, {})
  return {**values, **_open_arrays(_read_metadata(folder) if has_metadata else specs)}


def _read_metadata(folder: epath.Path) -> Specs:
  """Returns TensorStore's spec of each array in the file of metadata."""
  file = folder / METADATA
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
      spec = _zarr(folder, inner, driver)
      if is_ocdbt:
        spec["kvstore"] = {"driver": "ocdbt", "base": _kvstore(folder), "path": inner + "/"}
      specs["/".join(keys)] = spec
  return specs


def _read_index(index: epath.Path) -> tuple[dict[str, StoredArray], Specs]:
  """Returns the values in a msgpack file, and TensorStore's specs of the arrays that it names."""
  values, specs = {}, {}
  with expect_content(index, "the arrays of a checkpoint"):
    tree = serialization.msgpack_restore(index.read_bytes())
    if "_optimizer" in tree:  # T5X's first versions with Orbax stored the whole train state.
      tree = {**tree["_optimizer"], "flax_mutables": tree.get("flax_mutables")}
    for name, value in state_dicts.flatten_state_dict(tree.get("optimizer", tree)).items():
      if isinstance(value, dict):
        # TensorStore before 0.1.14 wrote the path outside `kvstore`.
        specs[name] = _zarr(index.parent, value["kvstore"].get("path") or value["path"])
      elif isinstance(value, str) and value.startswith(PLACEHOLDER):
        specs[name] = _zarr(index.parent, value.removeprefix(PLACEHOLDER))
      elif isinstance(value, np.ndarray | np.generic | int | float):
        values[name] = as_stored_array(value)
  return values, specs


class _StoredArrayHandler(ocp.type_handlers.NumpyHandler):
  """Lets Orbax write arrays one at a time, so that the model need not fit into memory."""

  async def serialize(self, values: Any, infos: Any, args: Any = None) -> list[Any]:
    rows = zip(values, infos, args, strict=True)
    for value, info, arg in terminal.track(rows, "writing", len(values), "arrays"):
      for written in await super().serialize([value.get()], [info], [arg]):
        written.result()
    return []


def write_orbax(folder: epath.PathLike, arrays: Mapping[str, StoredArray]) -> None:
  """Writes the Orbax checkpoint `folder`, which does not exist yet, array by array.

  Args:
    folder: the step's folder.
    arrays: the arrays by flat name.
  """
  handlers = ocp.type_handlers.create_type_handler_registry(
    (StoredArray, _StoredArrayHandler()),
    (jax.Array, ocp.type_handlers.ArrayHandler()),  # Orbax warns where it is missing.
  )
  # Training runs do not compress their checkpoints either.
  state = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=handlers)
  save_args = dict.fromkeys(arrays, ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES))
  tree, tree_args = map(state_dicts.unflatten_state_dict, (arrays, save_args))
  with ocp.Checkpointer(
    ocp.CompositeCheckpointHandler(state=state),
    # Written in place: the caller renames the folder, and removes it after an error.
    temporary_path_class=ocp.path.atomicity.CommitFileTemporaryPath,
  ) as checkpointer:
    item = ocp.args.PyTreeSave(tree, save_args=tree_args)
    checkpointer.save(epath.Path(folder).absolute(), ocp.args.Composite(state=item))


def write_older(folder: epath.PathLike, arrays: Mapping[str, Any]) -> None:
  """Writes the checkpoint `folder`, which does not exist yet, in T5X's older layout.

  Args:
    folder: the checkpoint's folder.
    arrays: arrays or None by flat name. An array of a single value becomes a part of the
      msgpack file, and so does None, which keeps the state's structure.
  """
  root = epath.Path(folder)
  root.mkdir(parents=True)
  index: dict[str, Any] = {}
  for name, value in terminal.track(arrays.items(), "writing", len(arrays), "arrays"):
    array = None if value is None else as_stored_array(value)
    if array is None or array.size <= 1:
      index[name] = None if array is None else array.get()
      continue
    inner = name.replace("/", ".")
    store = _kvstore(root / inner)
    rows, *row = array.shape
    chunks = [max(1, min(rows, _CHUNK_BYTES * rows // array.nbytes)), *row]
    compressor = {"id": "gzip", "level": 1}
    metadata = {"shape": [*array.shape], "chunks": chunks, "compressor": compressor}
    spec = {"driver": "zarr", "dtype": array.dtype.name, "kvstore": store, "metadata": metadata}
    ts.open(spec, create=True).result().write(array.get()).result()
    # The path is relative, and the bucket is T5X's placeholder, so that the checkpoint can be moved.
    bucket = {"bucket": "t5x-dummy-bucket"} if "bucket" in store else {}
    index[name] = {**spec, "kvstore": {**store, "path": inner + "/", **bucket}}
  contents = {"version": VERSION, "optimizer": state_dicts.unflatten_state_dict(index)}
  (root / INDEX).write_bytes(serialization.msgpack_serialize(contents))


def _kvstore(path: epath.PathLike) -> dict[str, Any]:
  """Returns TensorStore's description of a folder, which is local or on gs://."""
  text = os.fspath(path)
  if text.startswith("gs://"):
    bucket, _, inner = text.removeprefix("gs://").partition("/")
    return {"driver": "gcs", "bucket": bucket, "path": inner.rstrip("/") + "/"}
  return {"driver": "file", "path": os.path.abspath(text) + "/"}


def _zarr(folder: epath.Path, path: str, driver: str = "zarr") -> dict[str, Any]:
  """Returns TensorStore's spec of the array at a relative path that a file in `folder` names."""
  return {"driver": driver, "kvstore": _kvstore(folder / path.strip("/"))}


def _open_arrays(specs: Mapping[str, Mapping[str, Any]]) -> dict[str, StoredArray]:
  """Returns {name: array} of the arrays that `specs` describe; their values are read later.

  Args:
    specs: TensorStore's driver and kvstore of each array. All arrays are opened at once.
  """
  context = ts.Context(_LIMITED_CACHE)

  def open_all(specs: Mapping[str, Mapping[str, Any]], **options: Any) -> dict[str, ts.TensorStore]:
    futures = {
      name: ts.open({**spec, **(options if spec["driver"] == "zarr" else {})}, context=context)
      for name, spec in specs.items()
    }
    return {name: future.result() for name, future in futures.items()}

  # A zarr array without a fill value has all its chunks, so a missing chunk is an error.
  stores = open_all(specs, fill_missing_data_reads=False)
  stores |= open_all({n: specs[n] for n, store in stores.items() if store.fill_value is not None})
  return {name: _as_array(store) for name, store in stores.items()}


def _as_array(store: ts.TensorStore) -> StoredArray:
  dtype = store.dtype.numpy_dtype
  # Version 2 of T5X's layout stores bfloat16 as its bits.
  is_bfloat16 = dtype == np.uint16

  def read(index: Index) -> np.ndarray:
    part = store[index] if index else store
    # JAX's CPU devices use memory of this alignment without a copy.
    memory = np.empty(part.size * dtype.itemsize + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    values = memory[start : start + part.size * dtype.itemsize].view(dtype).reshape(part.shape)
    ts.array(values).write(part).result()
    return values.view(jnp.bfloat16) if is_bfloat16 else values

  return StoredArray(store.shape, jnp.bfloat16 if is_bfloat16 else dtype, read)
