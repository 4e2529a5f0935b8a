"""PyTorch's `pytorch_model.bin`, read without PyTorch and without running what is pickled in it.

The file is a zip archive: a pickle that names tensors, and one uncompressed member a storage.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.formats.safetensors_file import mapped

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


@dataclasses.dataclass(frozen=True)
class _StorageType:
  """Stands for a class such as torch.FloatStorage."""

  dtype: np.dtype


def read_arrays(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
  """Returns {name: array} of a file that `torch.save` wrote; values are read later.

  Raises:
    ValueError: the file is of PyTorch before 1.6, or its pickle asks for more than tensors.
  """
  if not zipfile.is_zipfile(path):
    raise ValueError(
      f"{path} is not a zip archive: PyTorch before 1.6 wrote it, or it is damaged. Load and save it "
      "once with PyTorch, or give the folder's model.safetensors"
    )
  with zipfile.ZipFile(path) as archive:
    members = {info.filename: info for info in archive.infolist()}
    root = next(name for name in members if name.endswith("data.pkl")).removesuffix("data.pkl")
    offsets = _Offsets(path, root, members)
    with archive.open(root + "data.pkl") as file:
      contents = _TensorUnpickler(file, offsets).load()
  state = contents.get("state_dict", contents)
  return {name: value for name, value in state.items() if isinstance(value, StoredArray)}


@dataclasses.dataclass
class _Offsets:
  """Where each storage begins in the file."""

  path: str | os.PathLike[str]
  root: str
  members: Mapping[str, zipfile.ZipInfo]

  def of(self, key: str) -> int:
    info = self.members[f"{self.root}data/{key}"]
    if info.compress_type != zipfile.ZIP_STORED:
      raise ValueError(f"{self.path}: {info.filename} is compressed, which torch.save never does")
    with open(self.path, "rb") as file:
      file.seek(info.header_offset)
      name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return info.header_offset + _LOCAL_HEADER.size + name + extra


class _TensorUnpickler(pickle.Unpickler):
  """Unpickles tensors, dicts and plain values; refuses everything else."""

  def __init__(self, file: Any, offsets: _Offsets):
    super().__init__(file, encoding="utf-8")
    self._offsets = offsets
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
      return _StorageType(_STORAGES[name])  # type: ignore[return-value]
    raise ValueError(
      f"{self._offsets.path} asks to run {module}.{name}, which a file of weights has no need of: "
      "it was not read. Save the model as safetensors"
    )

  def persistent_load(self, pid: Any) -> tuple[np.dtype, str]:
    _, kind, key, *_ = pid
    return kind.dtype, key

  def _rebuild_tensor(
    self, storage: tuple[np.dtype, str], first: int, shape: Any, strides: Any, *_: Any
  ) -> StoredArray:
    dtype, key = storage
    offset = self._offsets.of(key) + first * dtype.itemsize
    steps = tuple(step * dtype.itemsize for step in strides)
    return mapped(self._offsets.path, offset, shape, dtype, steps)
