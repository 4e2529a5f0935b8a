"""Reads PyTorch's `pytorch_model.bin` without PyTorch, and without executing its pickle.

The file is a zip archive of a pickle that describes the tensors, and of one uncompressed member for
each tensor's storage.
"""

from __future__ import annotations

import collections
import io
import math
import os
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

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
_LOCAL_SIGNATURE = b"PK\3\4"
_LOCAL_HEADER = struct.Struct("<4s22xHH")


class _Storage(NamedTuple):
  """`length` values of one dtype in the file, from byte `start` on."""

  dtype: np.dtype
  start: int
  length: int


def read_arrays(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
  """Returns {name: array} of a file that `torch.save` wrote; the values are read later.

  Raises:
    ValueError: the file is damaged, was written by PyTorch before 1.6, or contains more than tensors.
  """
  if not zipfile.is_zipfile(path):
    raise ValueError(
      f"{path} must be a zip archive: this one is damaged, or was written by PyTorch before 1.6. "
      "Load and save it once with PyTorch, or use the folder's model.safetensors"
    )
  try:
    with zipfile.ZipFile(path) as archive:
      contents = _TensorUnpickler(_Archive(os.fspath(path), archive)).load()
    if not isinstance(contents, dict):
      raise ValueError(f"it must contain a dict of tensors, got a {type(contents).__name__}")
    state = contents.get("state_dict", contents)
    return {str(name): x for name, x in state.items() if isinstance(x, StoredArray)}
  except Exception as error:  # Unpickling may raise any class of errors.
    raise ValueError(f"{path} cannot be read: {str(error) or type(error).__name__}") from error


class _Archive:
  """The members of the archive, which must be uncompressed and within the file."""

  def __init__(self, path: str, archive: zipfile.ZipFile):
    self.path = path
    self._members = {info.filename: info for info in archive.infolist()}
    root = next((n.removesuffix("data.pkl") for n in self._members if n.endswith("data.pkl")), None)
    if root is None:
      raise ValueError(
        f"it must contain data.pkl, as files that torch.save writes do, got {[*self._members][:3]}. "
        "Save the weights again with PyTorch"
      )
    self._root = root

  def find(self, name: str) -> tuple[int, int]:
    """Returns the byte of the file at which a member begins, and its size in bytes."""
    info = self._members[self._root + name]
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
      raise ValueError(f"{info.filename} must not be compressed. Save the file again with PyTorch")
    with open(self.path, "rb") as file:
      file.seek(info.header_offset)
      signature, *sizes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    start = info.header_offset + _LOCAL_HEADER.size + sum(sizes)
    if signature != _LOCAL_SIGNATURE or start + info.file_size > os.path.getsize(self.path):
      raise ValueError(f"{info.filename} is outside the file, which is damaged")
    return start, info.file_size

  def read(self, name: str) -> bytes:
    """Returns the content of a member."""
    start, size = self.find(name)
    with open(self.path, "rb") as file:
      file.seek(start)
      return file.read(size)


class _TensorUnpickler(pickle.Unpickler):
  """Unpickles tensors, dicts and plain values; raises ValueError for everything else."""

  def __init__(self, archive: _Archive):
    pickled = archive.read("data.pkl")
    _check_memo(pickled)
    super().__init__(io.BytesIO(pickled), encoding="utf-8")
    self._archive = archive
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
      f"it would execute {module}.{name}, which weights do not need. Save the model as safetensors"
    )

  def persistent_load(self, pid: Any) -> _Storage:
    _, dtype, key, *_ = pid
    start, size = self._archive.find(f"data/{key}")
    return _Storage(dtype, start, size // dtype.itemsize)

  def _rebuild_tensor(
    self, storage: _Storage, first: int, shape: Any, strides: Any, *_: Any
  ) -> StoredArray:
    dtype, start, length = storage
    numbers, size = (first, *shape, *strides), math.prod(shape)
    last = first + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    is_possible = all(type(number) is int and number >= 0 for number in numbers) and size <= length
    if not is_possible or (size and last >= length):
      raise ValueError(
        f"a tensor of shape {shape}, strides {strides} and offset {first} exceeds its storage of "
        f"{length} values"
      )
    path = self._archive.path
    byte_strides = [stride * dtype.itemsize for stride in strides]

    def read(index: Index) -> np.ndarray:
      if not size:
        return np.zeros(shape, dtype)[index]
      # Each read maps the file anew, so that the pages of earlier reads are not kept in memory.
      memory = np.memmap(path, np.uint8, "r", offset=start + first * dtype.itemsize)
      return np.array(np.ndarray(shape, dtype, memory, 0, byte_strides)[index])

    return StoredArray(shape, dtype, read)


def _check_memo(pickled: bytes) -> None:
  """Refuses memo indices that no pickle of this size needs.

  Python allocates a table up to the largest index.
  """
  for opcode, number, _ in pickletools.genops(pickled):
    if number is not None and "PUT" in opcode.name and number > len(pickled):
      raise ValueError(f"its pickle is damaged: the memo index {number} exceeds its size")
