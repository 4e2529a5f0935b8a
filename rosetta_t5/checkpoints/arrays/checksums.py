"""Checksums of a checkpoint's values, which are verified when the values are read.

An array is divided into blocks, such as the parts that the processes of a run write. Each block has a
checksum, so that a process verifies what it reads without reading the rest. The checksums are XXH3,
which is several times as fast as a disk.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash
from etils import epath

from rosetta_t5.checkpoints.arrays.lazy_arrays import Index, PendingRead, StoredArray
from rosetta_t5.files import json_checksum, read_json_object, write_atomically

# Each process of a run writes the checksums of what it wrote into a file of its own.
_FILES = "checksums-"
_OWN_CHECKSUM = "xxh3_64"


class ChecksumError(ValueError):
  """Values differ from those that were saved, or their checksums are damaged."""


def checksum(values: bytes | np.ndarray) -> str:
  """Returns the XXH3 of bytes, or of an array's values in C order."""
  if isinstance(values, np.ndarray):
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
  return xxhash.xxh3_64_hexdigest(values)


@dataclasses.dataclass
class ArrayChecksums:
  """The checksums of one array.

  Attributes:
    shape: the array's shape.
    dtype: the name of its dtype.
    block: the shape of its blocks; those at the end of an axis may be smaller.
    blocks: checksums by the blocks' numbers, in C order.
  """

  shape: list[int]
  dtype: str
  block: list[int]
  blocks: dict[str, str] = dataclasses.field(default_factory=dict)

  @classmethod
  def of(cls, array: Any, block: Sequence[int]) -> ArrayChecksums:
    """Returns an object without checksums, for an array (`shape`, `dtype`) and the shape of its blocks."""
    return cls(
      [*map(int, array.shape)], np.dtype(array.dtype).name, [max(1, int(size)) for size in block]
    )

  def add(self, index: Index, values: np.ndarray) -> None:
    """Adds the block at `index`, whose slices may have no start."""
    self.blocks[self._number(index)] = checksum(values)

  def indices(self, region: Index | None = None) -> Iterator[Index]:
    """Yields the indices of all blocks, or of the blocks in a region that consists of whole blocks."""
    region = region or tuple(slice(0, length) for length in self.shape)
    starts = [range(r.start, r.stop, size) for r, size in zip(region, self.block, strict=True)]
    for corner in itertools.product(*starts):
      sizes = zip(corner, self.block, self.shape, strict=True)
      yield tuple(slice(start, min(start + size, length)) for start, size, length in sizes)

  def covering(self, index: Index) -> Index:
    """Returns the smallest region that consists of whole blocks and contains `index`."""
    return tuple(
      slice(part.start // size * size, min(-(-part.stop // size) * size, length))
      for part, size, length in zip(index, self.block, self.shape, strict=True)
    )

  def find_damage(self, region: Index, values: np.ndarray) -> Index | None:
    """Returns the first block of `region` whose values differ from those that were saved, or None.

    Args:
      region: a part that consists of whole blocks.
      values: the values of that part.
    """
    for block in self.indices(region):
      if checksum(values[_relative(block, region)]) != self.blocks.get(self._number(block)):
        return block
    return None

  def _number(self, block: Index) -> str:
    number = 0
    for part, size, length in zip(block, self.block, self.shape, strict=True):
      number = number * -(-length // size) + (part.start or 0) // size
    return str(number)


def compute(array: StoredArray) -> ArrayChecksums:
  """Reads an array, one block of rows at a time, and returns its checksums."""
  checksums = ArrayChecksums.of(array, array.row_block())
  for index in checksums.indices():
    checksums.add(index, array.read(index))
  return checksums


def write(
  folder: epath.PathLike,
  arrays: Mapping[str, ArrayChecksums],
  process: int = 0,
  processes: int = 1,
  *,
  with_run_facts: bool = False,
) -> None:
  """Writes the checksums of the arrays that a process stored in `folder`.

  Args:
    arrays: the checksums of this process's blocks, by the arrays' names.
    process: the index of this process.
    processes: how many processes store the arrays.
    with_run_facts: whether the checkpoint's run facts have a checksum too.
  """
  contents = {
    "arrays": {name: vars(array) for name, array in arrays.items()},
    "with_run_facts": with_run_facts,
  }
  text = json.dumps({**contents, _OWN_CHECKSUM: json_checksum(contents)})
  write_atomically(epath.Path(folder) / _file_name(process, processes), text)


def compute_and_write(folder: epath.PathLike, arrays: Mapping[str, StoredArray]) -> None:
  """Reads all arrays of a checkpoint and writes their checksums into `folder`."""
  write(folder, {name: compute(array) for name, array in arrays.items()})


def read(folder: epath.PathLike, with_run_facts: bool) -> dict[str, ArrayChecksums] | None:
  """Returns the checksums of the arrays in `folder` by name; None if they were saved without.

  Args:
    with_run_facts: whether the checkpoint's run facts have a checksum. Then the arrays have, too.

  Raises:
    ChecksumError: a file is damaged or missing.
  """
  names = [file.name for file in epath.Path(folder).iterdir() if file.name.startswith(_FILES)]
  if not names and not with_run_facts:
    return None
  processes = int(min(names).removesuffix(".json").rpartition("-")[2]) if names else 1
  arrays: dict[str, ArrayChecksums] = {}
  for process in range(processes):
    contents = _read_file(epath.Path(folder) / _file_name(process, processes))
    if contents["with_run_facts"] and not with_run_facts:
      raise ChecksumError("_CHECKPOINT_METADATA lacks the checksum of the run facts")
    for name, array in contents["arrays"].items():
      part = ArrayChecksums(**array)
      arrays.setdefault(name, part).blocks.update(part.blocks)
  return arrays


def _file_name(process: int, processes: int) -> str:
  return f"{_FILES}{process:05}-of-{processes:05}.json"


def _read_file(path: epath.Path) -> dict[str, Any]:
  if not path.exists():
    raise ChecksumError(f"the checksums {path} are missing")
  try:
    contents = read_json_object(path)
  except ValueError as error:
    raise ChecksumError(f"{path} is damaged: {error}") from error
  if contents.pop(_OWN_CHECKSUM, None) != json_checksum(contents):
    raise ChecksumError(f"{path} is damaged: its own checksum does not match")
  return contents


def verified(
  arrays: Mapping[str, StoredArray], checksums: Mapping[str, ArrayChecksums], folder: epath.PathLike
) -> dict[str, StoredArray]:
  """Returns arrays that verify their values when they are read, and raise ChecksumError.

  Raises:
    ChecksumError: the names, shapes or dtypes differ from those that were saved.
  """
  if missing := sorted(checksums.keys() - arrays.keys()):
    raise ChecksumError(f"the array {missing[0]} is missing in {folder}")
  if unknown := sorted(arrays.keys() - checksums.keys()):
    raise ChecksumError(f"the array {unknown[0]} has no checksum in {folder}")
  for name, array in arrays.items():
    saved, found = checksums[name], ArrayChecksums.of(array, array.shape)
    if (saved.shape, saved.dtype) != (found.shape, found.dtype):
      raise ChecksumError(
        f"the array {name} in {folder} was saved as {saved.dtype}{saved.shape}, but is "
        f"{found.dtype}{found.shape}"
      )
  return {
    name: _verified(array, checksums[name], f"{name} in {folder}") for name, array in arrays.items()
  }


def _verified(array: StoredArray, checksums: ArrayChecksums, label: str) -> StoredArray:
  # The parts that several devices need may be in one block, which is then read once.
  regions: weakref.WeakValueDictionary[str, _Region] = weakref.WeakValueDictionary()

  def start_read(index: Index) -> PendingRead:
    covering = checksums.covering(index)
    region = regions.get(str(covering))
    if region is None:
      pending = array.start_read(covering)
      region = regions[str(covering)] = _Region(checksums, covering, pending, label)
    return functools.partial(region.get, index)

  def read(index: Index) -> np.ndarray:
    return start_read(index)()

  return StoredArray(array.shape, array.dtype, read, array.sliceable, start_read_fn=start_read)


@dataclasses.dataclass(eq=False)
class _Region:
  """A part of an array that is being read: `index`, which consists of whole blocks.

  It is verified by the thread that waits for it, while TensorStore's threads read what comes next.
  """

  checksums: ArrayChecksums
  index: Index
  pending: PendingRead
  label: str

  @functools.cached_property
  def values(self) -> np.ndarray:
    """The verified values."""
    values = self.pending()
    damaged = self.checksums.find_damage(self.index, values)
    if damaged is not None:
      part = ", ".join(f"{part.start}:{part.stop}" for part in damaged)
      raise ChecksumError(f"the array {self.label} has changed since it was saved, at [{part}]")
    return values

  def get(self, index: Index) -> np.ndarray:
    """Returns the values at `index`; a part is copied, so that the whole region can be freed."""
    return self.values if index == self.index else self.values[_relative(index, self.index)].copy()


def _relative(index: Index, region: Index) -> Index:
  """Returns the position in `region` of the part of an array at `index`."""
  pairs = zip(index, region, strict=True)
  return tuple(slice(i.start - r.start, i.stop - r.start) for i, r in pairs)
