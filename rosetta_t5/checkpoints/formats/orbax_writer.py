"""Writes an Orbax checkpoint array by array, for conversions of models that do not fit into memory.

Runs save with Orbax itself, which needs all arrays of a checkpoint at once. Its experimental partial
saving could add array after array, but writes another layout and keeps two copies of each.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

import tensorstore as ts
from etils import epath

from rosetta_t5 import terminal
from rosetta_t5.checkpoints.arrays import checksums
from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.formats.tensorstores import kvstore, limited_cache, write_array
from rosetta_t5.checkpoints.model_dir import checkpoint_folders

_COMMITTED = "Checkpoint commit was successful"
_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_SMALL_BYTES = 100_000
_DICT_KEY = 2  # Orbax's number for a key of a dict.


def write(folder: str | os.PathLike[str], arrays: Mapping[str, StoredArray]) -> None:
  """Writes the checkpoint `folder`, which does not exist yet.

  Args:
    folder: the step's folder.
    arrays: the arrays by flat name; a part of one array is in memory at a time.
  """
  root = epath.Path(folder)
  state = root / "state"
  state.mkdir(parents=True)
  started = time.time_ns()
  context = limited_cache()
  # Each commit to the database takes time, so all small arrays are written in one transaction.
  small_arrays = ts.Transaction()
  stored: dict[str, checksums.ArrayChecksums] = {}
  for name, array in terminal.track(arrays.items(), "writing", len(arrays), "arrays"):
    database = {
      "driver": "ocdbt",
      "base": kvstore(state),
      "path": name.replace("/", ".") + "/",
      "config": {"max_inline_value_bytes": 1024},
    }
    transaction = small_arrays if array.nbytes <= _SMALL_BYTES else None
    # Training runs do not compress their checkpoints either.
    _, stored[name] = write_array(
      database, array, compressor=None, transaction=transaction, context=context
    )
  small_arrays.commit_sync()
  checksums.write(state, stored, with_run_facts=True)
  (state / "_METADATA").write_text(json.dumps(_tree_metadata(arrays)))
  (state / "commit_success.txt").write_text(_COMMITTED)
  step = {
    "item_handlers": {"state": _HANDLER},
    "metrics": {},
    "performance_metrics": {},
    "init_timestamp_nsecs": started,
    "commit_timestamp_nsecs": time.time_ns(),
    "custom_metadata": checkpoint_folders.with_checksum({}),
  }
  (root / "_CHECKPOINT_METADATA").write_text(json.dumps(step))
  (root / "commit_success.txt").write_text(_COMMITTED)


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
