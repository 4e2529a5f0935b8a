"""safetensors files, read in part and written tensor by tensor (no framework is needed)."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from rosetta_t5.checkpoints.arrays.lazy_arrays import Index, StoredArray

_DTYPES = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": jnp.dtype(jnp.bfloat16),
  "I64": np.dtype(np.int64),
  "I32": np.dtype(np.int32),
  "I16": np.dtype(np.int16),
  "I8": np.dtype(np.int8),
  "U8": np.dtype(np.uint8),
  "BOOL": np.dtype(np.bool_),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_WRITTEN_AT_ONCE = 64 * 1024 * 1024


def read_arrays(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
  """Returns {name: array} of a safetensors file; values are read later.

  Raises:
    ValueError: the file is damaged or holds dtypes unknown here.
  """
  with open(path, "rb") as file:
    (length,) = struct.unpack("<Q", file.read(8))
    header = json.loads(file.read(length))
  size, begin = os.path.getsize(path), 8 + length
  arrays = {}
  for name, entry in header.items():
    if name == "__metadata__":
      continue
    first, last = entry["data_offsets"]
    if begin + last > size:
      raise ValueError(f"{path} ends at byte {size}, before {name!r} does ({begin + last})")
    if entry["dtype"] not in _DTYPES:
      raise ValueError(f"{path}: {name!r} is of dtype {entry['dtype']}, none of {list(_DTYPES)}")
    arrays[name] = mapped(path, begin + first, entry["shape"], _DTYPES[entry["dtype"]])
  return arrays


def mapped(
  path: str | os.PathLike[str],
  offset: int,
  shape: Any,
  dtype: np.dtype,
  strides: tuple[int, ...] | None = None,
) -> StoredArray:
  """Returns the array that lies in a file at an offset.

  Args:
    path: the file.
    offset: in bytes.
    shape: the array's.
    dtype: the array's.
    strides: in bytes; None for C order.
  """
  shape = tuple(shape)

  def read(index: Index) -> np.ndarray:
    if 0 in shape:
      return np.zeros(shape, dtype)[index]
    steps = _c_strides(shape, dtype.itemsize) if strides is None else strides
    span = sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) + dtype.itemsize
    # The map is closed with the last array on it, so pages do not pile up.
    raw = np.memmap(path, np.uint8, "r", offset, (span,))
    flat = np.ndarray(shape, dtype, raw, 0, steps)
    return np.array(flat[index])

  return StoredArray(shape, dtype, read)


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
  steps = [itemsize]
  for size in shape[:0:-1]:
    steps.insert(0, steps[0] * size)
  return tuple(steps) if shape else ()


def write(path: str | os.PathLike[str], arrays: Mapping[str, StoredArray]) -> None:
  """Writes a safetensors file; of one tensor at a time, a part is in memory."""
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  offset = 0
  for name, array in arrays.items():
    span = [offset, offset + array.nbytes]
    header[name] = {"dtype": _CODES[array.dtype], "shape": list(array.shape), "data_offsets": span}
    offset = span[1]
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)
  with open(path, "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    for array in arrays.values():
      _write_array(file, array)
    file.flush()
    os.fsync(file.fileno())


def _write_array(file: Any, array: StoredArray) -> None:
  if not array.shape or not array.sliceable:
    file.write(np.ascontiguousarray(array.get()).tobytes())
    return
  rows = max(1, _WRITTEN_AT_ONCE * array.shape[0] // max(array.nbytes, 1))
  inner = (slice(None),) * (array.ndim - 1)
  for start in range(0, array.shape[0], rows):
    part = array.read((slice(start, start + rows), *inner))
    file.write(np.ascontiguousarray(part).tobytes())
