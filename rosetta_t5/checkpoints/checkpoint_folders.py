"""Checkpoint folders: their names `checkpoint_STEP`, their layouts, and the run facts in them."""

from __future__ import annotations

import enum
import fnmatch
import logging
import os
import re
from collections.abc import Sequence
from typing import Any

from etils import epath

from rosetta_t5 import manifest
from rosetta_t5.checkpoints.formats.hugging_face.folder import is_hugging_face, local_folder
from rosetta_t5.files import read_json_object
from rosetta_t5.user_errors import reason_of

STEP_PREFIX = "checkpoint"
STATE_ITEM = "state"
DATASET_ITEM = "dataset"

# The file of the run facts. Earlier versions stored them in the metadata of the step.
RUN_FACTS = "run_facts.json"
_STEP_METADATA = "_CHECKPOINT_METADATA"
_ARRAY_METADATA = "_METADATA"
_COMMITTED = "commit_success.txt"
_LEGACY_INDEX = "checkpoint"
_STEP_NAME = re.compile(rf"{STEP_PREFIX}_(0|[1-9]\d*)")
# The possible first bytes of a msgpack map. TensorFlow's file of the same name is text.
_MSGPACK_MAPS = frozenset(range(0x80, 0x90)) | {0xDE, 0xDF}

_log = logging.getLogger(__name__)


class CheckpointTypes(enum.Enum):
  """The layouts of checkpoints on disk (T5X's names, and one more)."""

  ORBAX = "ORBAX"
  T5X = "T5X"
  T5X_TF = "T5X_TF"
  HUGGING_FACE = "HUGGING_FACE"


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
    folders = [f for f in folders if (f / _COMMITTED).exists() or (f / _LEGACY_INDEX).exists()]
  return sorted(step for folder in folders if (step := step_of(folder)) is not None)


def files_matching(folder: epath.PathLike, pattern: str) -> list[epath.Path]:
  """Returns what is in a folder and has a name like `*.index`, sorted; [] if there is no folder.

  `Path.glob` would take brackets in the folder's own name for a part of the pattern.
  """
  folder = epath.Path(folder)
  entries = folder.iterdir() if folder.is_dir() else ()
  return sorted(entry for entry in entries if fnmatch.fnmatchcase(entry.name, pattern))


def disk_bytes(path: epath.PathLike) -> int:
  """Returns the size of a file, or of all files in a folder."""
  path = epath.Path(path)
  return sum(map(disk_bytes, path.iterdir())) if path.is_dir() else path.stat().length


def latest_step(directory: epath.PathLike) -> int | None:
  """Returns the last complete step under `directory`, or None."""
  return max(all_steps(directory), default=None)


def older_steps(path: epath.PathLike) -> list[int]:
  """Returns the steps of the checkpoints beside the one at `path` that are older, in ascending order."""
  own = step_of(path) or 0
  return [step for step in all_steps(epath.Path(path).parent) if step < own]


def select_checkpoint(
  directory: epath.PathLike, step: int | None, path: epath.PathLike | None = None
) -> epath.Path:
  """Returns `path` if it is given, else the checkpoint of a step under `directory`.

  Args:
    directory: a folder of checkpoints.
    step: the step; None for the latest.
    path: a checkpoint, instead of a step.

  Raises:
    ValueError: the checkpoint of `step` does not exist, or both are given.
  """
  if step is not None and path is not None:
    raise ValueError(f"restore takes a step or a path, not both; got {step = } and {path = !s}")
  if path is not None:
    return epath.Path(path)
  steps = all_steps(directory)
  if not steps or step not in (None, *steps):
    found = f"there are steps {', '.join(map(str, steps))}" if steps else "there are none"
    wanted = "any step" if step is None else f"step {step}"
    raise ValueError(f"no checkpoint of {wanted} in {directory}: {found}")
  return checkpoint_path(directory, steps[-1] if step is None else step)


