"""Reads the train state of a checkpoint, of any layout, straight onto this run's devices."""

from __future__ import annotations

import collections
import logging
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from rosetta_t5.checkpoints import fit
from rosetta_t5.checkpoints.arrays.lazy_arrays import (
  StoredArray,
  as_stored_array,
  start_device_transfer,
)
from rosetta_t5.checkpoints.arrays.state_dicts import flatten_state_dict, unflatten_state_dict
from rosetta_t5.checkpoints.arrays.tree_layouts import LayoutError, convert_layout
from rosetta_t5.checkpoints.formats import mesh_tf, orbax_reader, t5x_legacy
from rosetta_t5.checkpoints.formats.hugging_face import folder as hugging_face_folder
from rosetta_t5.checkpoints.model_dir import checkpoint_folders

PyTree = Any
Transformation = Callable[..., Any]

_log = logging.getLogger(__name__)

# What the layouts raise for missing and damaged files. Not RuntimeError: a device that runs out of
# memory is no fault of the checkpoint.
_DAMAGE = (OSError, ValueError, KeyError, TypeError, IndexError)
_BYTES_AT_ONCE = 2 << 30
_READERS: dict[checkpoint_folders.CheckpointTypes, Callable[[Any], Mapping[str, Any]]] = {
  checkpoint_folders.CheckpointTypes.ORBAX: orbax_reader.read_arrays,
  checkpoint_folders.CheckpointTypes.T5X: t5x_legacy.read_arrays,
  checkpoint_folders.CheckpointTypes.T5X_TF: mesh_tf.read_arrays,
  checkpoint_folders.CheckpointTypes.HUGGING_FACE: hugging_face_folder.read_arrays,
}


class UnreadableCheckpointError(ValueError):
  """A checkpoint is there but cannot be read."""


