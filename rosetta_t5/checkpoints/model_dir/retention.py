"""Which checkpoints are kept, and how the others are deleted."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

import jax
from etils import epath

from rosetta_t5.checkpoints.dataset_position import DATASET_PREFIX
from rosetta_t5.checkpoints.model_dir.best_metric import BestMetric
from rosetta_t5.checkpoints.model_dir.checkpoint_folders import (
  DATASET_ITEM,
  all_steps,
  checkpoint_path,
  files_matching,
)

# The folder in MODEL_DIR to which checkpoints are moved before their files are deleted. A process
# that is killed during the deletion then leaves no incomplete checkpoint.
REMOVED_FOLDER = ".removed"
_PIN_FILE = "PINNED"

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Retention:
  """Orbax's preservation policy with T5X's rules.

  Attributes:
    directory: the folder of checkpoints.
    keep: how many of the latest checkpoints are kept; with `best`, how many of the best beside the
      latest; None for all.
    force_keep_period: multiples of this step are kept too.
    best: the metric that decides which checkpoints are best.
    protected: steps that are always kept, such as the one that a run started from.
  """

  directory: epath.PathLike
  keep: int | None = None
  force_keep_period: int | None = None
  best: BestMetric | None = None
  protected: set[int] = dataclasses.field(default_factory=set)

  def __post_init__(self) -> None:
    if self.keep is not None and self.keep < 1:
      raise ValueError(
        f"SaveCheckpointConfig.keep must be at least 1, or None to keep every checkpoint; got "
        f"{self.keep}, which would delete all of them"
      )

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    """Returns whether each checkpoint is kept; they have an attribute `step`, in ascending order."""
    del context
    steps = [checkpoint.step for checkpoint in checkpoints]
    deleted = self.steps_to_delete(steps)
    return [step not in deleted for step in steps]

  def steps_to_delete(self, steps: Sequence[int]) -> set[int]:
    """Returns which of `steps`, in ascending order, are to be deleted."""
    if self.keep is None:
      return set()
    if self.best is None:
      return {step for step in steps[: -self.keep] if not self._is_always_kept(step)}
    # As in T5X, checkpoints that are always kept do not count. The latest is kept in any case.
    counted = [step for step in steps if step == steps[-1] or not self._is_always_kept(step)]
    return self.best.steps_to_delete(self.directory, counted, self.keep)

  def _is_always_kept(self, step: int) -> bool:
    is_multiple = bool(self.force_keep_period and step % self.force_keep_period == 0)
    is_pinned = is_pinned_checkpoint(checkpoint_path(self.directory, step))
    return step in self.protected or is_multiple or is_pinned


def pinned_checkpoint_filepath(ckpt_dir: epath.PathLike) -> str:
  """Returns the path of the file whose existence pins the checkpoint in `ckpt_dir`."""
  return os.fspath(epath.Path(ckpt_dir) / _PIN_FILE)


def is_pinned_checkpoint(ckpt_dir: epath.PathLike) -> bool:
  """Returns whether the checkpoint in `ckpt_dir` is kept regardless of `keep`."""
  return epath.Path(pinned_checkpoint_filepath(ckpt_dir)).exists()


def pin_checkpoint(ckpt_dir: epath.PathLike, txt: str = "1") -> None:
  """Pins the checkpoint in `ckpt_dir` and stores the note `txt`."""
  epath.Path(pinned_checkpoint_filepath(ckpt_dir)).write_text(txt)


def unpin_checkpoint(ckpt_dir: epath.PathLike) -> None:
  """Allows `keep` to delete the checkpoint in `ckpt_dir` again."""
  epath.Path(pinned_checkpoint_filepath(ckpt_dir)).unlink(missing_ok=True)


def remove_checkpoint_dir(ckpt_dir: epath.PathLike) -> None:
  """Deletes the checkpoint in `ckpt_dir` unless it is pinned."""
  folder = epath.Path(ckpt_dir)
  if is_pinned_checkpoint(folder) or not folder.exists():
    return
  if os.fspath(folder).startswith("gs://"):
    folder.rmtree()
    return
  removed = folder.parent / REMOVED_FOLDER
  removed.mkdir(exist_ok=True)
  (removed / folder.name).rmtree(missing_ok=True)
  folder.rename(removed / folder.name)
  BackgroundRemover(folder.parent).finish()


def remove_dataset_checkpoint(ckpt_dir: epath.PathLike, train_ds_prefix: str) -> None:
  """Deletes the dataset positions of the checkpoint in `ckpt_dir` unless it is pinned.

  They are in the checkpoint's folder (T5X's older layout) or in its item `dataset` (Orbax).
  """
  folder = epath.Path(ckpt_dir)
  if is_pinned_checkpoint(folder):
    return
  for parent in (folder, folder / DATASET_ITEM):
    for position in files_matching(parent, f"{train_ds_prefix}*"):
      if position.is_dir():
        position.rmtree()
      else:
        position.unlink()


def remove_old_dataset_positions(directory: epath.PathLike, keep: int) -> None:
  """Deletes the dataset positions of all but the last `keep` complete checkpoints."""
  steps = all_steps(directory)
  for step in steps[: max(0, len(steps) - keep)]:
    remove_dataset_checkpoint(checkpoint_path(directory, step), DATASET_PREFIX)


class BackgroundRemover:
  """Deletes the checkpoints that this run or an earlier one moved to `.removed`, in a thread."""

  def __init__(self, directory: epath.PathLike):
    self._folder = epath.Path(directory) / REMOVED_FOLDER
    self._thread: threading.Thread | None = None

  def start(self) -> None:
    """Starts to delete the checkpoints that are there now."""
    if self._thread is None or not self._thread.is_alive():
      self._thread = threading.Thread(target=self._delete, name="checkpoint-removal", daemon=True)
      self._thread.start()

  def finish(self) -> None:
    """Deletes all remaining checkpoints, and the folder `.removed`."""
    if self._thread is not None:
      self._thread.join()
    if self._delete() and not any(self._folder.iterdir()):
      self._folder.rmdir()

  def _delete(self) -> bool:
    """Empties the folder; returns False if there is nothing to do."""
    if jax.process_index() != 0 or not self._folder.is_dir():
      return False
    for checkpoint in self._folder.iterdir():
      try:
        if os.path.islink(checkpoint):  # Only the link is deleted; its target is kept.
          checkpoint.unlink()
        else:
          checkpoint.rmtree()
      except OSError as error:
        _log.warning("an old checkpoint could not be deleted: %s", error)
    return True
