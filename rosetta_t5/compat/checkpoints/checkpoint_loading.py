"""T5X's functions that find, load and describe checkpoints without a model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from etils import epath

from rosetta_t5.checkpoints import checkpoint_folders
from rosetta_t5.checkpoints.arrays.lazy_arrays import LazyArray
from rosetta_t5.checkpoints.arrays.state_dicts import (
  flatten_arrays,
  flatten_state_dict,
  unflatten_state_dict,
)
from rosetta_t5.checkpoints.formats import mesh_tf
from rosetta_t5.checkpoints.mismatch import find_mismatches, mismatch_error
from rosetta_t5.checkpoints.restore import RestoreTransformation, read_arrays
from rosetta_t5.checkpoints.saved_items import ParameterInfo, leaf_dtype

PyTree = Any


def get_checkpoint_dir(
  checkpoints_dir: epath.PathLike, step: int, step_prefix: str = checkpoint_folders.STEP_PREFIX
) -> str:
  """Returns the path of a step's folder."""
  return os.path.join(os.fspath(checkpoints_dir), f"{step_prefix}_{step}")


def find_checkpoint(path: epath.PathLike, step: int | None = None) -> str:
  """Returns the msgpack file of a checkpoint in T5X's older layout.

  Args:
    path: the folder of checkpoints, a checkpoint's folder, or the file itself.
    step: which checkpoint of a folder of checkpoints; None for the latest.

  Raises:
    ValueError: there is no such file.
  """
  file = epath.Path(path)
  if file.is_dir():
    step = checkpoint_folders.latest_step(file) if step is None else step
    folder = file if step is None else checkpoint_folders.checkpoint_path(file, step)
    file = folder / "checkpoint"
  if not file.exists() or file.is_dir():
    raise ValueError(
      f"{path} is not a checkpoint in T5X's older layout: there is no file {file}. "
      "load_t5x_checkpoint reads checkpoints of any layout"
    )
  return os.fspath(file)


def load_t5x_checkpoint(
  path: epath.PathLike,
  step: int | None = None,
  state_transformation_fns: Sequence[RestoreTransformation] = (),
  remap: bool = True,
  restore_dtype: Any = None,
  lazy_parameters: bool = False,
) -> PyTree:
  """Returns a checkpoint's nested state dict as numpy arrays, without a model.

  Args:
    path: a checkpoint of any layout, or a folder of checkpoints.
    step: which checkpoint of a folder of checkpoints; None for the latest.
    state_transformation_fns: each `fn(state dict, {})` returns the state dict, changed.
    remap: whether to apply them.
    restore_dtype: the dtype of the floating-point parameters; None for the stored dtype.
    lazy_parameters: leave the arrays on disk, as LazyArrays.
  """
  state: Any = unflatten_state_dict(read_arrays(checkpoint_folders.resolve_checkpoint(path, step)))
  for transform in state_transformation_fns if remap else ():
    state = transform(state, {})
  flat = flatten_state_dict(state, keep_empty_nodes=True)
  for name, leaf in flat.items():
    if restore_dtype is not None and hasattr(leaf, "dtype"):
      leaf = leaf.astype(leaf_dtype(name, leaf.dtype, restore_dtype))
    flat[name] = leaf.get() if isinstance(leaf, LazyArray) and not lazy_parameters else leaf
  return unflatten_state_dict(flat)


