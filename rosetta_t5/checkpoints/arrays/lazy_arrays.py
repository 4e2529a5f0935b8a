"""Arrays that are on disk until someone reads them, whole or in part (T5X's LazyArray and ours)."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

Index = tuple[slice, ...]
# Waits for values that are being read, and returns them.
PendingRead = Callable[[], np.ndarray]


class LazyArray(abc.ABC):
  """An array with a known shape and dtype whose values are read when asked for (T5X's class)."""

  def __init__(self, shape: Sequence[int], dtype: Any, get_fn: Callable[[], Any]):
    """Builds a lazy array.

    Args:
      shape: its shape.
      dtype: what `get` returns it in.
      get_fn: reads the values.
    """
    self._shape = tuple(int(size) for size in shape)
    self._dtype = jnp.dtype(dtype)
    self._get_fn = get_fn

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape."""
    return self._shape

  @property
  def dtype(self) -> np.dtype:
    """The dtype of the values that `get` returns."""
    return self._dtype

  @property
  def ndim(self) -> int:
    """The number of dimensions."""
    return len(self._shape)

  @property
  def size(self) -> int:
    """The number of values."""
    return int(np.prod(self._shape, dtype=np.int64))

  @property
  def nbytes(self) -> int:
    """Bytes in memory once read."""
    return self.size * self._dtype.itemsize

  def astype(self, dtype: Any) -> LazyArray:
    """Returns the same array, converted when it is read."""
    return type(self)(self._shape, dtype, self._get_fn)

  @abc.abstractmethod
  def get_async(self) -> asyncio.Future:
    """Starts to read the values."""

  @abc.abstractmethod
  def get(self) -> np.ndarray:
    """Reads and returns the values."""

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    """Lets numpy functions, as in users' state transformations, take a lazy array."""
    del copy
    return np.asarray(self.get(), dtype)

  def __repr__(self) -> str:
    """Returns shape and dtype."""
    return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype})"


class LazyThreadPoolArray(LazyArray):
  """A lazy array whose `get_fn` blocks; `get_async` calls it in a thread."""

  executor = futures.ThreadPoolExecutor(thread_name_prefix="lazy-array")

  def get_async(self) -> asyncio.Future:
    """Starts to read the values in a thread."""
    return asyncio.wrap_future(self.executor.submit(self.get))

  def get(self) -> np.ndarray:
    """Reads and returns the values."""
    return _as(self._get_fn(), self._dtype)


class LazyAwaitableArray(LazyArray):
  """A lazy array whose `get_fn` is asynchronous, as TensorStore's reads are."""

  def get_async(self) -> asyncio.Future:
    """Starts to read the values; needs a running event loop."""

    async def get_and_cast() -> np.ndarray:
      return _as(await self._get_fn(), self._dtype)

    return asyncio.ensure_future(get_and_cast())

  def get(self) -> np.ndarray:
    """Reads and returns the values; not from within an event loop."""

    async def wait() -> np.ndarray:
      return await self.get_async()

    return asyncio.run(wait())

  @classmethod
  def from_tensor_store_spec(
    cls, ts_spec: ts.Spec, get_fn: Callable[[], Any], dtype: Any = None
  ) -> LazyAwaitableArray:
    """Returns the array that `ts_spec` describes, with the spec's shape and, without `dtype`, its dtype."""
    spec = ts_spec.to_json()
    stored = jnp.dtype(spec["dtype"] if dtype is None else dtype)
    # T5X's version 2 wrote bfloat16 as the 16 bits of it.
    return cls(spec["metadata"]["shape"], jnp.bfloat16 if stored == np.uint16 else stored, get_fn)

  @classmethod
  def from_array(
    cls, array: np.ndarray, get_fn: Callable[[], Any], dtype: Any = None
  ) -> LazyAwaitableArray:
    """Returns a lazy array of the shape and, without `dtype`, the dtype of `array`."""
    return cls(array.shape, array.dtype if dtype is None else dtype, get_fn)

  @classmethod
  def from_tensor_store_spec_or_array(
    cls, maybe_ts_spec: ts.Spec | np.ndarray, get_fn: Callable[[], Any], dtype: Any = None
  ) -> LazyAwaitableArray:
    """Returns a lazy array like a TensorStore spec or like an array."""
    if isinstance(maybe_ts_spec, ts.Spec):
      return cls.from_tensor_store_spec(maybe_ts_spec, get_fn, dtype=dtype)
    return cls.from_array(maybe_ts_spec, get_fn, dtype=dtype)


