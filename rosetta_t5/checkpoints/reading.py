"""Reads the train state of an Orbax checkpoint, from anywhere, straight onto this run's devices."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from rosetta_t5.checkpoints import folders
from rosetta_t5.checkpoints.fit import Misfit, compare, mismatch_error
from rosetta_t5.checkpoints.state_dicts import flatten_state_dict, unflatten_state_dict

PyTree = Any

_log = logging.getLogger(__name__)

# What Orbax and TensorStore raise for missing and damaged files. Not RuntimeError: a device that
# runs out of memory is no fault of the checkpoint.
_DAMAGE = (OSError, ValueError, KeyError, TypeError)


class UnreadableCheckpointError(ValueError):
  """A checkpoint is there but cannot be read."""


def read_shapes(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns {flat name: array metadata with `shape` and `dtype`} of the checkpoint at `path`.

  Raises:
    UnreadableCheckpointError: files are missing or damaged.
    ValueError: there is no checkpoint, or one whose layout is not read yet.
  """
  found = folders.detect_checkpoint_type(path)
  if found is not folders.CheckpointTypes.ORBAX:
    layout = {"T5X": "T5X's older layout (msgpack and zarr)", "T5X_TF": "TensorFlow's layout"}
    raise ValueError(
      f"checkpoint {path} is in {layout[found.value]}, which is not supported yet: give a "
      "checkpoint that T5X or rosetta-t5 wrote with Orbax"
    )
  # The item's own folder is read, not the step's: T5X's step metadata names handlers of T5X.
  try:
    with _quiet_failure():
      metadata = ocp.PyTreeCheckpointHandler().metadata(folders.state_path(path))
    return _arrays(flatten_state_dict(metadata.tree))
  except _DAMAGE as error:
    raise unreadable(path, error) from error


def read_state(
  path: str | os.PathLike[str],
  expected: Mapping[str, Any],
  shardings: Mapping[str, Any],
  *,
  params_dtype: Any = None,
  allow_missing: bool = False,
  allow_unexpected: bool = False,
) -> dict[str, Any]:
  """Returns the nested state dict stored at `path`, each array on its devices.

  Names, shapes and dtypes are compared first, so a checkpoint that does not fit costs no memory.

  Args:
    path: an Orbax checkpoint's folder.
    expected: nested state dict of the train state's leaves (`shape`, `dtype`).
    shardings: flat dict of the sharding each leaf is to have.
    params_dtype: the dtype of the floating-point parameters; None for the train state's.
    allow_missing: leave names out that the checkpoint lacks.
    allow_unexpected: ignore names that only the checkpoint has.

  Raises:
    CheckpointMismatchError: the checkpoint does not fit.
    UnreadableCheckpointError: files are missing or damaged.
  """
  stored = read_shapes(path)
  check_fit(path, stored, expected, allow_missing, allow_unexpected)
  flat = flatten_state_dict(expected, keep_empty_nodes=True)
  wanted = {name: leaf for name, leaf in _arrays(flat).items() if name in stored}
  restore_args = {
    name: ocp.ArrayRestoreArgs(
      dtype=_dtype(name, leaf, params_dtype), sharding=shardings[name], global_shape=leaf.shape
    )
    for name, leaf in wanted.items()
  }
  args = ocp.args.PyTreeRestore(
    item=unflatten_state_dict(wanted),
    restore_args=unflatten_state_dict(restore_args),
    partial_restore=True,
  )
  try:
    with _quiet_failure():
      restored = ocp.PyTreeCheckpointHandler().restore(folders.state_path(path), args=args)
  except _DAMAGE as error:
    raise unreadable(path, error) from error
  # Optimizers have leaves without a value (None, empty states), which are not on disk.
  valueless = {name: leaf for name, leaf in flat.items() if not hasattr(leaf, "shape")}
  return unflatten_state_dict({**valueless, **flatten_state_dict(restored)})


def check_fit(
  path: str | os.PathLike[str],
  stored: Mapping[str, Any],
  expected: Mapping[str, Any],
  allow_missing: bool = False,
  allow_unexpected: bool = False,
) -> None:
  """Raises CheckpointMismatchError if `stored` does not fit `expected`; see `read_state`."""
  allowed = {"missing": allow_missing, "unexpected": allow_unexpected}
  misfits = compare(stored, _arrays(flatten_state_dict(expected)))
  tolerated = [misfit for misfit in misfits if allowed.get(misfit.problem)]
  if len(tolerated) < len(misfits):
    raise mismatch_error(path, misfits)
  _log_tolerated(path, tolerated)


def _arrays(flat: Mapping[str, Any]) -> dict[str, Any]:
  return {name: leaf for name, leaf in flat.items() if hasattr(leaf, "shape")}


def _log_tolerated(path: Any, misfits: list[Misfit]) -> None:
  done = {"missing": "is not in it and starts from scratch", "unexpected": "is not used"}
  for misfit in misfits:
    _log.warning("checkpoint %s: %s %s", path, misfit.name, done[misfit.problem])


def _dtype(name: str, leaf: Any, params_dtype: Any) -> Any:
  is_param = name.startswith("target/") and jnp.issubdtype(leaf.dtype, jnp.floating)
  return params_dtype if is_param and params_dtype is not None else leaf.dtype


@contextlib.contextmanager
def _quiet_failure() -> Iterator[None]:
  """Keeps a failed restore from printing a stack trace for each array that was still being read.

  Their reads end after Orbax has closed its event loop, in threads of their own, so the filter stays
  after a failure.
  """
  print_unraisable = sys.unraisablehook

  def skip_closed_loop(unraisable: Any) -> None:
    if "Event loop is closed" not in str(unraisable.exc_value):
      print_unraisable(unraisable)

  sys.unraisablehook = skip_closed_loop
  yield
  sys.unraisablehook = print_unraisable


def unreadable(path: str | os.PathLike[str], error: Exception) -> UnreadableCheckpointError:
  """Returns the error for a damaged checkpoint: what is wrong, and which older ones there are."""
  folder = epath.Path(path)
  reason = textwrap.shorten(str(error), 200, placeholder=" ...") or type(error).__name__
  text = f"checkpoint {folder} cannot be read: {reason}"
  step = folders.step_of(folder)
  older = [s for s in folders.all_steps(folder.parent) if step is not None and s < step]
  if not older:
    return UnreadableCheckpointError(f"{text}. There is no older checkpoint beside it.")
  return UnreadableCheckpointError(
    f"{text}. Older steps beside it: {', '.join(map(str, older))}. To go on from "
    f"step {older[-1]}, move {folder.name} out of {folder.parent}."
  )
