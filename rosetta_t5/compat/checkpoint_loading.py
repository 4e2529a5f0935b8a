"""Checkpoints without a model: find one, load its arrays, see how Orbax stored them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from rosetta_t5.checkpoints.arrays.state_dicts import flatten_state_dict, unflatten_state_dict
from rosetta_t5.checkpoints.formats import t5x_legacy
from rosetta_t5.checkpoints.model_dir import checkpoint_folders
from rosetta_t5.checkpoints.reading import Transformation, read_arrays
from rosetta_t5.checkpoints.saved_state import ParameterInfo

PyTree = Any


def get_checkpoint_dir(
  checkpoints_dir: str | os.PathLike[str],
  step: int,
  step_prefix: str = checkpoint_folders.STEP_PREFIX,
) -> str:
  """Returns the path of a step's folder."""
  return os.path.join(os.fspath(checkpoints_dir), f"{step_prefix}_{step}")


def find_checkpoint(path: str | os.PathLike[str], step: int | None = None) -> str:
  """Returns the msgpack file of a checkpoint in T5X's older layout (T5X's function).

  Args:
    path: the folder of checkpoints, a checkpoint's folder, or the file itself.
    step: which checkpoint of a folder of them; None for the latest.

  Raises:
    ValueError: there is no such file.
  """
  folder = epath.Path(path)
  if folder.is_dir():
    if step is None:
      step = checkpoint_folders.latest_step(folder)
    folder = folder if step is None else checkpoint_folders.checkpoint_path(folder, step)
    folder = folder / t5x_legacy.INDEX
  if not folder.exists() or folder.is_dir():
    raise ValueError(f"Path is not a valid checkpoint: {folder}")
  return os.fspath(folder)


def load_t5x_checkpoint(
  path: str | os.PathLike[str],
  step: int | None = None,
  state_transformation_fns: Sequence[Transformation] = (),
  remap: bool = True,
  restore_dtype: Any = None,
  lazy_parameters: bool = False,
) -> PyTree:
  """Returns a checkpoint's nested state dict as numpy arrays; no model is needed (T5X's function).

  Args:
    path: a checkpoint of any layout, or a folder of checkpoints.
    step: which of a folder of checkpoints; None for the latest.
    state_transformation_fns: `fn(state dict, {})` returns it changed; in order.
    remap: whether they are applied.
    restore_dtype: the dtype of the floating-point parameters; None for that on disk.
    lazy_parameters: leave arrays on disk, as LazyArrays.
  """
  state: Any = unflatten_state_dict(read_arrays(_checkpoint_at(path, step)))
  for transform in state_transformation_fns if remap else ():
    state = transform(state, {})
  flat = flatten_state_dict(state, keep_empty_nodes=True)
  for name, leaf in flat.items():
    converts = restore_dtype is not None and name.startswith("target/")
    if converts and jnp.issubdtype(leaf.dtype, jnp.floating):
      flat[name] = leaf.astype(restore_dtype)
  if not lazy_parameters:
    flat = {name: leaf.get() if hasattr(leaf, "get_async") else leaf for name, leaf in flat.items()}
  return unflatten_state_dict(flat)


def _checkpoint_at(path: str | os.PathLike[str], step: int | None) -> epath.Path:
  if step is None and not checkpoint_folders.all_steps(path):
    return epath.Path(path)
  return checkpoint_folders.find_step(path, step)


def fake_param_info(maybe_tspec: Any) -> ParameterInfo | None:
  """Returns what T5X's functions want to know of an array that is read whole; None for None."""
  if maybe_tspec is None:
    return None
  if not isinstance(maybe_tspec, ts.Spec):
    return ParameterInfo("")
  shape = tuple(maybe_tspec.to_json()["metadata"]["shape"])
  return ParameterInfo("", shape=shape, ts_spec=maybe_tspec)


def get_restore_parameters(directory: str | os.PathLike[str], structure: PyTree) -> PyTree:
  """Returns a tree of Orbax's ParamInfo for the arrays of a checkpoint (T5X's function).

  Args:
    directory: the folder with the arrays.
    structure: the checkpoint's structure, as Orbax's metadata gives it.
  """
  folder = epath.Path(directory)
  in_ocdbt = ocp.type_handlers.is_ocdbt_checkpoint(folder)
  context = ocp.type_handlers.get_ts_context()

  def info(path: Any, leaf: Any) -> Any:
    if isinstance(leaf, Mapping) and not leaf:
      return leaf
    name = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
    return ocp.type_handlers.ParamInfo(
      name=name, parent_dir=folder, is_ocdbt_checkpoint=in_ocdbt, ts_context=context
    )

  return jax.tree_util.tree_map_with_path(info, structure, is_leaf=lambda leaf: leaf == {})


def register_ts_spec_for_serialization() -> None:
  """Lets flax's msgpack hold TensorStore specs; T5X's name, which needs nothing here: specs are read."""
