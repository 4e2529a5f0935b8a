"""Writes a checkpoint as Orbax does, array by array, for conversions that must not hold the model.

Runs save with Orbax itself; what is written here is what it would have written for numpy arrays.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

import tensorstore as ts
from etils import epath

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.formats import tensorstores
from rosetta_t5.checkpoints.formats.t5x_legacy import CHUNK_BYTES, chunk_shape, write_in_parts

_COMMITTED = "Checkpoint commit was successful"
_SMALL_BYTES = 100_000
_CACHE_BYTES = 100_000_000
_DICT_KEY = 2  # Orbax's number for a key of a dict


def write(
  folder: str | os.PathLike[str],
  arrays: Mapping[str, StoredArray],
  custom_metadata: Mapping[str, Any] | None = None,
) -> None:
  """Writes the checkpoint `folder`, which is not there yet.

  Args:
    folder: the step's folder.
    arrays: by flat name; one part of one array is in memory at a time.
    custom_metadata: small JSON facts.
  """
  root = epath.Path(folder)
  state = root / "state"
  state.mkdir(parents=True)
  started = time.time_ns()
  # Each commit of the database costs time, so small arrays share one.
  together, context = (
    ts.Transaction(),
    ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}}),
  )
  for name, array in arrays.items():
    transaction = together if array.nbytes <= _SMALL_BYTES else None
    _write_array(state, name.replace("/", "."), array, transaction, context)
  together.commit_sync()
  (state / "_METADATA").write_text(json.dumps(_tree_metadata(arrays)))
  (state / "commit_success.txt").write_text(_COMMITTED)
  handler = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
  step = {
    "item_handlers": {"state": handler},
    "metrics": {},
    "performance_metrics": {},
    "init_timestamp_nsecs": started,
    "commit_timestamp_nsecs": time.time_ns(),
    "custom_metadata": dict(custom_metadata or {}),
  }
  (root / "_CHECKPOINT_METADATA").write_text(json.dumps(step))
  (root / "commit_success.txt").write_text(_COMMITTED)


def _write_array(
  state: epath.Path,
  name: str,
  array: StoredArray,
  transaction: ts.Transaction | None,
  context: ts.Context,
) -> None:
  spec = {
    "driver": "zarr",
    "dtype": array.dtype.name,
    "kvstore": {
      "driver": "ocdbt",
      "base": tensorstores.url(state),
      "path": name + "/",
      "config": {"max_inline_value_bytes": 1024},
    },
    "metadata": {
      "shape": list(array.shape),
      "chunks": chunk_shape(array.shape, CHUNK_BYTES // array.dtype.itemsize),
      "compressor": None,  # as runs save
    },
  }
  write_in_parts(
    ts.open(spec, create=True, transaction=transaction, context=context).result(), array
  )


def _tree_metadata(arrays: Mapping[str, StoredArray]) -> dict[str, Any]:
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
