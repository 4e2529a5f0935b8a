"""One training run at a time in a MODEL_DIR: a file there says who trains, and that it still does."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import jax
from etils import epath

from rosetta_t5.checkpoints.model_dir.holder import Holder, is_running, this_process
from rosetta_t5.distributed.coordination import broadcast_text

LOCK_FILE = "run.lock"

# A run gives a sign of life every so often. One of another machine, whose processes cannot be
# looked at, has ended when none came for the longer time.
BEAT_S = 20.0
SILENCE_S = 120.0
_LOOK_AGAIN_S = 2.0
_SETTLE_S = 0.3

_log = logging.getLogger(__name__)

_held: dict[str, RunLock] = {}
_taking = threading.Lock()


class ModelDirInUseError(ValueError):
  """Another training run has this MODEL_DIR."""


def exclusive_model_dir(page: Callable[..., Any]) -> Callable[..., Any]:
  """Decorates a run page with an argument `model_dir`: while it runs, it alone has that folder."""
  signature = inspect.signature(page)

  @functools.wraps(page)
  def run(*args: Any, **kwargs: Any) -> Any:
    with hold(signature.bind(*args, **kwargs).arguments["model_dir"]):
      return page(*args, **kwargs)

  # Gin asks for the arguments in a way that does not look through decorators.
  run.__signature__ = signature  # type: ignore[attr-defined]
  return run


@contextlib.contextmanager
def hold(model_dir: str | os.PathLike[str]) -> Iterator[None]:
  """Has `model_dir` alone inside a `with`; the processes of one run have it together.

  A lock that a dead process left is taken over: of this machine at once, and so is that of the same
  Slurm job before it was requeued; that of another machine once it gives no sign of life.

  Raises:
    ModelDirInUseError: another run has it, on all processes of this one.
    ValueError: the folder cannot be written to.
  """
  refusal, lock = "", None
  if jax.process_index() == 0:
    try:
      lock = RunLock(model_dir, this_process())
    except (ModelDirInUseError, OSError) as error:
      refusal = _refusal(model_dir, error)
  refusal = broadcast_text(refusal, f"run lock {model_dir}", timeout_s=5 * SILENCE_S)
  if refusal:
    raise ModelDirInUseError(refusal)
  try:
    yield
  finally:
    if lock is not None:
      lock.release()


def check_still_held(directory: str | os.PathLike[str]) -> None:
  """Raises ModelDirInUseError if this process had `directory` and another run has taken it over."""
  lock = _held.get(os.fspath(epath.Path(directory)))
  if lock is not None and (other := lock.lost_to()):
    raise ModelDirInUseError(
      f"MODEL_DIR {directory} was taken over by {other}, because this run gave no sign of life for "
      f"{SILENCE_S:.0f} s. It ends here and leaves the checkpoints to that one."
    )


class RunLock:
  """The lock of one MODEL_DIR, held from here to `release`."""

  def __init__(self, model_dir: str | os.PathLike[str], me: Holder):
    """Takes the lock.

    Raises:
      ModelDirInUseError: another run has it.
      OSError: the folder cannot be written to.
    """
    self._path = epath.Path(model_dir) / LOCK_FILE
    self._me = me
    self._beats = 0
    self._released = threading.Event()
    self._path.parent.mkdir(parents=True, exist_ok=True)
    with _taking:
      self._take()
      _held[os.fspath(self._path.parent)] = self
    self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)
    self._thread.start()

  def release(self) -> None:
    """Gives the folder back, if it is still this run's."""
    self._released.set()
    self._thread.join()
    _held.pop(os.fspath(self._path.parent), None)
    with contextlib.suppress(OSError):  # a dead process's lock is worth nothing anyway
      found = self._holder()
      if found is not None and found[0] == self._me:
        self._path.unlink(missing_ok=True)

  def lost_to(self) -> Holder | None:
    """Returns who has the folder now, if that is another run."""
    found = self._holder()
    return found[0] if found is not None and found[0] != self._me else None

  def _take(self) -> None:
    contended = False
    while True:
      if self._offer(self._written(0)):
        if not contended:
          return
        # Another that found the same dead run may have taken this lock for that one's, for a moment.
        time.sleep(_SETTLE_S)
        if (found := self._holder()) is not None and found[0] == self._me:
          return
      contended = True
      found = self._holder()
      if found is not None and self._has_ended(*found):
        self._remove(found[0])

  def _written(self, beat: int) -> epath.Path:
    """Returns a file beside the lock with what the lock is to say."""
    aside = self._path.with_name(f"{LOCK_FILE}.{uuid.uuid4().hex}")
    try:
      aside.write_text(self._me.text(beat))
    except OSError:
      aside.unlink(missing_ok=True)  # empty, on a full disk
      raise
    return aside

  def _offer(self, aside: epath.Path) -> bool:
    """Makes `aside` the lock unless there is one; of several processes one succeeds."""
    try:
      os.link(aside, self._path)
    except FileExistsError:
      return False
    except OSError:  # no links there, as on gs://
      if self._path.exists():
        return False
      aside.replace(self._path)
      return True
    finally:
      aside.unlink(missing_ok=True)
    return True

  def _holder(self) -> tuple[Holder | None, str] | None:
    """Returns (holder or None if it is not readable, the file's text), or None for no file."""
    try:
      text = self._path.read_text()
    except OSError as error:
      if error.errno in (errno.ENOENT, errno.ESTALE):  # ESTALE: NFS, replaced while it was read
        return None
      raise
    return Holder.read(text), text

  def _has_ended(self, holder: Holder | None, text: str) -> bool:
    """Returns whether the run that has the lock has ended, at last; False if the lock has changed.

    Raises:
      ModelDirInUseError: it has not.
    """
    me = self._me
    if holder is not None and holder.machine == me.machine:
      is_me = (holder.pid, holder.born) == (me.pid, me.born)
      left_by_me = is_me and os.fspath(self._path.parent) not in _held
      if is_running(holder) and not left_by_me:
        raise ModelDirInUseError(str(holder))
      return True
    if holder is not None and me.job and holder.job == me.job and holder.restart < me.restart:
      return True  # Slurm ends a job before it starts it again
    return self._is_silent(holder, text)

  def _is_silent(self, holder: Holder | None, text: str) -> bool:
    """Waits for a sign of life of a run that cannot be looked at; returns whether none came.

    Raises:
      ModelDirInUseError: one came.
    """
    silence = self._silence()
    if silence < SILENCE_S:
      _log.warning(
        "%s is of a run on another machine (%s). Waiting up to %.0f s for a sign that it is alive",
        *(self._path, holder, SILENCE_S - silence),
      )
    while silence < SILENCE_S:
      time.sleep(min(_LOOK_AGAIN_S, SILENCE_S - silence))
      silence += _LOOK_AGAIN_S
      found = self._holder()
      if found is None or found[0] != holder:
        return False
      if found[1] != text:
        raise ModelDirInUseError(str(holder))
    return True

  def _silence(self) -> float:
    """Returns the seconds since the last sign of life, by the clock of the disk, not of a machine."""
    probe = self._path.with_name(f"{LOCK_FILE}.{uuid.uuid4().hex}")
    probe.write_text("")
    try:
      return max(0.0, probe.stat().mtime - self._path.stat().mtime)
    except FileNotFoundError:
      return 0.0
    finally:
      probe.unlink(missing_ok=True)

  def _remove(self, holder: Holder | None) -> None:
    """Takes away the lock of a run that has ended, unless another one was faster and has the folder."""
    aside = self._path.with_name(f"{LOCK_FILE}.{uuid.uuid4().hex}")
    try:
      self._path.rename(aside)
    except FileNotFoundError:
      return
    if Holder.read(aside.read_text()) != holder:
      self._offer(aside)
      return
    _log.warning("%s was left by a run that has ended (%s); taken over", self._path, holder)
    aside.unlink(missing_ok=True)

  def _beat(self) -> None:
    while not self._released.wait(BEAT_S):
      with contextlib.suppress(OSError):  # a full disk; the next beat may get through
        found = self._holder()
        if found is None or found[0] != self._me:
          return
        self._beats += 1
        self._written(self._beats).replace(self._path)


def _refusal(model_dir: str | os.PathLike[str], error: Exception) -> str:
  if not isinstance(error, ModelDirInUseError):
    return (
      f"MODEL_DIR {os.fspath(model_dir)} cannot be written to ({error}): give a folder that can, "
      "with room for checkpoints (--gin.MODEL_DIR=\"'...'\")"
    )
  return (
    f"MODEL_DIR {os.fspath(model_dir)} is in use by another training run: {error}. Two runs in one "
    "folder would write over each other's checkpoints. Wait for it, end it, or give this one a "
    f"folder of its own (--gin.MODEL_DIR=\"'...'\"). {LOCK_FILE} there says who has it."
  )
