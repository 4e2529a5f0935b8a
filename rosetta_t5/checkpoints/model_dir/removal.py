"""Old checkpoints go at once or not at all: renamed first, deleted in the background."""

from __future__ import annotations

import logging
import os
import threading

import jax
from etils import epath

# Inside MODEL_DIR. What lies in it is no checkpoint any more.
REMOVED = ".removed"
_log = logging.getLogger(__name__)


def remove_folder(folder: epath.Path) -> None:
  """Deletes a checkpoint's folder, which loses its name first: killed half-way, no half is found."""
  if not os.fspath(folder).startswith("gs://"):
    aside = folder.parent / REMOVED / folder.name
    aside.parent.mkdir(exist_ok=True)
    aside.rmtree(missing_ok=True)
    folder = folder.rename(aside)
  folder.rmtree()
  if folder.parent.name == REMOVED:
    Removal(folder.parent.parent).finish()


class Removal:
  """Deletes, in a thread, what has been put into a folder's `.removed`, also by a run before."""

  def __init__(self, directory: str | os.PathLike[str]):
    self._folder = epath.Path(directory) / REMOVED
    self._thread: threading.Thread | None = None

  def start(self) -> None:
    """Deletes what is there now; the folder stays, for more may be on its way into it."""
    if jax.process_index() == 0 and self._folder.is_dir() and not self._is_running():
      self._thread = threading.Thread(target=self._delete, name="removal", daemon=True)
      self._thread.start()

  def finish(self) -> None:
    """Deletes what is left, and the folder."""
    if self._thread is not None:
      self._thread.join()
    if jax.process_index() == 0 and self._folder.is_dir():
      self._delete()
      self._folder.rmdir()

  def _is_running(self) -> bool:
    return self._thread is not None and self._thread.is_alive()

  def _delete(self) -> None:
    for folder in self._folder.iterdir():
      try:
        folder.rmtree()
      except OSError as error:
        _log.warning("an old checkpoint is in the way and could not be deleted: %s", error)
