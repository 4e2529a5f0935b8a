"""Arrays that stay on disk until they are read, in full or in part."""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

Index = tuple[slice, ...]
ReadFn = Callable[[Index], np.ndarray]
# How much of an array is read at a time where the whole is not needed.
_PART_BYTES = 64 << 20


class LazyArray:
  """An array with a known shape and dtype whose values are read on demand (T5X's class).

  Attributes:
    executor: the threads in which `get_async` reads.
    shape: the shape.
    dtype: the dtype of the values that `get` returns.
    ndim: the number of dimensions.
    size: the number of values.
    nbytes: the size in memory once the array is read.
  """

  executor = futures.ThreadPoolExecutor(thread_name_prefix="lazy-array")

  def __init__(self, shape: Sequence[int], dtype: Any, get_fn: Callable[[], Any]):
    """Creates a lazy array.

    Args:
      shape: the shape.
      dtype: the dtype of the values that `get` returns.
      get_fn: reads the values; it may block.
    """
    self.shape = tuple(int(size) for size in shape)
    self.dtype = jnp.dtype(dtype)
    self.ndim = len(self.shape)
    self.size = math.prod(self.shape)
    self.nbytes = self.size * self.dtype.itemsize
    self._get_fn = get_fn

  def astype(self, dtype: Any) -> Self:
    """Returns the same array, which is converted to `dtype` when it is read."""
    return type(self)(self.shape, dtype, self._get_fn)

  def get_async(self) -> asyncio.Future:
    """Starts to read the values in a thread."""
    return asyncio.wrap_future(self.executor.submit(self.get))

  def get(self) -> np.ndarray:
    """Reads and returns the values."""
    return np.asarray(self._get_fn()).astype(self.dtype, copy=False)

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    """Lets numpy functions take a lazy array, for example in users' state transformations."""
    return np.asarray(self.get(), dtype)


