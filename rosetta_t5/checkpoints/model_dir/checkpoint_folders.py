"""Where checkpoints lie: a folder `checkpoint_STEP` for each step, and what its files say at a glance."""

from __future__ import annotations

import enum
import json
import logging
import os
import re
from collections.abc import Sequence
from typing import Any

from etils import epath

from rosetta_t5.checkpoints.formats.hugging_face.folder import is_hugging_face

STEP_PREFIX = "checkpoint"
STATE_ITEM = "state"
DATASET_ITEM = "dataset"

_STEP_METADATA = "_CHECKPOINT_METADATA"
_ARRAY_METADATA = "_METADATA"
_COMMITTED = "commit_success.txt"
_LEGACY_INDEX = "checkpoint"
_STEP_NAME = re.compile(rf"{STEP_PREFIX}_(0|[1-9]\d*)")
# The bytes with which a msgpack map of a few entries begins; TensorFlow's index file is text.
_MSGPACK_MAPS = frozenset(range(0x80, 0x90)) | {0xDE, 0xDF}

_log = logging.getLogger(__name__)


class CheckpointTypes(enum.Enum):
  """The layouts a checkpoint may have on disk (T5X's names, and one more)."""

  ORBAX = "ORBAX"
  T5X = "T5X"
  T5X_TF = "T5X_TF"
  HUGGING_FACE = "HUGGING_FACE"


def checkpoint_path(directory: str | os.PathLike[str], step: int) -> epath.Path:
  """Returns the folder of step `step` under `directory`."""
  return epath.Path(directory) / f"{STEP_PREFIX}_{step}"


def step_of(path: str | os.PathLike[str]) -> int | None:
  """Returns the step in the name of a checkpoint's folder, or None for any other path."""
  match = _STEP_NAME.fullmatch(epath.Path(path).name)
  return int(match.group(1)) if match else None


def all_steps(directory: str | os.PathLike[str]) -> list[int]:
  """Returns the steps whose checkpoints under `directory` are complete, in ascending order.

  A save writes into a folder of another name and renames it at the end, so a save that was killed
  is never listed. On gs:// there is no rename: there the file that marks success decides.
  """
  root = epath.Path(directory)
  if not root.is_dir():
    return []
  needs_mark = os.fspath(root).startswith("gs://")
  steps = []
  for entry in root.iterdir():
    step = step_of(entry)
    if step is None or not entry.is_dir():
      continue
    if needs_mark and not ((entry / _COMMITTED).exists() or (entry / _LEGACY_INDEX).exists()):
      continue
    steps.append(step)
  return sorted(steps)


def latest_step(directory: str | os.PathLike[str]) -> int | None:
  """Returns the last complete step under `directory`, or None."""
  steps = all_steps(directory)
  return steps[-1] if steps else None


def find_step(directory: str | os.PathLike[str], step: int | None) -> epath.Path:
  """Returns the folder of a step, or of the latest.

  Raises:
    ValueError: it is not there.
  """
  steps = all_steps(directory)
  step = steps[-1] if step is None and steps else step
  if step not in steps:
    there = f"there are steps {', '.join(map(str, steps))}" if steps else "there are none"
    wanted = "any step" if step is None else f"step {step}"
    raise ValueError(f"no checkpoint of {wanted} in {directory}: {there}")
  return checkpoint_path(directory, step)


def state_path(path: str | os.PathLike[str]) -> epath.Path:
  """Returns the folder with the arrays of the Orbax checkpoint at `path`.

  Accepts the checkpoint's folder and, as T5X's tools do, the folder of its item `state`.
  """
  folder = epath.Path(path).absolute()  # Orbax takes no other; MODEL_DIR may be relative
  return folder / STATE_ITEM if (folder / STATE_ITEM).is_dir() else folder


class UnreachableError(ValueError):
  """A checkpoint in a store, such as gs://, that this machine cannot read."""


