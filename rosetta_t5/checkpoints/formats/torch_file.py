"""Reads PyTorch's `pytorch_model.bin` without PyTorch, and without executing its pickle.

The file is a zip archive of a pickle that describes the tensors, and of one uncompressed member for
each tensor's storage.
"""

from __future__ import annotations

import collections
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from typing import IO, Any

import jax.numpy as jnp
import numpy as np

from rosetta_t5.checkpoints.arrays.lazy_arrays import Index, StoredArray

_STORAGES = {
  "DoubleStorage": np.dtype(np.float64),
  "FloatStorage": np.dtype(np.float32),
  "HalfStorage": np.dtype(np.float16),
  "BFloat16Storage": jnp.dtype(jnp.bfloat16),
  "LongStorage": np.dtype(np.int64),
  "IntStorage": np.dtype(np.int32),
  "ShortStorage": np.dtype(np.int16),
  "CharStorage": np.dtype(np.int8),
  "ByteStorage": np.dtype(np.uint8),
  "BoolStorage": np.dtype(np.bool_),
}
_LOCAL_HEADER = struct.Struct("<26xHH")


def read_arrays(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
  """Returns {name: array} of a file that `torch.save` wrote; the values are read later.

  Raises:
    ValueError: the file was not written by PyTorch 1.6 or later, or contains more than tensors.
  """
  if not zipfile.is_zipfile(path):
    raise ValueError(
      f"{path} must be a zip archive: this one is damaged, or was written by PyTorch before 1.6. "
      "Load and save it once with PyTorch, or use the folder's model.safetensors"
    )
  with zipfile.ZipFile(path) as archive:
    names = archive.namelist()
    root = next((n.removesuffix("data.pkl") for n in names if n.endswith("data.pkl")), None)
    if root is None:
      raise ValueError(
        f"{path} must contain data.pkl, as files that torch.save writes do, got {names[:3]}. Save the "
        "weights again with PyTorch"
      )
    with archive.open(root + "data.pkl") as file:
      contents = _TensorUnpickler(file, archive, root).load()
  state = contents.get("state_dict", contents)
  return {name: value for name, value in state.items() if isinstance(value, StoredArray)}


class _TensorUnpickler(pickle.Unpickler):
  """Unpickles tensors, dicts and plain values; raises ValueError for everything else."""

  def __init__(self, file: IO[bytes], archive: zipfile.ZipFile, root: str):
    super().__init__(file, encoding="utf-8")
    self._archive = archive
    self._path = str(archive.filename)
    self._root = root
    self._allowed: dict[tuple[str, str], Any] = {
      ("collections", "OrderedDict"): collections.OrderedDict,
      ("torch._utils", "_rebuild_tensor_v2"): self._rebuild_tensor,
      ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
      ("torch", "Size"): tuple,
    }

  def find_class(self, module: str, name: str) -> Callable[..., Any]:
    if (module, name) in self._allowed:
      allowed: Callable[..., Any] = self._allowed[module, name]
      return allowed
    if module in ("torch", "torch.storage") and name in _STORAGES:
      return _STORAGES[name]
    raise ValueError(
      f"{self._path} was not read, because it would execute {module}.{name}, which weights do "
      "not need. Save the model as safetensors"
    )

  def persistent_load(self, pid: Any) -> tuple[np.dtype, str]:
    _, dtype, key, *_ = pid
    return dtype, key

  def _rebuild_tensor(
    self, storage: tuple[np.dtype, str], first: int, shape: Any, strides: Any, *_: Any
  ) -> StoredArray:
    dtype, key = storage
    offset = self._find_storage(key) + first * dtype.itemsize
    byte_strides = [stride * dtype.itemsize for stride in strides]

    def read(index: Index) -> np.ndarray:
      # Each read maps the file anew, so that the pages of earlier reads are not kept in memory.
      memory = np.memmap(self._path, np.uint8, "r", offset)
      return np.array(np.ndarray(shape, dtype, memory, 0, byte_strides)[index])

    return StoredArray(shape, dtype, read)

  def _find_storage(self, key: str) -> int:
    """Returns the byte of the file at which a storage begins."""
    info = self._archive.getinfo(f"{self._root}data/{key}")
    if info.compress_type != zipfile.ZIP_STORED:
      raise ValueError(
        f"{self._path}: {info.filename} must not be compressed. Save the file again with PyTorch"
      )
    with open(self._path, "rb") as file:
      file.seek(info.header_offset)
      name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return info.header_offset + _LOCAL_HEADER.size + name + extra
