"""Checkpoints on disk: their names `checkpoint_STEP`, their layouts, arrays and run facts, and damage to them."""

import enum
import errno
import logging
import os
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import jax
from etils import epath

from rosetta_t5 import files
from rosetta_t5.argument_types import near_hint
from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray, as_stored_array
from rosetta_t5.checkpoints.formats import mesh_tf, t5x_layouts
from rosetta_t5.checkpoints.formats.hugging_face import folder as hugging_face_folder
from rosetta_t5.checkpoints.formats.hugging_face import peft_folder
from rosetta_t5.checkpoints.formats.t5x_layouts import STATE_ITEM, state_path
from rosetta_t5.user_errors import reason_of

STEP_PREFIX = "checkpoint"
# The run fact of a run that trains an adapter; see `adapter_checkpoints`.
ADAPTER = "adapter"
DATASET_ITEM = "dataset"
RUN_FACTS = "run_facts.json"
_STEP_METADATA = "_CHECKPOINT_METADATA"
_COMMITTED = "commit_success.txt"
_STEP_NAME = re.compile(rf"{STEP_PREFIX}_(0|[1-9]\d*)")
# The possible first bytes of a msgpack map. TensorFlow's file of the same name is text.
_MSGPACK_MAPS = frozenset(range(0x80, 0x90)) | {0xDE, 0xDF}
# What the readers raise for missing and damaged files. RuntimeError is not one of them: a device that
# runs out of memory is not damage.
DAMAGE_ERRORS = (OSError, ValueError, KeyError, TypeError, IndexError, MemoryError)
# TensorStore states the operating system's error in its messages.
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
_REMOTE_ERRORS = ("PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE", "DEADLINE_EXCEEDED")
# These mean that a file of the checkpoint is missing. Others are about the machine.
_MISSING_FILE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
# The name under which every layout with a train state has the step.
STEP = "state/step"

_log = logging.getLogger(__name__)


class CheckpointTypes(enum.Enum):
  """The layouts of checkpoints on disk (T5X's names, and two more)."""

  ORBAX = "ORBAX"
  T5X = "T5X"
  T5X_TF = "T5X_TF"
  HUGGING_FACE = "HUGGING_FACE"
  PEFT = "PEFT"


_READERS: dict[CheckpointTypes, Callable[[Any], Mapping[str, Any]]] = {
  CheckpointTypes.T5X_TF: mesh_tf.read_arrays,
  CheckpointTypes.HUGGING_FACE: hugging_face_folder.read_arrays,
  CheckpointTypes.PEFT: lambda path: peft_folder.read_with_base(path)[1],
}


class UnreadableCheckpointError(ValueError):
  """A checkpoint exists but cannot be read."""


def checkpoint_path(directory: epath.PathLike, step: int) -> epath.Path:
  """Returns the folder of step `step` under `directory`."""
  return epath.Path(directory) / f"{STEP_PREFIX}_{step}"


def step_of(path: epath.PathLike) -> int | None:
  """Returns the step in the name of a checkpoint's folder, or None for any other path."""
  match = _STEP_NAME.fullmatch(epath.Path(path).name)
  return int(match.group(1)) if match else None


