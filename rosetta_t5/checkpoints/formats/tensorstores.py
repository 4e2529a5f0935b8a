"""Reads and writes arrays with TensorStore, in parts.

A missing chunk is an error, unless the array has a fill value.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from etils import epath

from rosetta_t5.checkpoints.arrays.lazy_arrays import Index, StoredArray

# T5X's chunk size: large enough for remote storage, small enough to be read in parts.
_CHUNK_BYTES = 64 * 1024 * 1024
_CACHE_BYTES = 100_000_000
_ALIGNMENT = 64


def kvstore(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns TensorStore's description of a folder, which is local or on gs://."""
  text = os.fspath(path)
  if text.startswith("gs://"):
    bucket, _, inner = text.removeprefix("gs://").partition("/")
    return {"driver": "gcs", "bucket": bucket, "path": inner.rstrip("/") + "/"}
  return {"driver": "file", "path": os.path.abspath(text) + "/"}


def inner_path(folder: epath.Path, path: str) -> epath.Path:
  """Returns the location of a relative path that a file in `folder` names.

  Raises:
    ValueError: the path leads outside the folder.
  """
  if not isinstance(path, str) or ".." in path.split("/"):
    raise ValueError(f"the files of {folder} must be inside this folder, got the path {path!r}")
  return folder / path.strip("/")


def limited_cache() -> ts.Context:
  """Returns a context whose cache has a bounded size."""
  return ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})


def open_arrays(specs: Mapping[str, Mapping[str, Any]]) -> dict[str, StoredArray]:
  """Returns {name: array} of the arrays that `specs` describe; their values are read later.

  Args:
    specs: TensorStore's driver and kvstore of each array. All arrays are opened at once.
  """
  context = limited_cache()

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
  # TensorStore aborts the process if it cannot allocate a chunk.
  chunk = tuple(size or 1 for size in store.chunk_layout.read_chunk.shape or ())
  if math.prod(chunk) * dtype.itemsize > max(store.size * dtype.itemsize, _CHUNK_BYTES):
    raise ValueError(
      f"{store.kvstore.path if store.kvstore else ''} is damaged: its chunks of shape {chunk} are "
      f"larger than the array, whose shape is {store.shape}"
    )

  def read(index: Index) -> np.ndarray:
    part = store[index] if index else store
    values = _allocate_aligned(part.shape, dtype)
    ts.array(values).write(part).result()
    return values.view(jnp.bfloat16) if is_bfloat16 else values

  return StoredArray(store.shape, jnp.bfloat16 if is_bfloat16 else dtype, read)


def _allocate_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """Returns an array that JAX's CPU devices can use without a copy, because of its alignment."""
  size = math.prod(shape) * dtype.itemsize
  memory = np.empty(size + _ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % _ALIGNMENT
  return memory[start : start + size].view(dtype).reshape(shape)


def write_array(
  store: Mapping[str, Any], array: StoredArray, compressor: Any, **options: Any
) -> dict[str, Any]:
  """Writes an array in zarr's format, one row of chunks at a time, and returns its spec.

  Args:
    store: TensorStore's description of where to write.
    array: the array.
    compressor: zarr's description of a compressor, or None.
    **options: passed to `tensorstore.open`.
  """
  chunks = chunk_shape(array.shape, _CHUNK_BYTES // array.dtype.itemsize)
  metadata = {"shape": list(array.shape), "chunks": chunks, "compressor": compressor}
  spec = {"driver": "zarr", "dtype": array.dtype.name, "kvstore": dict(store), "metadata": metadata}
  target = ts.open(spec, create=True, **options).result()
  if not (array.shape and array.sliceable):
    target.write(array.get()).result()
    return spec
  for start in range(0, array.shape[0], max(1, chunks[0])):
    rows = (slice(start, min(start + chunks[0], array.shape[0])), *[slice(None)] * (array.ndim - 1))
    target[rows].write(array.read(rows)).result()
  return spec


def chunk_shape(shape: Sequence[int], limit: int) -> list[int]:
  """Returns the shape of equal chunks of at most `limit` values, split along the largest dimensions."""
  chunks = list(shape)
  while math.prod(chunks) > limit:
    largest = max(range(len(chunks)), key=chunks.__getitem__)
    chunks[largest] = next(
      size for size in range(chunks[largest] - 1, 0, -1) if shape[largest] % size == 0
    )
  return chunks