class StoredArray(LazyArray):
  """A lazy array that can be read in part.

  Attributes:
    sliceable: whether reading a part is cheaper than reading the whole array.
  """

  def __init__(self, shape: Sequence[int], dtype: Any, read_fn: ReadFn, sliceable: bool = True):
    """Creates a stored array.

    Args:
      shape: the shape.
      dtype: the dtype of the values that are returned.
      read_fn: reads the part at a tuple of slices.
      sliceable: see the attribute.
    """
    super().__init__(shape, dtype, lambda: read_fn(tuple(slice(0, size) for size in self.shape)))
    self._read_fn = read_fn
    self.sliceable = sliceable

  def astype(self, dtype: Any) -> Self:
    """Returns the same array, which is converted to `dtype` when it is read."""
    return type(self)(self.shape, dtype, self._read_fn, self.sliceable)

  def read(self, index: Index) -> np.ndarray:
    """Reads the part at `index`, which has one slice per axis. Slices may exceed the shape."""
    bounds = [part.indices(size) for part, size in zip(index, self.shape, strict=True)]
    part = self._read_fn(tuple(slice(start, stop) for start, stop, _ in bounds))
    return np.asarray(part).astype(self.dtype, copy=False)

  def derive(self, shape: Sequence[int], read_fn: ReadFn) -> "StoredArray":
    """Returns an array of this dtype that is computed from parts of this one."""
    return StoredArray(shape, self.dtype, read_fn, self.sliceable)

  def parts(self) -> Iterator[Index]:
    """Yields slices of rows that cover the array, so that only a part of it is in memory at a time."""
    rows = self.shape[0] if self.shape else 1
    if self.sliceable and self.nbytes:
      rows = max(1, _PART_BYTES * rows // self.nbytes)
    for start in range(0, self.shape[0] if self.shape else 1, max(1, rows)):
      yield (slice(start, start + rows), *[slice(None)] * (self.ndim - 1))[: self.ndim]


Arrays = Mapping[str, StoredArray]


def as_stored_array(value: Any) -> StoredArray:
  """Returns any array, lazy or not, as a StoredArray."""
  if isinstance(value, StoredArray):
    return value
  if isinstance(value, LazyArray):
    return StoredArray(value.shape, value.dtype, lambda index: value.get()[index], sliceable=False)
  if not isinstance(value, jax.Array):
    value = np.asarray(value)
  return StoredArray(value.shape, value.dtype, lambda index: np.asarray(value[index]))


def transpose(array: StoredArray) -> StoredArray:
  """Returns the transpose of a matrix."""
  return array.derive(array.shape[::-1], lambda index: array.read(index[::-1]).T)


def elementwise(function: Callable[..., np.ndarray], *arrays: StoredArray) -> StoredArray:
  """Returns a function of arrays of one shape, computed for the parts that are read, in the first one's dtype."""
  shape, dtype = arrays[0].shape, arrays[0].dtype
  is_sliceable = all(array.sliceable for array in arrays)
  return StoredArray(
    shape, dtype, lambda index: function(*(x.read(index) for x in arrays)), is_sliceable
  )


def scale(array: StoredArray, factor: float) -> StoredArray:
  """Returns the array times `factor`, computed in float64 and converted to the array's dtype."""
  return elementwise(lambda x: x.astype(np.float64) * factor, array)


def reshape(array: StoredArray, shape: Sequence[int]) -> StoredArray:
  """Returns the same values in another shape."""
  if tuple(shape) == array.shape:
    return array
  return StoredArray(
    shape, array.dtype, lambda index: array.get().reshape(shape)[index], sliceable=False
  )


def stack(arrays: Sequence[StoredArray], axis: int) -> StoredArray:
  """Returns arrays of one shape stacked along a new axis."""
  shape = list(arrays[0].shape)
  shape.insert(axis, len(arrays))

  def read(index: Index) -> np.ndarray:
    inner = index[:axis] + index[axis + 1 :]
    return np.stack([array.read(inner) for array in arrays[index[axis]]], axis)

  return StoredArray(shape, arrays[0].dtype, read, all(array.sliceable for array in arrays))


def repeat(array: StoredArray, count: int) -> StoredArray:
  """Returns the array `count` times along a new first axis; its values are read once."""

  def read(index: Index) -> np.ndarray:
    part = array.read(index[1:])
    return np.broadcast_to(part, (index[0].stop - index[0].start, *part.shape))

  return array.derive((count, *array.shape), read)


def concatenate(arrays: Sequence[StoredArray], axis: int) -> StoredArray:
  """Returns arrays joined along an axis; only the arrays that contain a requested part are read."""
  shape = list(arrays[0].shape)
  shape[axis] = sum(array.shape[axis] for array in arrays)

  def read(index: Index) -> np.ndarray:
    part, parts, offset = list(index), [], 0
    for array in arrays:
      start, stop = max(index[axis].start - offset, 0), index[axis].stop - offset
      part[axis] = slice(start, min(stop, array.shape[axis]))
      if start < part[axis].stop:
        parts.append(array.read(tuple(part)))
      offset += array.shape[axis]
    return np.concatenate(parts, axis)

  return StoredArray(shape, arrays[0].dtype, read, all(array.sliceable for array in arrays))


def slice_axis(array: StoredArray, axis: int, start: int, stop: int) -> StoredArray:
  """Returns the positions from `start` to `stop` of an axis."""
  shape = list(array.shape)
  shape[axis] = stop - start

  def read(index: Index) -> np.ndarray:
    part = list(index)
    part[axis] = slice(index[axis].start + start, index[axis].stop + start)
    return array.read(tuple(part))

  return array.derive(shape, read)


def index_axis(array: StoredArray, axis: int, position: int) -> StoredArray:
  """Returns the part of an array at one position of an axis, without that axis."""
  shape, at = array.shape[:axis] + array.shape[axis + 1 :], slice(position, position + 1)
  return array.derive(
    shape, lambda index: array.read((*index[:axis], at, *index[axis:])).squeeze(axis)
  )


def start_device_transfer(
  array: StoredArray, sharding: jax.sharding.Sharding
) -> Callable[[], jax.Array]:
  """Starts to read this process's shards in threads; returns a function that puts them on the devices.

  A shard that several devices hold is read once.
  """
  indices: Any = sharding.addressable_devices_indices_map(array.shape).values()
  submit = array.executor.submit
  whole = None if array.sliceable else submit(array.get)

  def read(index: Index) -> np.ndarray:
    part = array.read(index) if whole is None else whole.result()[index]
    # Devices may keep using the memory, so each part is contiguous.
    return np.ascontiguousarray(part).reshape(part.shape)

  # Python's slices are not hashable before version 3.12.
  shards = {str(index): index for index in indices}
  pending = {key: submit(read, index) for key, index in shards.items()}
  return lambda: jax.make_array_from_callback(
    array.shape, sharding, lambda index: pending[str(index)].result(), dtype=array.dtype
  )