def read_arrays(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
  """Returns {flat name: array} of the checkpoint at `path`, under T5X's names; no value is read yet.

  Args:
    path: a checkpoint of any layout, recognised by looking: Orbax, T5X's older one, Mesh
      TensorFlow's (folder or prefix), a Hugging Face folder.

  Raises:
    UnreadableCheckpointError: files are missing or damaged.
    ValueError: there is no checkpoint.
  """
  layout = checkpoint_folders.detect_checkpoint_type(path)
  try:
    return {name: as_stored_array(value) for name, value in _READERS[layout](path).items()}
  except _DAMAGE as error:
    raise unreadable(path, error) from error


def read_state(
  path: str | os.PathLike[str],
  expected: Mapping[str, Any],
  shardings: Mapping[str, Any],
  *,
  arrays: Mapping[str, Any] | None = None,
  params_dtype: Any = None,
  transformations: Sequence[Transformation] = (),
  allow_missing: bool = False,
  allow_unexpected: bool = False,
) -> dict[str, Any]:
  """Returns the nested state dict stored at `path`, each array on its devices.

  Names, shapes and dtypes are compared first, so a checkpoint that does not fit costs no memory.

  Args:
    path: a checkpoint of any layout.
    expected: nested state dict of the train state's leaves (`shape`, `dtype`).
    shardings: flat dict of the sharding each leaf is to have.
    arrays: the checkpoint's, by flat name, if they are read already.
    params_dtype: the dtype of the floating-point parameters; None for the train state's.
    transformations: `fn(checkpoint's nested state dict, expected)` returns the former renamed or
      changed; its leaves are arrays still on disk, which numpy functions read.
    allow_missing: leave names out that the checkpoint lacks; optimizer state that does not fit too.
    allow_unexpected: ignore names that only the checkpoint has.

  Raises:
    CheckpointMismatchError: the checkpoint does not fit.
    UnreadableCheckpointError: files are missing or damaged.
  """
  flat = flatten_state_dict(expected, keep_empty_nodes=True)
  wanted = {name: leaf for name, leaf in flat.items() if hasattr(leaf, "shape")}
  arrays, fitting = _compared(
    *(path, read_arrays(path) if arrays is None else arrays, expected, wanted),
    *(transformations, allow_missing, allow_unexpected),
  )
  chosen = {
    name: arrays[name].astype(_dtype(name, leaf, params_dtype))
    for name, leaf in wanted.items()
    if name in fitting
  }
  # Optimizers have leaves without a value (None, empty states), which are not on disk.
  valueless = {name: leaf for name, leaf in flat.items() if not hasattr(leaf, "shape")}
  return unflatten_state_dict({**valueless, **_place_all(path, chosen, shardings)})


def check_fits(
  path: str | os.PathLike[str],
  expected: Mapping[str, Any],
  allow_missing: bool = False,
  allow_unexpected: bool = False,
  transformations: Sequence[Transformation] = (),
) -> None:
  """Raises CheckpointMismatchError unless the checkpoint at `path` has what `expected` needs.

  Args:
    path: a checkpoint of any layout.
    expected: nested state dict of leaves with `shape` and `dtype`.
    allow_missing: see `read_state`.
    allow_unexpected: see `read_state`.
    transformations: see `read_state`.
  """
  wanted = {n: leaf for n, leaf in flatten_state_dict(expected).items() if hasattr(leaf, "shape")}
  _compared(
    *(path, read_arrays(path), expected, wanted),
    *(transformations, allow_missing, allow_unexpected),
  )


def _compared(
  path: Any,
  arrays: Mapping[str, Any],
  expected: Mapping[str, Any],
  wanted: Mapping[str, Any],
  transformations: Sequence[Transformation],
  allow_missing: bool,
  allow_unexpected: bool,
) -> tuple[dict[str, StoredArray], set[str]]:
  """Returns the checkpoint's arrays as the run lays them out, and the names of those that it takes."""
  changed = _transformed(
    {n: as_stored_array(x) for n, x in arrays.items()}, expected, transformations
  )
  try:
    relaid_arrays = convert_layout(changed, wanted)
  except LayoutError as error:
    raise fit.CheckpointMismatchError(f"checkpoint {path}: {error}") from error
  # As in T5X, what a transformation leaves over is left out.
  unexpected = allow_unexpected or bool(transformations)
  return relaid_arrays, fit.check_fit(path, relaid_arrays, wanted, allow_missing, unexpected)


def _place_all(
  path: Any, arrays: Mapping[str, StoredArray], shardings: Mapping[str, Any]
) -> dict[str, jax.Array]:
  """Reads arrays onto their devices, as many at once as fit into a bounded part of the host's memory."""
  placed: dict[str, jax.Array] = {}
  pending: collections.deque[tuple[str, Callable[[], jax.Array]]] = collections.deque()
  bytes_pending = 0
  try:
    for name, array in arrays.items():
      while pending and bytes_pending + array.nbytes > _BYTES_AT_ONCE:
        first, finish = pending.popleft()
        placed[first] = finish()
        bytes_pending -= arrays[first].nbytes
      pending.append((name, start_device_transfer(array, shardings[name])))
      bytes_pending += array.nbytes
    return placed | {name: finish() for name, finish in pending}
  except _DAMAGE as error:
    raise unreadable(path, error) from error


def _transformed(
  arrays: dict[str, StoredArray],
  expected: Mapping[str, Any],
  transformations: Sequence[Transformation],
) -> dict[str, StoredArray]:
  if not transformations:
    return arrays
  state: Any = unflatten_state_dict(arrays)
  for transform in transformations:
    state = transform(state, expected)
  flat = flatten_state_dict(state)
  return {name: as_stored_array(leaf) for name, leaf in flat.items() if hasattr(leaf, "shape")}


def _dtype(name: str, leaf: Any, params_dtype: Any) -> Any:
  is_param = name.startswith("target/") and jnp.issubdtype(leaf.dtype, jnp.floating)
  return params_dtype if is_param and params_dtype is not None else leaf.dtype


def unreadable(path: str | os.PathLike[str], error: Exception) -> UnreadableCheckpointError:
  """Returns the error for a damaged checkpoint: what is wrong, and which older ones there are."""
  folder = epath.Path(path)
  reason = textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
  text = f"checkpoint {folder} cannot be read: {reason}"
  step = checkpoint_folders.step_of(folder)
  older = [s for s in checkpoint_folders.all_steps(folder.parent) if step is not None and s < step]
  if not older:
    return UnreadableCheckpointError(f"{text}. There is no older checkpoint beside it.")
  return UnreadableCheckpointError(
    f"{text}. Older steps beside it: {', '.join(map(str, older))}. To go on from "
    f"step {older[-1]}, move {folder.name} out of {folder.parent}."
  )