class StoredArray(LazyThreadPoolArray):
  """A lazy array that can read a part of itself.

  Attributes:
    sliceable: whether reading a part costs a part; else each read reads everything.
  """

  def __init__(
    self,
    shape: Sequence[int],
    dtype: Any,
    read_fn: Callable[[Index], np.ndarray],
    sliceable: bool = True,
    start_read_fn: Callable[[Index], PendingRead] | None = None,
  ):
    """Builds a stored array.

    Args:
      shape: its shape.
      dtype: what it is returned in.
      read_fn: reads the part at a tuple of slices.
      sliceable: see the attribute.
      start_read_fn: begins to read a part in the background and returns what waits for it, in the dtype
        on disk.
    """
    super().__init__(shape, dtype, self._read_all)
    self._read_fn = read_fn
    self._begin_fn = start_read_fn
    self.sliceable = sliceable

  def astype(self, dtype: Any) -> StoredArray:
    """Returns the same array, converted when it is read."""
    same = jnp.dtype(dtype) == self._dtype
    # To convert takes as long as to read; that is for threads.
    start_read_fn = self._begin_fn if same else None
    return StoredArray(self._shape, dtype, self._read_fn, self.sliceable, start_read_fn)

  def read(self, index: Index) -> np.ndarray:
    """Reads the part at `index`, a tuple of one slice a dimension; slices may reach beyond the end."""
    return _as(self._read_fn(self._bounded(index)), self._dtype)

  def begin(self, index: Index) -> PendingRead:
    """Begins to read the part at `index` in the background; returns what waits for it."""
    if self._begin_fn is None:
      return self.executor.submit(self.read, index).result
    return self._begin_fn(self._bounded(index))

  def _bounded(self, index: Index) -> Index:
    bounds = [part.indices(size) for part, size in zip(index, self._shape, strict=True)]
    return tuple(slice(start, stop) for start, stop, _ in bounds)

  def _read_all(self) -> np.ndarray:
    return self._read_fn(tuple(slice(0, size) for size in self._shape))


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
  """Returns a matrix's transpose."""
  return StoredArray(
    array.shape[::-1], array.dtype, lambda index: array.read(index[::-1]).T, array.sliceable
  )


def scale(array: StoredArray, factor: float) -> StoredArray:
  """Returns the product with a number, rounded once, to the array's dtype."""

  def read(index: Index) -> np.ndarray:
    return (array.read(index).astype(np.float64) * factor).astype(array.dtype)

  return StoredArray(array.shape, array.dtype, read, array.sliceable)


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
    chosen = arrays[index[axis]]
    return np.stack([array.read(inner) for array in chosen], axis)

  return StoredArray(shape, arrays[0].dtype, read, arrays[0].sliceable)


def index_axis(array: StoredArray, axis: int, position: int) -> StoredArray:
  """Returns the part of an array at one position of an axis, without that axis."""
  shape = array.shape[:axis] + array.shape[axis + 1 :]

  def read(index: Index) -> np.ndarray:
    part = array.read((*index[:axis], slice(position, position + 1), *index[axis:]))
    return part.squeeze(axis)

  return StoredArray(shape, array.dtype, read, array.sliceable)


def start_device_transfer(
  array: StoredArray, sharding: jax.sharding.Sharding
) -> Callable[[], jax.Array]:
  """Begins to read this process's parts of an array; returns what waits and puts them on the devices.

  A part that several devices hold is read once.
  """
  indices = sharding.addressable_devices_indices_map(array.shape)
  wanted = {_key(index): index for index in indices.values() if index is not None}
  everything = tuple(slice(None) for _ in array.shape)
  whole = None if array.sliceable else array.begin(everything)
  readings = {key: array.begin(index) for key, index in wanted.items()} if whole is None else {}

  def finish() -> jax.Array:
    if whole is None:
      parts = {key: reading() for key, reading in readings.items()}
    else:
      values = whole()
      parts = {key: values[index] for key, index in wanted.items()}
    # In C order and of its own: devices may go on using the memory.
    parts = {key: np.ascontiguousarray(part).reshape(part.shape) for key, part in parts.items()}
    return jax.make_array_from_callback(
      array.shape, sharding, lambda index: parts[_key(index)], dtype=array.dtype
    )

  return finish


def _key(index: Index | None) -> tuple[tuple[int | None, int | None], ...]:
  assert index is not None
  return tuple((part.start, part.stop) for part in index)


def _as(value: Any, dtype: np.dtype) -> np.ndarray:
  array = np.asarray(value)
  return array if array.dtype == dtype else array.astype(dtype)