def all_steps(directory: epath.PathLike) -> list[int]:
  """Returns the steps of the complete checkpoints under `directory`, in ascending order.

  A checkpoint is written into a folder of another name, which is renamed at the end. A save that was
  killed is therefore never listed. There is no rename on gs://, where a file marks success instead.
  """
  root = epath.Path(directory)
  folders = [entry for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []
  if os.fspath(root).startswith("gs://"):
    folders = [f for f in folders if (f / _COMMITTED).exists() or (f / t5x_layouts.INDEX).exists()]
  return sorted(step for folder in folders if (step := step_of(folder)) is not None)


def latest_step(directory: epath.PathLike) -> int | None:
  """Returns the last complete step under `directory`, or None."""
  return max(all_steps(directory), default=None)


def older_steps(path: epath.PathLike) -> list[int]:
  """Returns the steps of the checkpoints beside the one at `path` that are older, in ascending order."""
  own = step_of(path) or 0
  return [step for step in all_steps(epath.Path(path).parent) if step < own]


def select_checkpoint(directory: epath.PathLike, step: int | None) -> epath.Path:
  """Returns the checkpoint of a step under `directory`; with None, the latest.

  Raises:
    ValueError: there is no such checkpoint.
  """
  steps = all_steps(directory)
  if not steps:
    raise ValueError(f"there is no checkpoint in {directory}")
  if step not in (None, *steps):
    raise ValueError(
      f"{directory} has no checkpoint of step {step}: it has {', '.join(map(str, steps))}"
    )
  return checkpoint_path(directory, steps[-1] if step is None else step)


def resolve_checkpoint(path: epath.PathLike, step: int | None = None) -> epath.Path:
  """Returns the checkpoint at `path`, or if it is a folder of checkpoints, one of them.

  Args:
    path: a checkpoint of any layout, a folder of checkpoints, or the name of a model on Hugging Face's
      hub (see `hugging_face.folder.local_folder`).
    step: which checkpoint of a folder; None for the latest.

  Raises:
    ValueError: the folder has no checkpoint of `step`, or the model cannot be downloaded.
  """
  path = hugging_face_folder.local_folder(path)
  is_checkpoint = step is None and not all_steps(path)
  return epath.Path(path) if is_checkpoint else select_checkpoint(path, step)


def detect_checkpoint_type(
  checkpoint_path: epath.PathLike, expected: CheckpointTypes | None = None
) -> CheckpointTypes:
  """Returns the layout of the checkpoint at `checkpoint_path`, detected from its files.

  Args:
    checkpoint_path: a checkpoint's folder, its legacy index file, or a TensorFlow prefix.
    expected: the layout that the caller expects; a warning is logged for any other.

  Raises:
    ValueError: there is no checkpoint of a known layout, or remote storage cannot be read.
  """
  path = epath.Path(checkpoint_path)
  found = find_checkpoint_type(path)
  if found is None:
    error = ValueError(f"{path} is not a checkpoint: {describe(path)}")
    raise unreadable_error(path, error) if step_of(path) is not None and path.is_dir() else error
  if expected not in (None, found):
    _log.warning("%s was expected to have the layout %s, but has %s", path, expected, found)
  return found


def find_checkpoint_type(path: epath.PathLike) -> CheckpointTypes | None:
  """Returns the layout of the checkpoint at `path`; None if there is no checkpoint.

  Raises:
    ValueError: the path is in remote storage, such as gs://, that cannot be read.
  """
  try:
    return _detect_layout(epath.Path(path))
  except Exception as error:  # raised by the library that reads gs:// or s3://
    if "://" not in os.fspath(path):
      raise
    raise ValueError(
      f"{path} cannot be read from this machine ({reason_of(error)[:160]}). Copy it to a local folder "
      "and give that path"
    ) from error


def read_run_facts(checkpoint_dir: epath.PathLike) -> dict[str, Any]:
  """Returns the facts a run stored with a checkpoint (see OrbaxCheckpointManagerInterface).

  Args:
    checkpoint_dir: a checkpoint's folder, or a folder of checkpoints, whose latest is then read.

  Returns:
    The facts; empty if there is no checkpoint or it has none, as T5X's checkpoints do.

  Raises:
    DamagedFileError: their file is damaged.
  """
  folder = epath.Path(checkpoint_dir)
  if step_of(folder) is None:
    folder = resolve_checkpoint(folder)
  files.verify_checksums(folder, {RUN_FACTS}.__contains__)
  return files.read_json_object(folder / RUN_FACTS) if (folder / RUN_FACTS).exists() else {}


def _detect_layout(path: epath.Path) -> CheckpointTypes | None:
  folder = state_path(path) if path.is_dir() else path.parent
  if (folder / t5x_layouts.METADATA).exists() or (path / _STEP_METADATA).exists():
    return CheckpointTypes.ORBAX
  if hugging_face_folder.is_hugging_face(path):
    return CheckpointTypes.HUGGING_FACE
  if peft_folder.is_peft(path):
    return CheckpointTypes.PEFT
  for index in (path / STATE_ITEM / t5x_layouts.INDEX, path / t5x_layouts.INDEX, path):
    if index.is_file() and (found := _detect_by_index(index)):
      return found
  is_tensorflow = any(path.glob("*.ckpt-*.index")) or epath.Path(f"{path}.index").exists()
  return CheckpointTypes.T5X_TF if is_tensorflow else None


def _detect_by_index(index: epath.Path) -> CheckpointTypes | None:
  """Returns the layout by the content of the file `checkpoint`, which three layouts have."""
  with index.open("rb") as file:
    start = file.read(1 << 20)
  if start.startswith(b"model_checkpoint_path"):
    return CheckpointTypes.T5X_TF
  if not start or start[0] not in _MSGPACK_MAPS:
    return None
  # Orbax's first versions stored the arrays' names in such a file.
  return CheckpointTypes.ORBAX if t5x_layouts.PLACEHOLDER.encode() in start else CheckpointTypes.T5X


def describe(path: epath.Path) -> str:
  """Describes what is at `path`, where a checkpoint is expected, and which path to give."""
  if not path.exists():
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    return f"there is no such file or folder{near_hint(path.name, siblings)}"
  if not path.is_dir():
    return "it is a file of another kind"
  if steps := all_steps(path):
    return (
      f"it is a folder of checkpoints (steps {', '.join(map(str, steps))}): give one of them, such "
      f"as {checkpoint_path(path, steps[-1])}, or set RestoreCheckpointConfig.mode = 'latest'"
    )
  names = sorted(entry.name for entry in path.iterdir())
  return f"the folder contains {', '.join(names[:8])}" if names else "the folder is empty"


def read_arrays(path: epath.PathLike) -> dict[str, StoredArray]:
  """Returns {flat name: array} of the checkpoint at `path`, under T5X's names.

  No value is read yet, except the step of a `checkpoint_STEP` folder. Files are not verified. What the
  checkpoint of an adapter leaves out is read from its base.

  Args:
    path: a checkpoint of any layout: Orbax, T5X's older one, Mesh TensorFlow (folder or prefix), or a
      Hugging Face folder. The layout is detected from the files.

  Raises:
    UnreadableCheckpointError: files are missing or damaged.
    ValueError: there is no checkpoint, the folder contains another step, this machine cannot open the
      files, or the base of an adapter is missing or damaged.
  """
  is_step_folder = step_of(path) is not None and epath.Path(path).is_dir()
  read = _READERS.get(detect_checkpoint_type(path), t5x_layouts.read_arrays)
  try:
    arrays = {name: as_stored_array(value) for name, value in read(path).items()}
    step = stored_step(arrays) if is_step_folder else None
  except DAMAGE_ERRORS as error:
    raise unreadable_error(path, error) from error
  if step not in (None, step_of(path)):
    raise ValueError(
      f"{path} contains the checkpoint of step {step}. Rename it to {STEP_PREFIX}_{step}, or, to restore a "
      f"copy, to a name that does not begin with {STEP_PREFIX}_"
    )
  base = None if peft_folder.is_peft(path) else adapter_fact(path).get("base")
  if base is None:
    return arrays
  if find_checkpoint_type(base) is None:
    raise ValueError(
      f"{path} has the adapter only, and its base {base} is missing: move it back to this path, or put a link "
      "to it there"
    )
  try:
    return {**{n: x for n, x in read_arrays(base).items() if n.startswith("target/")}, **arrays}
  except UnreadableCheckpointError as error:
    # An error of another class, because this checkpoint is not damaged and must keep its name.
    raise ValueError(f"the base {base} of the adapter in {path} cannot be read: {error}") from error


def adapter_fact(path: epath.PathLike) -> dict[str, Any]:
  """Returns what a checkpoint states about its adapter; {} if it has none.

  Raises:
    UnreadableCheckpointError: the file that states it is damaged.
  """
  if peft_folder.is_peft(path):
    return peft_folder.read_with_base(path)[0].settings()
  if not (epath.Path(path) / RUN_FACTS).exists():
    return {}
  try:
    return read_run_facts(path).get(ADAPTER) or {}
  except files.DamagedFileError as error:
    raise unreadable_error(path, error) from error


def stored_step(arrays: Mapping[str, StoredArray]) -> int | None:
  """Returns the step that a checkpoint contains, or None."""
  return int(arrays[STEP].get()) if STEP in arrays else None


def verify_files(path: epath.PathLike, with_dataset: bool = True) -> bool:
  """Compares the files of a checkpoint with its checksums. The processes of a run share the work.

  Args:
    path: a checkpoint of any layout.
    with_dataset: whether the position in the training data is verified too.

  Returns:
    Whether it has checksums; the checkpoints of other programs have none.

  Raises:
    UnreadableCheckpointError: a file in this process's share is missing or damaged.
  """
  folder = checksums_folder(path)

  def select(name: str) -> bool:
    # Old positions are deleted (SaveCheckpointConfig.keep_dataset_checkpoints).
    is_position = name.startswith(f"{DATASET_ITEM}/")
    return not is_position or (with_dataset and (folder / name).exists())

  try:
    return files.verify_checksums(folder, select, (jax.process_index(), jax.process_count()))
  except (OSError, files.DamagedFileError) as error:
    raise unreadable_error(path, error) from error


def checksums_folder(path: epath.PathLike) -> epath.Path:
  """Returns the folder that has the checksums.json of the checkpoint at `path`, if it has one."""
  given = epath.Path(path)
  return given if given.is_dir() and given.name != STATE_ITEM else given.parent


def fingerprint(path: epath.PathLike) -> str:
  """Returns a hash of a checkpoint's checksums; without any, its path and when its files last changed."""
  file = checksums_folder(path) / files.CHECKSUMS_NAME
  if file.exists():
    return files.hash_file(file)
  root = epath.Path(path)
  return f"{root}, {max((each.stat().mtime for each in root.glob('*')), default=0)}"


def unreadable_error(path: epath.PathLike, error: Exception) -> ValueError:
  """Returns the error for a checkpoint that cannot be read: for damage, an UnreadableCheckpointError.

  The error names the reason and, for damage, the older checkpoints. Missing permission, a limit on open
  files, a failing disk or network, or too little memory is not damage.
  """
  folder = epath.Path(path)
  reason = textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
  found = _OS_ERROR.search(str(error))
  number = int(found[1]) if found else getattr(error, "errno", None)
  is_remote = number is None and str(error).startswith(_REMOTE_ERRORS)
  is_on_disk = number in (None, *_MISSING_FILE_ERRNOS) and not isinstance(error, MemoryError)
  if is_remote or not is_on_disk:
    return ValueError(
      f"checkpoint {folder} cannot be opened on this machine: {reason}. This does not mean that it is "
      "damaged. Start again once the machine can read it"
    )
  older = ", ".join(map(str, older_steps(folder))) or "none"
  return UnreadableCheckpointError(
    f"checkpoint {folder} cannot be read: {reason}. Older steps beside it: {older}."
  )
