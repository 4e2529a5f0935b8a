"""The private names of Orbax that this project uses. No other module imports from `orbax…_src`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
import tensorstore as ts

from rosetta_t5.checkpoints.arrays import checksums


def writing_checksums() -> contextlib.AbstractContextManager[Any]:
  """Returns a context in which a save that Orbax starts also writes the checksums of what it writes.

  They are computed in the background from the copies that Orbax has made of the devices' values, for
  which it has no public interface.
  """
  from orbax.checkpoint._src.serialization import jax_array_handlers

  original = jax_array_handlers._async_serialize_replica_slices

  async def serialize(values: Any, infos: Any, args: Any, **options: Any) -> Any:
    await infos[0].await_path_creation()
    # If one fails, the other still ends before the event loop does.
    results: Any = await asyncio.gather(
      original(values, infos, args, **options),
      asyncio.to_thread(_write_checksums, values, infos, args),
      return_exceptions=True,
    )
    for result in results:
      if isinstance(result, BaseException):
        raise result
    return results[0]

  return mock.patch.object(jax_array_handlers, "_async_serialize_replica_slices", serialize)


def _write_checksums(values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any]) -> None:
  """Writes the checksums of the parts of arrays that this process stores.

  Args:
    values: Orbax's `ReplicaSlices`: the parts of each array on the host, which have one shape.
    infos: Orbax's `ParamInfo` of each array.
    args: Orbax's `SaveArgs` of each array.
  """
  arrays = {}
  for value, info, arg in zip(values, infos, args, strict=True):
    if value.replica_slices:
      dtype = np.dtype(arg.dtype or value.dtype)
      shape = jax.ShapeDtypeStruct(value.global_shape, dtype)
      array = checksums.ArrayChecksums.of(shape, value.local_shape)
      for part in value.replica_slices:
        array.add(part.index, _as_stored(part.data(), dtype))
      arrays["/".join(str(key.key) for key in info.keypath)] = array
  checksums.write(
    infos[0].parent_dir, arrays, jax.process_index(), jax.process_count(), with_run_facts=True
  )


def _as_stored(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """Returns values in the dtype in which TensorStore stores them, converted as it converts them."""
  return (
    values if values.dtype == dtype else ts.cast(ts.array(values), ts.dtype(dtype)).read().result()
  )
