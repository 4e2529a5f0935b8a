"""Restores a checkpoint of any layout: opens it, renames and compares its arrays, and puts them on the devices."""

from __future__ import annotations

import collections
import errno
import logging
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import NamedSharding

from rosetta_t5 import manifest, terminal
from rosetta_t5.checkpoints import checkpoint_folders
from rosetta_t5.checkpoints.arrays import state_dicts
from rosetta_t5.checkpoints.arrays.lazy_arrays import (
  StoredArray,
  as_stored_array,
  start_device_transfer,
)
from rosetta_t5.checkpoints.arrays.parameter_trees import TreeError, convert_tree
from rosetta_t5.checkpoints.formats import mesh_tf, t5x_layouts
from rosetta_t5.checkpoints.formats.hugging_face import folder as hugging_face_folder
from rosetta_t5.checkpoints.mismatch import (
  CheckpointMismatchError,
  find_restorable,
  is_optimizer_state,
)
from rosetta_t5.checkpoints.saved_items import leaf_dtype
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.parallel.partition_specs import partition_specs_of

RestoreTransformation = Callable[..., Any]

# What the readers raise for missing and damaged files. RuntimeError is not one of them: a device that
# runs out of memory is not damage.
_DAMAGE_ERRORS = (OSError, ValueError, KeyError, TypeError, IndexError)
# TensorStore states the operating system's error in its messages.
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
_REMOTE_ERRORS = ("PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE", "DEADLINE_EXCEEDED")
# These mean that a file of the checkpoint is missing. Others are about the machine.
_MISSING_FILE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
# The name under which every layout with a train state has the step.
_STEP = "state/step"
# Arrays are read concurrently up to this size, which bounds the host memory of a restore.
_MAX_BYTES = 2 << 30

_log = logging.getLogger(__name__)

_READERS: dict[checkpoint_folders.CheckpointTypes, Callable[[Any], Mapping[str, Any]]] = {
  checkpoint_folders.CheckpointTypes.ORBAX: t5x_layouts.read_orbax,
  checkpoint_folders.CheckpointTypes.T5X: t5x_layouts.read_older,
  checkpoint_folders.CheckpointTypes.T5X_TF: mesh_tf.read_arrays,
  checkpoint_folders.CheckpointTypes.HUGGING_FACE: hugging_face_folder.read_arrays,
}


class UnreadableCheckpointError(ValueError):
  """A checkpoint exists but cannot be read.

  Attributes:
    damage: what is wrong, without the advice that the message ends with.
  """

  def __init__(self, damage: str, advice: str = ""):
    super().__init__(damage + advice)
    self.damage = damage


def restore_train_state(
  path: epath.PathLike,
  train_state: Any,
  partitioner: BasePartitioner,
  *,
  arrays: Mapping[str, Any] | None = None,
  transformations: Sequence[RestoreTransformation] = (),
  params_dtype: Any = None,
  fallback_state: Mapping[str, Any] | None = None,
  allow_unexpected: bool = False,
) -> Any:
  """Returns the train state stored at `path`, sharded as the partitioner specifies.

  Names, shapes and dtypes are compared first, so a checkpoint that does not match costs no memory.

  Args:
    path: a checkpoint of any layout.
    train_state: the run's train state, or its shapes.
    arrays: the checkpoint's arrays by flat name, if they are open already.
    transformations: see `find_matching_arrays`.
    params_dtype: the dtype of the floating-point parameters; None for the train state's.
    fallback_state: nested state dict that provides what the checkpoint lacks. It also replaces
      optimizer state that does not match.
    allow_unexpected: ignore names that only the checkpoint has.

  Raises:
    CheckpointMismatchError: the checkpoint does not match.
    UnreadableCheckpointError: files are missing or damaged.
  """
  specs = state_dicts.flatten_state_dict(partition_specs_of(partitioner, train_state).state_dict())
  shardings = {name: NamedSharding(partitioner.mesh, spec) for name, spec in specs.items()}
  expected = train_state.state_dict()
  flat = state_dicts.flatten_state_dict(expected, keep_empty_nodes=True)
  matching = find_matching_arrays(
    path,
    expected,
    arrays=arrays,
    transformations=transformations,
    allow_missing=fallback_state is not None,
    allow_unexpected=allow_unexpected,
  )
  converted = {
    name: array.astype(leaf_dtype(name, flat[name].dtype, params_dtype))
    for name, array in matching.items()
  }
  # Optimizers have leaves without a value (None, empty states), which are not stored.
  restored = {name: leaf for name, leaf in flat.items() if not hasattr(leaf, "shape")}
  try:
    restored |= _transfer_to_devices(converted, shardings)
  except _DAMAGE_ERRORS as error:
    raise unreadable_error(path, error) from error
  for name, leaf in state_dicts.flatten_state_dict(fallback_state or {}).items():
    if name in shardings and name not in restored:
      restored[name] = jax.device_put(leaf, shardings[name])
  restored |= _initialize_missing(restored, train_state, shardings, path)
  return train_state.restore_state(state_dicts.unflatten_state_dict(restored))


