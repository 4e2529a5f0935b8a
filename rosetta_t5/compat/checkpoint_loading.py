"""T5X's functions that find and load checkpoints without a model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from rosetta_t5.checkpoints.arrays.lazy_arrays import LazyArray
from rosetta_t5.checkpoints.arrays.state_dicts import flatten_state_dict, unflatten_state_dict
from rosetta_t5.checkpoints.formats import t5x_legacy
from rosetta_t5.checkpoints.model_dir import checkpoint_folders
from rosetta_t5.checkpoints.reading import read_arrays
from rosetta_t5.checkpoints.restored_state import RestoreTransformation
from rosetta_t5.checkpoints.saved_state import ParameterInfo, convert_parameter_dtype

PyTree = Any


def get_checkpoint_dir(
  checkpoints_dir: str | os.PathLike[str],
  step: int,
  step_prefix: str = checkpoint_folders.STEP_PREFIX,
) -> str:
  """Returns the path of a step's folder."""
  return os.path.join(os.fspath(checkpoints_dir), f"{step_prefix}_{step}")


def find_checkpoint(path: str | os.PathLike[str], step: int | None = None) -> str:
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
    file = folder / t5x_legacy.INDEX
  if not file.exists() or file.is_dir():
    raise ValueError(f"Path is not a valid checkpoint: {file}")
  return os.fspath(file)


def load_t5x_checkpoint(
  path: str | os.PathLike[str],
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
      leaf = leaf.astype(convert_parameter_dtype(name, leaf.dtype, restore_dtype))
    flat[name] = leaf.get() if isinstance(leaf, LazyArray) and not lazy_parameters else leaf
  return unflatten_state_dict(flat)


def fake_param_info(maybe_tspec: Any) -> ParameterInfo | None:
  """Returns the description of an array that is read as a whole; None for None."""
  if maybe_tspec is None:
    return None
  if not isinstance(maybe_tspec, ts.Spec):
    return ParameterInfo("")
  shape = tuple(maybe_tspec.to_json()["metadata"]["shape"])
  return ParameterInfo("", shape=shape, ts_spec=maybe_tspec)


def get_restore_parameters(directory: str | os.PathLike[str], structure: PyTree) -> PyTree:
  """Returns a tree of Orbax's ParamInfo for the arrays of a checkpoint.

  Args:
    directory: the folder that contains the arrays.
    structure: the checkpoint's structure, as in Orbax's metadata.
  """
  folder = epath.Path(directory)
  in_ocdbt = ocp.type_handlers.is_ocdbt_checkpoint(folder)
  context = ocp.type_handlers.get_ts_context()

  def info(path: Any, leaf: Any) -> Any:
    if isinstance(leaf, Mapping) and not leaf:
      return leaf
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return ocp.type_handlers.ParamInfo(
      name=name, parent_dir=folder, is_ocdbt_checkpoint=in_ocdbt, ts_context=context
    )

  return jax.tree_util.tree_map_with_path(info, structure, is_leaf=lambda leaf: leaf == {})


def register_ts_spec_for_serialization() -> None:
  """Does nothing. T5X registered TensorStore specs for flax's msgpack here."""