def resolve_checkpoint(path: epath.PathLike, step: int | None = None) -> epath.Path:
  """Returns the checkpoint at `path`, or if it is a folder of checkpoints, one of them.

  Args:
    path: a checkpoint of any layout, a folder of checkpoints, or the name of a model on Hugging Face's
      hub (see `hub.local_folder`).
    step: which checkpoint of a folder; None for the latest.

  Raises:
    ValueError: the folder has no checkpoint of `step`, or the model cannot be downloaded.
  """
  path = local_folder(path)
  is_checkpoint = step is None and not all_steps(path)
  return epath.Path(path) if is_checkpoint else select_checkpoint(path, step)


def state_path(path: epath.PathLike) -> epath.Path:
  """Returns the folder that contains the arrays of the Orbax checkpoint at `path`.

  `path` may be the checkpoint's folder or, as in T5X's tools, the folder of its item `state`.
  """
  folder = epath.Path(path).absolute()  # Orbax requires absolute paths; MODEL_DIR may be relative
  return folder / STATE_ITEM if (folder / STATE_ITEM).is_dir() else folder


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
  found = find_checkpoint_type(checkpoint_path)
  if found is None:
    raise ValueError(_not_a_checkpoint_text(epath.Path(checkpoint_path)))
  if expected not in (None, found):
    _log.warning(
      "%s was expected to have the layout %s, but has %s", checkpoint_path, expected, found
    )
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


def check_checkpoints_exist(paths: Sequence[str]) -> None:
  """Raises ValueError unless all paths are checkpoints. Runs call it before they write anything."""
  for path in paths:
    if find_checkpoint_type(path) is None:
      raise ValueError(
        f"{_not_a_checkpoint_text(epath.Path(path))}. Set CHECKPOINT_PATH "
        "(RestoreCheckpointConfig.path) to a checkpoint_STEP folder, or set mode = 'latest' and the "
        "path to its parent folder"
      )


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
  manifest.verify(folder, {RUN_FACTS}.__contains__)
  if (folder / RUN_FACTS).exists():
    return read_json_object(folder / RUN_FACTS)
  if not (metadata := folder / _STEP_METADATA).exists():
    return {}
  try:
    facts = dict(read_json_object(metadata).get("custom_metadata") or {})
  except (TypeError, ValueError) as error:
    raise manifest.DamagedFileError(f"{metadata} is damaged: {error}") from error
  facts.pop("checksum", None)  # of earlier versions
  return facts


def _detect_layout(path: epath.Path) -> CheckpointTypes | None:
  folder = state_path(path) if path.is_dir() else path.parent
  if (folder / _ARRAY_METADATA).exists() or (path / _STEP_METADATA).exists():
    return CheckpointTypes.ORBAX
  if is_hugging_face(path):
    return CheckpointTypes.HUGGING_FACE
  for index in (path / STATE_ITEM / _LEGACY_INDEX, path / _LEGACY_INDEX, path):
    if index.is_file() and (found := _detect_by_index(index)):
      return found
  has_tensorflow_index = path.is_dir() and bool(files_matching(path, "*.ckpt-*.index"))
  is_tensorflow = has_tensorflow_index or epath.Path(f"{path}.index").exists()
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
  return CheckpointTypes.ORBAX if b"PLACEHOLDER://" in start else CheckpointTypes.T5X


def _not_a_checkpoint_text(path: epath.Path) -> str:
  """Describes what is at `path` instead of a checkpoint, and which path to give."""
  if not path.exists():
    found = "there is no such file or folder"
  elif not path.is_dir():
    found = "it is a file of another kind"
  elif steps := all_steps(path):
    found = (
      f"it is a folder of checkpoints (steps {', '.join(map(str, steps))}): give one of them, such "
      f"as {checkpoint_path(path, steps[-1])}, or set RestoreCheckpointConfig.mode = 'latest'"
    )
  else:
    names = sorted(entry.name for entry in path.iterdir())
    found = f"the folder contains {', '.join(names[:8])}" if names else "the folder is empty"
  return f"{path} is not a checkpoint: {found}"
