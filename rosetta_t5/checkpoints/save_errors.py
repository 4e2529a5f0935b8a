"""Saves and errors: why a save failed, as a text that says what to do; a save that a failing run began."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

from etils import epath

from rosetta_t5.checkpoints.model_dir import checkpoint_folders


class CheckpointSaveError(RuntimeError):
  """A checkpoint could not be written, so the run stops rather than train on without one."""


@contextlib.contextmanager
def finish_saves_on_error(manager: Any) -> Iterator[None]:
  """Inside a `with`, lets an error out only when the save that is running in the background is complete.

  Else a run that fails just after a save loses that too, and Orbax's complaints bury what went wrong.

  Args:
    manager: the checkpoint manager; None for none.
  """
  try:
    yield
  except Exception:
    if manager is not None:
      # The first error is the one to tell.
      with contextlib.suppress(Exception):
        manager.wait_until_finished()
    raise


def save_error(directory: epath.Path, step: int, error: Exception) -> CheckpointSaveError:
  """Returns the error for the checkpoint of `step` that could not be saved into `directory`."""
  good = [s for s in checkpoint_folders.all_steps(directory) if s != step]
  last = f"the last complete one is step {good[-1]}" if good else "there is no complete one yet"
  room = "make room or give a MODEL_DIR that can be written to, then " if _is_disk(error) else ""
  return CheckpointSaveError(
    f"checkpoint {checkpoint_folders.checkpoint_path(directory, step)} could not be saved: "
    f"{type(error).__name__}: {error}. {_free_space(directory)}In this folder {last}; "
    f"{room}start again to resume from there."
  )


def _is_disk(error: Exception) -> bool:
  """Whether a save failed for want of room or of the right to write; TensorStore says so in words."""
  words = ("No space left", "Permission denied", "Read-only file system", "quota")
  return isinstance(error, OSError) or any(word in str(error) for word in words)


def _free_space(directory: epath.Path) -> str:
  for folder in (directory, *directory.parents):
    if folder.exists() and not os.fspath(folder).startswith("gs://"):
      return f"{shutil.disk_usage(folder).free / 1e9:.1f} GB are free there. "
  return ""