def find_matching_arrays(
  path: epath.PathLike,
  expected: Mapping[str, Any],
  *,
  arrays: Mapping[str, Any] | None = None,
  transformations: Sequence[RestoreTransformation] = (),
  allow_missing: bool = False,
  allow_unexpected: bool = False,
) -> dict[str, StoredArray]:
  """Returns the arrays of a checkpoint that a train state needs, by the train state's flat names.

  No value of a parameter is read. If the train state has no optimizer's state, as in inference, averages
  of the parameters take their place (see `with_averages`).

  Args:
    path: a checkpoint of any layout.
    expected: nested state dict of the train state's leaves (`shape`, `dtype`).
    arrays: the checkpoint's arrays by flat name, if they are open already.
    transformations: `fn(checkpoint's nested state dict, expected)` returns the first one renamed or
      changed. Its leaves are lazy arrays, which numpy functions read.
    allow_missing: leave out names that the checkpoint lacks and optimizer state that does not match.
    allow_unexpected: ignore names that only the checkpoint has.

  Raises:
    CheckpointMismatchError: the checkpoint does not match.
    UnreadableCheckpointError: files are missing or damaged.
  """
  wanted = state_dicts.flatten_arrays(expected)
  found = dict(read_arrays(path) if arrays is None else arrays)
  if not any(map(is_optimizer_state, wanted)):
    found = state_dicts.with_averages(found)
  if transformations:
    state: Any = state_dicts.unflatten_state_dict(found)
    for transform in transformations:
      state = transform(state, expected)
    found = state_dicts.flatten_arrays(state)
  try:
    converted = convert_tree({name: as_stored_array(x) for name, x in found.items()}, wanted)
  except TreeError as error:
    raise CheckpointMismatchError(f"checkpoint {path}: {error}") from error
  # As in T5X, values that the user's transformations do not use are ignored.
  allow_unexpected = allow_unexpected or any(
    fn is not state_dicts.resize_vocabulary for fn in transformations
  )
  restorable = find_restorable(path, converted, wanted, allow_missing, allow_unexpected)
  return {name: converted[name] for name in wanted if name in restorable}


def read_arrays(path: epath.PathLike) -> dict[str, StoredArray]:
  """Returns {flat name: array} of the checkpoint at `path`, under T5X's names.

  No value is read yet, except the step of a `checkpoint_STEP` folder. Files are not verified.

  Args:
    path: a checkpoint of any layout: Orbax, T5X's older one, Mesh TensorFlow (folder or prefix), or a
      Hugging Face folder. The layout is detected from the files.

  Raises:
    UnreadableCheckpointError: files are missing or damaged.
    ValueError: there is no checkpoint, the folder contains another step, or this machine cannot open
      the files.
  """
  is_step_folder = checkpoint_folders.step_of(path) is not None and epath.Path(path).is_dir()
  try:
    layout = checkpoint_folders.detect_checkpoint_type(path)
  except ValueError as error:
    raise (unreadable_error(path, error) if is_step_folder else error) from None
  try:
    arrays = {name: as_stored_array(value) for name, value in _READERS[layout](path).items()}
    step = stored_step(arrays) if is_step_folder else None
  except _DAMAGE_ERRORS as error:
    raise unreadable_error(path, error) from error
  if step not in (None, checkpoint_folders.step_of(path)):
    raise ValueError(
      f"{path} contains the checkpoint of step {step}: the folder was renamed, copied or swapped with "
      f"another. Rename it to {checkpoint_folders.checkpoint_path('', step).name}, or, to restore a copy under another name, to "
      "one that does not begin with checkpoint_"
    )
  return arrays


def stored_step(arrays: Mapping[str, StoredArray]) -> int | None:
  """Returns the step that a checkpoint contains, or None."""
  return int(arrays[_STEP].get()) if _STEP in arrays else None


def verify_files(path: epath.PathLike, with_dataset: bool = True) -> bool:
  """Compares the files of a checkpoint with its manifest. The processes of a run share the work.

  Args:
    path: a checkpoint of any layout.
    with_dataset: whether the position in the training data is verified too.

  Returns:
    Whether it has a manifest; the checkpoints of other programs have none.

  Raises:
    UnreadableCheckpointError: a file in this process's share is missing or damaged.
  """
  folder = manifest_folder(path)

  def select(name: str) -> bool:
    # Old positions are deleted (SaveCheckpointConfig.keep_dataset_checkpoints).
    is_position = name.startswith(f"{checkpoint_folders.DATASET_ITEM}/")
    return not is_position or (with_dataset and (folder / name).exists())

  try:
    return manifest.verify(folder, select, (jax.process_index(), jax.process_count()))
  except (OSError, manifest.DamagedFileError) as error:
    raise unreadable_error(path, error) from error


