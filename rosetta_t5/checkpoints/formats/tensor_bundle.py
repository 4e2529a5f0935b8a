"""TensorFlow's checkpoint files (`PREFIX.index`, `PREFIX.data-…`), read without TensorFlow.

The index is a sorted table of LevelDB's format whose values are protocol buffers; the data files hold
the tensors' bytes as they are.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from etils import epath

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.formats import protobuf
from rosetta_t5.checkpoints.formats.safetensors_file import mapped

_MAGIC = 0xDB4775248B80FB57
_FOOTER = 48
# TensorFlow's numbers of the dtypes that weights have.
_DTYPES = {
  1: np.dtype(np.float32),
  2: np.dtype(np.float64),
  3: np.dtype(np.int32),
  4: np.dtype(np.uint8),
  6: np.dtype(np.int8),
  9: np.dtype(np.int64),
  10: np.dtype(np.bool_),
  14: jnp.dtype(jnp.bfloat16),
  19: np.dtype(np.float16),
}
_LATEST = re.compile(r'^model_checkpoint_path:\s*"(.*)"', re.MULTILINE)


def find_prefix(path: str | os.PathLike[str]) -> str:
  """Returns the prefix of the checkpoint at `path`: itself, or the latest in a folder.

  Raises:
    ValueError: there is no TensorFlow checkpoint.
  """
  given = epath.Path(path)
  if epath.Path(f"{given}.index").exists():
    return os.fspath(given)
  folder = given if given.is_dir() else given.parent
  state = folder / "checkpoint"
  if state.exists() and (match := _LATEST.search(state.read_bytes().decode("utf-8", "replace"))):
    prefix = os.path.join(os.fspath(folder), os.path.basename(match[1]))
    if epath.Path(f"{prefix}.index").exists():
      return prefix
  # A folder that was copied in part may lack the file that names the latest.
  found = sorted(folder.glob("*.ckpt-*.index"), key=lambda file: _step(file.name))
  if not found:
    raise ValueError(
      f"{path} is not a TensorFlow checkpoint: there is no file PREFIX.index such as "
      "model.ckpt-1000000.index"
    )
  return os.fspath(found[-1]).removesuffix(".index")


def _step(name: str) -> int:
  digits = re.findall(r"\d+", name)
  return int(digits[-1]) if digits else 0


def read_arrays(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
  """Returns {TensorFlow's name: array} of the checkpoint at `path`; values are read later.

  Text and other things that are no numbers are left out.
  """
  prefix = find_prefix(path)
  table = epath.Path(f"{prefix}.index").read_bytes()
  entries = dict(_entries(table, prefix))
  shards = dict(protobuf.fields(entries.pop(b"", b""))).get(1, 1)
  arrays = {}
  for key, value in entries.items():
    fields = list(protobuf.fields(value))
    single = dict(fields)
    name = key.decode("utf-8", "replace")
    if any(number == 7 for number, _ in fields):
      raise ValueError(f"{prefix}: {name!r} is stored in slices, which is not read here")
    if single.get(1) in _DTYPES:
      file = f"{prefix}.data-{single.get(3, 0):05}-of-{shards:05}"
      shape = _shape(single.get(2, b""))
      arrays[name] = mapped(file, single.get(4, 0), shape, _DTYPES[single[1]])
  return arrays


def _shape(message: bytes) -> tuple[int, ...]:
  return tuple(
    dict(protobuf.fields(dim)).get(1, 0) for number, dim in protobuf.fields(message) if number == 2
  )


def _entries(table: bytes, prefix: str) -> Iterator[tuple[bytes, bytes]]:
  """Yields the (key, value) pairs of a table."""
  if len(table) < _FOOTER or struct.unpack("<Q", table[-8:])[0] != _MAGIC:
    raise ValueError(f"{prefix}.index is damaged: it does not end as a table does")
  place = len(table) - _FOOTER
  for _ in range(2):  # the handle of the meta index, which is not needed
    _, place = protobuf.varint(table, place)
  for _, handle in _block(table, *_handle(table, place)):
    yield from _block(table, *_handle(handle, 0))


def _handle(data: bytes, place: int) -> tuple[int, int]:
  offset, place = protobuf.varint(data, place)
  size, _ = protobuf.varint(data, place)
  return offset, size


def _block(table: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
  """Yields a block's pairs; a key shares its beginning with the key before it."""
  if table[offset + size]:
    raise ValueError(
      "the index of this TensorFlow checkpoint is compressed, which is not read here"
    )
  block = table[offset : offset + size]
  (restarts,) = struct.unpack("<I", block[-4:])
  end = size - 4 * (restarts + 1)
  place, key = 0, b""
  while place < end:
    shared, place = protobuf.varint(block, place)
    fresh, place = protobuf.varint(block, place)
    length, place = protobuf.varint(block, place)
    key = key[:shared] + block[place : place + fresh]
    place += fresh
    yield key, block[place : place + length]
    place += length
