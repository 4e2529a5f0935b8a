"""Arrays in TensorStore: read in part, never filled up with zeros where data is missing."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from rosetta_t5.checkpoints.arrays.lazy_arrays import Index, PendingRead, StoredArray

_GCS = "gs://"
_CACHE_BYTES = 100_000_000
_ALIGNMENT = 64


def kvstore(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns TensorStore's description of a folder, local or on gs://."""
  text = os.fspath(path)
  if text.startswith(_GCS):
    bucket, _, inner = text.removeprefix(_GCS).partition("/")
    return {"driver": "gcs", "bucket": bucket, "path": inner.rstrip("/") + "/"}
  return {"driver": "file", "path": os.path.abspath(text).rstrip("/") + "/"}


def url(path: str | os.PathLike[str]) -> str:
  """Returns a folder's URL, as OCDBT wants it."""
  text = os.fspath(path)
  return text if text.startswith(_GCS) else f"file://{os.path.abspath(text).rstrip('/')}/"


def open_arrays(specs: Mapping[str, Mapping[str, Any]]) -> dict[str, StoredArray]:
  """Returns {name: array} of what TensorStore has at `specs`, all opened at once; values are read later.

  Args:
    specs: driver and kvstore by name.
  """
  context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
  opening = {name: ts.open(dict(spec), open=True, context=context) for name, spec in specs.items()}
  stores = {name: future.result() for name, future in opening.items()}
  # Without a fill value zeros are stored like any others: a chunk that is not there is a loss.
  whole = [n for n, store in stores.items() if specs[n]["driver"] == "zarr" and _no_fill(store)]
  strict = {
    name: ts.open({**specs[name], "fill_missing_data_reads": False}, open=True, context=context)
    for name in whole
  }
  return {
    **{name: _array(store) for name, store in stores.items()},
    **{name: _array(future.result()) for name, future in strict.items()},
  }


def _no_fill(store: ts.TensorStore) -> bool:
  return store.fill_value is None


def _array(store: ts.TensorStore) -> StoredArray:
  dtype = store.dtype.numpy_dtype
  bits = dtype == np.uint16  # T5X's version 2 wrote bfloat16 so

  def begin(index: Index) -> PendingRead:
    part = store[index] if index else store
    values = _aligned(part.shape, dtype)
    written = ts.array(values).write(part)

    def finish() -> np.ndarray:
      written.result()
      return values.view(jnp.bfloat16) if bits else values

    return finish

  def read(index: Index) -> np.ndarray:
    return begin(index)()

  return StoredArray(store.shape, jnp.bfloat16 if bits else dtype, read, start_read_fn=begin)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """Returns memory that a CPU's device can use as it is; what is not aligned it would copy."""
  size = math.prod(shape) * dtype.itemsize
  memory = np.empty(size + _ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % _ALIGNMENT
  return memory[start : start + size].view(dtype).reshape(shape)
