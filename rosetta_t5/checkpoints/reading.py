"""Reading of a checkpoint of any layout as lazily read arrays under T5X's names."""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from rosetta_t5.checkpoints.arrays import checksums
from rosetta_t5.checkpoints.arrays.checksums import ArrayChecksums
from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray, as_stored_array
from rosetta_t5.checkpoints.formats import mesh_tf, orbax_reader, t5x_legacy
from rosetta_t5.checkpoints.formats.hugging_face import folder as hugging_face_folder
from rosetta_t5.checkpoints.model_dir.checkpoint_folders import (
  STATE_ITEM,
  CheckpointTypes,
  checkpoint_path,
  detect_checkpoint_type,
  disk_bytes,
  has_checksums,
  older_steps,
  state_path,
  step_of,
)
from rosetta_t5.files import json_checksum

# What the readers raise for missing and damaged files. RuntimeError is not one of them: a device that
# runs out of memory is not damage.
DAMAGE_ERRORS = (OSError, ValueError, KeyError, TypeError, IndexError)
# TensorStore states the operating system's error in its messages.
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
_REMOTE_ERRORS = ("PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE", "DEADLINE_EXCEEDED")
# These mean that a file of the checkpoint is missing. Others are about the machine.
_MISSING_FILE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
# An array larger than _LARGE_BYTES and more than _MAX_BYTES_PER_STORED times as large as all files
# together is refused.
_LARGE_BYTES = 1 << 30
_MAX_BYTES_PER_STORED = 1000
# The name under which every layout with a train state has the step.
_STEP = "state/step"

_log = logging.getLogger(__name__)

_READERS: dict[CheckpointTypes, Callable[[Any], Mapping[str, Any]]] = {
  CheckpointTypes.ORBAX: orbax_reader.read_arrays,
  CheckpointTypes.T5X: t5x_legacy.read_arrays,
  CheckpointTypes.T5X_TF: mesh_tf.read_arrays,
  CheckpointTypes.HUGGING_FACE: hugging_face_folder.read_arrays,
}


class UnreadableCheckpointError(ValueError):
  """A checkpoint exists but cannot be read.

  Attributes:
    damage: what is wrong, without the advice that the message ends with.
  """

  def __init__(self, damage: str, advice: str = ""):
    super().__init__(damage + advice)
    self.damage = damage


def read_arrays(
  path: epath.PathLike, *, warn_without_checksums: bool = True
) -> dict[str, StoredArray]:
  """Returns {flat name: array} of the checkpoint at `path`, under T5X's names.

  No value is read yet, except the step of a `checkpoint_STEP` folder.

  Args:
    path: a checkpoint of any layout: Orbax, T5X's older one, Mesh TensorFlow (folder or prefix), or a
      Hugging Face folder. The layout is detected from the files.
    warn_without_checksums: whether the log names a checkpoint that has no checksums, once.

  Raises:
    UnreadableCheckpointError: files are missing or damaged.
    ValueError: there is no checkpoint, the folder contains another step, or this machine cannot open
      the files.
  """
  is_step_folder = step_of(path) is not None and epath.Path(path).is_dir()
  try:
    layout = detect_checkpoint_type(path)
  except ValueError as error:
    raise (unreadable_error(path, error) if is_step_folder else error) from None
  try:
    arrays = {name: as_stored_array(value) for name, value in _READERS[layout](path).items()}
    _check_sizes(checksum_folder(path), arrays)
    if (found := read_checksums(path)) is not None:
      arrays = checksums.verified(arrays, found, checksum_folder(path))
    elif warn_without_checksums and layout is not CheckpointTypes.HUGGING_FACE:
      _report_no_checksums(os.fspath(path))
    step = stored_step(arrays) if is_step_folder else None
  except DAMAGE_ERRORS as error:
    raise unreadable_error(path, error) from error
  if step not in (None, step_of(path)):
    raise ValueError(_other_step_text(epath.Path(path), step))
  return arrays


def stored_step(arrays: Mapping[str, StoredArray]) -> int | None:
  """Returns the step that a checkpoint contains, or None.

  Raises:
    ValueError: it is not an integer.
  """
  if _STEP not in arrays:
    return None
  step = arrays[_STEP].get()
  try:
    return int(step)
  except (OverflowError, TypeError, ValueError):
    raise ValueError(f"{_STEP} must be an integer, got {step}") from None


def read_checksums(path: epath.PathLike) -> dict[str, ArrayChecksums] | None:
  """Returns the checksums of the arrays of the checkpoint at `path`; None if it was saved without.

  Raises:
    ChecksumError: the checksums are missing or damaged.
  """
  folder = checksum_folder(path)
  root = folder.parent if folder.name == STATE_ITEM else folder
  return checksums.read(folder, with_run_facts=has_checksums(root))


def values_checksum(path: epath.PathLike) -> str | None:
  """Returns a checksum of all values of the checkpoint at `path`; None if it was saved without checksums."""
  arrays = read_checksums(path)
  return None if arrays is None else json_checksum({n: vars(array) for n, array in arrays.items()})


def checksum_folder(path: epath.PathLike) -> epath.Path:
  """Returns the folder in which the checkpoint at `path` has its checksums."""
  given = epath.Path(path)
  return state_path(given) if given.is_dir() else given.parent


def _is_machine_error(error: Exception) -> bool:
  """Returns whether an error is about the machine's resources or permissions, not about the files."""
  found = _OS_ERROR.search(str(error))
  number = int(found[1]) if found else getattr(error, "errno", None)
  if number is None:
    return str(error).startswith(_REMOTE_ERRORS)
  return number not in _MISSING_FILE_ERRNOS


def _other_step_text(folder: epath.Path, step: int) -> str:
  return (
    f"{folder} contains the checkpoint of step {step}: the folder was renamed, copied or swapped with "
    f"another. Rename it to {checkpoint_path(folder.parent, step).name}, or, to restore a copy under "
    "another name, to one that does not begin with checkpoint_"
  )


def _check_sizes(folder: epath.Path, arrays: Mapping[str, StoredArray]) -> None:
  """Raises ValueError if an array claims a size that the files cannot hold, because the rest would be zeros."""
  name = max(arrays, key=lambda name: arrays[name].nbytes, default=None)
  if name is None or arrays[name].nbytes < _LARGE_BYTES:
    return
  stored = disk_bytes(folder)
  if arrays[name].nbytes > _MAX_BYTES_PER_STORED * stored:
    raise ValueError(
      f"{folder} is damaged: the shape {arrays[name].shape} of {name} means "
      f"{arrays[name].nbytes / 1e9:,.0f} GB, but its files have {stored / 1e9:,.3f} GB"
    )


@functools.cache
def _report_no_checksums(path: str) -> None:
  _log.warning(
    "checkpoint %s was saved without checksums, so damage to its values cannot be detected; "
    "`rosetta-t5 ckpt verify %s --write` stores them",
    path,
    path,
  )


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
  older = older_steps(folder)
  if not older:
    return UnreadableCheckpointError(f"{text}. There is no older checkpoint beside it.")
  return UnreadableCheckpointError(
    f"{text}. Older steps beside it: {', '.join(map(str, older))}.",
    f" To use step {older[-1]}, give the path {checkpoint_path(folder.parent, older[-1])}, or move "
    f"{folder.name} out of {folder.parent}.",
  )