def manifest_folder(path: epath.PathLike) -> epath.Path:
  """Returns the folder that has the manifest of the checkpoint at `path`, if it has one."""
  given = epath.Path(path)
  return given if given.is_dir() and given.name != checkpoint_folders.STATE_ITEM else given.parent


def fingerprint(path: epath.PathLike) -> str | None:
  """Returns a hash of the content of the checkpoint at `path`; None if it has no manifest."""
  file = manifest_folder(path) / manifest.NAME
  return manifest.hash_file(file) if file.exists() else None


def unreadable_error(path: epath.PathLike, error: Exception) -> ValueError:
  """Returns the error for a checkpoint that cannot be read: for damage, an UnreadableCheckpointError.

  The error names the reason and, for damage, the older checkpoints. Missing permission, a limit on open
  files, or a failing disk or network is not damage.
  """
  folder = epath.Path(path)
  reason = textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
  if _is_machine_error(error):
    return ValueError(
      f"checkpoint {folder} cannot be opened on this machine: {reason}. This does not mean that it is "
      "damaged, and nothing has been changed. Start again once the machine can read it"
    )
  text = f"checkpoint {folder} cannot be read: {reason}"
  older = checkpoint_folders.older_steps(folder)
  if not older:
    return UnreadableCheckpointError(f"{text}. There is no older checkpoint beside it.")
  path = checkpoint_folders.checkpoint_path(folder.parent, older[-1])
  return UnreadableCheckpointError(
    f"{text}. Older steps beside it: {', '.join(map(str, older))}.",
    f" To use step {older[-1]}, give the path {path}, or move {folder.name} out of {folder.parent}.",
  )


def _is_machine_error(error: Exception) -> bool:
  """Returns whether an error is about the machine's resources or permissions, not about the files."""
  found = _OS_ERROR.search(str(error))
  number = int(found[1]) if found else getattr(error, "errno", None)
  if number is None:
    return str(error).startswith(_REMOTE_ERRORS)
  return number not in _MISSING_FILE_ERRNOS


def _transfer_to_devices(
  arrays: Mapping[str, StoredArray], shardings: Mapping[str, Any]
) -> dict[str, jax.Array]:
  """Reads arrays onto their devices, several at a time within a limit of host memory."""
  transferred: dict[str, jax.Array] = {}
  pending: collections.deque[tuple[str, Callable[[], jax.Array]]] = collections.deque()
  total = sum(array.nbytes for array in arrays.values())
  with terminal.progress_bar("restoring", total / 1e9, "GB") as bar:

    def finish_first() -> None:
      name, finish = pending.popleft()
      transferred[name] = finish()
      bar.advance(arrays[name].nbytes / 1e9)

    for name, array in arrays.items():
      while pending and sum(arrays[n].nbytes for n, _ in pending) + array.nbytes > _MAX_BYTES:
        finish_first()
      pending.append((name, start_device_transfer(array, shardings[name])))
    while pending:
      finish_first()
  return transferred


def _initialize_missing(
  restored: Mapping[str, Any], train_state: Any, shardings: Mapping[str, Any], path: epath.PathLike
) -> dict[str, Any]:
  """Returns initial optimizer state, step and fp8 state, by flat name, where a checkpoint has none.

  Args:
    restored: flat dict with all parameters.
    shardings: flat dict of the sharding of each leaf.
  """
  leaves = state_dicts.flatten_arrays(train_state.state_dict())
  missing = {name: leaf for name, leaf in leaves.items() if name not in restored}
  if not missing:
    return {}
  initial, states = {}, list(filter(is_optimizer_state, missing))
  for name in missing.keys() - states:
    # A scale of fp8 begins with 1; the step and the history of maxima begin with 0.
    is_scale = name.rpartition("/")[2].endswith(("scale", "scale_inv"))
    value = np.full(missing[name].shape, 1 if is_scale else 0, missing[name].dtype)
    initial[name] = jax.device_put(value, shardings[name])

  def init(params: Any) -> dict[str, jax.Array]:
    state = train_state.optimizer_def.init_state(params)
    fresh = train_state.replace(params=params, step=state.step, param_states=state.param_states)
    flat = state_dicts.flatten_state_dict(fresh.state_dict())
    return {name: jnp.asarray(flat[name]) for name in states}

  if states:
    params = state_dicts.unflatten_state_dict(restored)["target"]
    initial |= jax.jit(init, out_shardings={name: shardings[name] for name in states})(params)
  kinds = " and ".join(sorted(set(map(_kind_of_state, missing))))
  # A folder of Hugging Face has no step, and inference needs none.
  level = logging.INFO if kinds == "step" else logging.WARNING
  _log.log(level, "checkpoint %s has no %s, which is initialized", path, kinds)
  return initial


def _kind_of_state(name: str) -> str:
  if name == _STEP:
    return "step"
  return "optimizer state" if is_optimizer_state(name) else "fp8 state"