def detect_checkpoint_type(
  checkpoint_path: str | os.PathLike[str], expected: CheckpointTypes | None = None
) -> CheckpointTypes:
  """Returns the layout of the checkpoint at `checkpoint_path`, found by looking at its files.

  Args:
    checkpoint_path: a checkpoint's folder, its legacy index file, or a TensorFlow prefix.
    expected: what the caller thinks it is; anything else is logged.

  Raises:
    ValueError: there is no checkpoint of a known layout.
    UnreachableError: it is in a store that cannot be read.
  """
  try:
    found = _layout(epath.Path(checkpoint_path))
  except Exception as error:  # of the library that reads gs:// or s3://
    if "://" not in os.fspath(checkpoint_path):
      raise
    raise UnreachableError(
      f"{checkpoint_path} cannot be read from this machine ({type(error).__name__}: "
      f"{str(error).splitlines()[0][:160]}). Copy it to a folder here, and name that"
    ) from error
  if found is None:
    raise ValueError(
      f"{checkpoint_path} is not a checkpoint: {_what_is_there(epath.Path(checkpoint_path))}"
    )
  if expected not in (None, found):
    _log.warning("%s was expected to be %s, but is %s", checkpoint_path, expected, found)
  return found


def check_checkpoints_exist(paths: Sequence[str]) -> None:
  """Raises ValueError, before a run writes or computes anything, unless all paths are checkpoints."""
  for path in paths:
    try:
      detect_checkpoint_type(path)
    except UnreachableError:
      raise
    except ValueError as error:
      raise ValueError(
        f"{error}. Set CHECKPOINT_PATH (RestoreCheckpointConfig.path) to a checkpoint_STEP folder, or "
        "mode = 'latest' and the folder above it"
      ) from None


def _layout(path: epath.Path) -> CheckpointTypes | None:
  folder = state_path(path) if path.is_dir() else path.parent
  if (folder / _ARRAY_METADATA).exists() or (path / _STEP_METADATA).exists():
    return CheckpointTypes.ORBAX
  if is_hugging_face(path):
    return CheckpointTypes.HUGGING_FACE
  for index in (path / STATE_ITEM / _LEGACY_INDEX, path / _LEGACY_INDEX, path):
    if index.exists() and not index.is_dir() and (found := _index_layout(index)):
      return found
  partial_copy = path.is_dir() and any(path.glob("*.ckpt-*.index"))
  is_tensorflow = partial_copy or epath.Path(f"{path}.index").exists()
  return CheckpointTypes.T5X_TF if is_tensorflow else None


def _index_layout(index: epath.Path) -> CheckpointTypes | None:
  """Tells by the file `checkpoint`, which three layouts have, which of them it is."""
  with index.open("rb") as file:
    start = file.read(1 << 20)
  if start.startswith(b"model_checkpoint_path"):
    return CheckpointTypes.T5X_TF
  if not start or start[0] not in _MSGPACK_MAPS:
    return None
  # Orbax's first versions kept the arrays' names in such a file.
  return CheckpointTypes.ORBAX if b"PLACEHOLDER://" in start else CheckpointTypes.T5X


def _what_is_there(path: epath.Path) -> str:
  """Says what stands at `path` instead of a checkpoint, and what to write instead."""
  if not path.exists():
    return "there is no such file or folder"
  steps = all_steps(path) if path.is_dir() else []
  if steps:
    return (
      f"it is a folder of checkpoints (steps {', '.join(map(str, steps))}): give one of them, such "
      f"as {checkpoint_path(path, steps[-1])}, or set RestoreCheckpointConfig.mode = 'latest'"
    )
  if not path.is_dir():
    return "it is a file of another kind"
  names = sorted(entry.name for entry in path.iterdir())
  return f"the folder holds {', '.join(names[:8])}" if names else "the folder is empty"


def read_run_facts(checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns the facts a run stored with a checkpoint (see OrbaxCheckpointManagerInterface).

  Args:
    checkpoint_dir: a checkpoint's folder, or a folder of checkpoints, whose latest is then read.

  Returns:
    The facts; empty where there is no checkpoint or it carries none (T5X's carry none).
  """
  folder = epath.Path(checkpoint_dir)
  if step_of(folder) is None:
    step = latest_step(folder)
    if step is None:
      return {}
    folder = checkpoint_path(folder, step)
  metadata = folder / _STEP_METADATA
  if not metadata.exists():
    return {}
  try:
    return dict(json.loads(metadata.read_text()).get("custom_metadata") or {})
  except ValueError as error:
    raise ValueError(
      f"{metadata} is not readable as JSON ({error}): the checkpoint is damaged"
    ) from (error)