def restore_from_t5_checkpoint(
  state_dict: Mapping[str, Any],
  path: epath.PathLike,
  lazy_parameters: bool = False,
  strict: bool = True,
  translator: mesh_tf.CheckpointTranslator | None = None,
) -> dict[str, Any]:
  """Returns a nested state dict with the values of a Mesh TensorFlow checkpoint (T5X's function).

  Args:
    state_dict: the state dict of the model with T5X's Adafactor; only its shapes are used.
    path: a prefix, or a folder, whose latest checkpoint is then read.
    lazy_parameters: leave the values on disk until they are used.
    strict: raise an error for names that `state_dict` lacks; otherwise they are left out.
    translator: the rules; None for those of T5 1.0 and 1.1.

  Raises:
    CheckpointMismatchError: names or shapes differ.
  """
  arrays = mesh_tf.read_arrays(path, translator)
  expected = flatten_arrays(state_dict)
  # As in T5X, a name that only the model has is reported later, by the train state.
  ignored = {"missing"} if strict else {"missing", "unexpected"}
  mismatches = [m for m in find_mismatches(arrays, expected) if m.problem not in ignored]
  if mismatches:
    raise mismatch_error(path, mismatches)
  kept = {name: array for name, array in arrays.items() if strict or name in expected}
  return unflatten_state_dict(
    {n: x.get() if isinstance(x, LazyArray) and not lazy_parameters else x for n, x in kept.items()}
  )


class LazyAwaitableArray(LazyArray):
  """A lazy array whose `get_fn` is asynchronous, as TensorStore's reads are."""

  def get_async(self) -> asyncio.Future:
    """Starts to read the values. It requires a running event loop."""
    return asyncio.ensure_future(self._read())

  def get(self) -> np.ndarray:
    """Reads and returns the values. It must not be called within an event loop."""
    return asyncio.run(self._read())

  async def _read(self) -> np.ndarray:
    return np.asarray(await self._get_fn()).astype(self.dtype, copy=False)

  @classmethod
  def from_tensor_store_spec(
    cls, ts_spec: ts.Spec, get_fn: Callable[[], Any], dtype: Any = None
  ) -> LazyAwaitableArray:
    """Returns the array that `ts_spec` describes; its dtype is the spec's if `dtype` is None."""
    spec = ts_spec.to_json()
    on_disk = jnp.dtype(spec["dtype"] if dtype is None else dtype)
    # Version 2 of T5X's layout stored bfloat16 as its 16 bits.
    on_disk = jnp.dtype(jnp.bfloat16) if on_disk == np.uint16 else on_disk
    return cls(spec["metadata"]["shape"], on_disk, get_fn)

  @classmethod
  def from_array(
    cls, array: np.ndarray, get_fn: Callable[[], Any], dtype: Any = None
  ) -> LazyAwaitableArray:
    """Returns a lazy array with the shape of `array`, and its dtype if `dtype` is None."""
    return cls(array.shape, array.dtype if dtype is None else dtype, get_fn)

  @classmethod
  def from_tensor_store_spec_or_array(
    cls, maybe_ts_spec: ts.Spec | np.ndarray, get_fn: Callable[[], Any], dtype: Any = None
  ) -> LazyAwaitableArray:
    """Returns a lazy array that is described by a TensorStore spec or by an array."""
    if isinstance(maybe_ts_spec, ts.Spec):
      return cls.from_tensor_store_spec(maybe_ts_spec, get_fn, dtype=dtype)
    return cls.from_array(maybe_ts_spec, get_fn, dtype=dtype)


def get_name_tree(state_dict: Mapping[str, Any], keep_empty_nodes: bool = False) -> dict[str, Any]:
  """Returns the same nested dict with each leaf, or kept empty node, replaced by its flat name."""
  return unflatten_state_dict({n: n for n in flatten_state_dict(state_dict, keep_empty_nodes)})


def intersect_state(
  state_dict: Mapping[str, Any], intersect_state_dict: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the part of `state_dict` whose names `intersect_state_dict` also has."""
  kept = flatten_state_dict(intersect_state_dict, keep_empty_nodes=True)
  flat = flatten_state_dict(state_dict, keep_empty_nodes=True)
  return unflatten_state_dict({name: leaf for name, leaf in flat.items() if name in kept})


def fake_param_info(maybe_tspec: Any) -> ParameterInfo | None:
  """Returns the description of an array that is read as a whole; None for None."""
  if maybe_tspec is None:
    return None
  if not isinstance(maybe_tspec, ts.Spec):
    return ParameterInfo("")
  shape = tuple(maybe_tspec.to_json()["metadata"]["shape"])
  return ParameterInfo("", shape=shape, ts_spec=maybe_tspec)
