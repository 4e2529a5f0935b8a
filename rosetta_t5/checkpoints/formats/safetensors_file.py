"""Reads safetensors files in part, and writes them tensor by tensor."""

from __future__ import annotations

import functools
import json
import os
import struct
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from rosetta_t5.checkpoints.arrays.lazy_arrays import Index, StoredArray
from rosetta_t5.terminal import progress

_CODES = {
  "float64": "F64",
  "float32": "F32",
  "float16": "F16",
  "bfloat16": "BF16",
  "int64": "I64",
  "int32": "I32",
  "int16": "I16",
  "int8": "I8",
  "uint8": "U8",
  "bool": "BOOL",
}
_DTYPES = {code: jnp.dtype(name) for name, code in _CODES.items()}


def read_arrays(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
  """Returns {name: array} of a safetensors file; the values are read later.

  Raises:
    ValueError: the file is damaged, or has dtypes that numpy lacks.
  """
  arrays = {}
  try:
    with safe_open(path, "numpy") as file:
      for name in file.offset_keys():
        part = file.get_slice(name)
        if part.get_dtype() not in _DTYPES:
          raise ValueError(
            f"{path}: the dtype of {name} must be one of {', '.join(_DTYPES)}, got "
            f"{part.get_dtype()}"
          )
        read = functools.partial(_read, path, name)
        arrays[name] = StoredArray(part.get_shape(), _DTYPES[part.get_dtype()], read)
  except (SafetensorError, OSError) as error:  # which do not name the file
    raise ValueError(f"{path} is damaged: {error}") from error
  return arrays


def _read(path: str | os.PathLike[str], name: str, index: Index) -> np.ndarray:
  # Each read maps the file anew, so that the pages of earlier reads are not kept in memory.
  try:
    with safe_open(path, "numpy") as file:
      return np.asarray(file.get_slice(name)[index or ...])
  except (SafetensorError, OSError) as error:
    raise ValueError(f"{name} in {path} cannot be read: {error}") from error


def write(path: str | os.PathLike[str], arrays: Mapping[str, StoredArray]) -> None:
  """Writes a safetensors file; only a part of one tensor is in memory at a time."""
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  offset = 0
  for name, array in arrays.items():
    span = [offset, offset + array.nbytes]
    code = _CODES[array.dtype.name]
    header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": span}
    offset = span[1]
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)
  with open(path, "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    for array in progress.track(arrays.values(), "writing", len(arrays), "arrays"):
      for part in array.parts():
        file.write(np.ascontiguousarray(array.read(part)).tobytes())
    file.flush()
    os.fsync(file.fileno())
