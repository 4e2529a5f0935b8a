"""The lock file of a MODEL_DIR, which allows one training run at a time."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import logging
import os
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import jax
from etils import epath

from rosetta_t5.checkpoints.model_dir.lock_owner import LockOwner, current_process, is_running
from rosetta_t5.distributed.coordination import broadcast_text

LOCK_FILE = "run.lock"

# A run rewrites its lock file after every heartbeat interval. The processes of another machine
# cannot be inspected, so a run there counts as ended after a longer time without a heartbeat.
HEARTBEAT_INTERVAL_S = 20.0
HEARTBEAT_TIMEOUT_S = 120.0
POLL_INTERVAL_S = 2.0
_SETTLE_S = 0.3

_log = logging.getLogger(__name__)

_locks_held: dict[str, RunLock] = {}
_acquiring = threading.Lock()


class ModelDirInUseError(ValueError):
  """Another training run uses this MODEL_DIR."""


def exclusive_model_dir(function: Callable[..., Any]) -> Callable[..., Any]:
  """Decorates a function with an argument `model_dir` so that it locks that folder while it runs."""
  signature = inspect.signature(function)

  @functools.wraps(function)
  def run(*args: Any, **kwargs: Any) -> Any:
    with lock_model_dir(signature.bind(*args, **kwargs).arguments["model_dir"]):
      return function(*args, **kwargs)

  # Gin inspects the arguments in a way that does not follow `__wrapped__`.
  run.__signature__ = signature  # type: ignore[attr-defined]
  return run


@contextlib.contextmanager
def lock_model_dir(model_dir: epath.PathLike) -> Iterator[None]:
  """Locks `model_dir` for this run inside a `with` statement. All processes of a run share the lock.

  The lock of a run that has ended is taken over. This happens at once if the run was on this machine
  or was an earlier start of the same Slurm job, since requeued. A run on another machine counts as
  ended when it has stopped sending heartbeats.

  Raises:
    ModelDirInUseError: another run holds the lock. All processes of this run raise it.
    ValueError: the folder cannot be written to.
  """
  refusal, lock = "", None
  if jax.process_index() == 0:
    try:
      lock = RunLock(model_dir, current_process())
    except ModelDirInUseError as error:
      refusal = f"in_use {_in_use_text(model_dir, error)}"
    except OSError as error:
      refusal = f"error {_unwritable_text(model_dir, error)}"
  refusal = broadcast_text(refusal, f"run lock {model_dir}", timeout_s=5 * HEARTBEAT_TIMEOUT_S)
  if refusal:
    kind, _, text = refusal.partition(" ")
    raise (ModelDirInUseError if kind == "in_use" else ValueError)(text)
  try:
    yield
  finally:
    if lock is not None:
      lock.release()


def check_lock_is_held(directory: epath.PathLike) -> None:
  """Raises an error if this process locked `directory` and has lost it.

  Raises:
    ModelDirInUseError: another run took the lock over.
    ValueError: another folder has taken the place of the locked one.
  """
  lock = _locks_held.get(os.fspath(epath.Path(directory)))
  if lock is None:
    return
  if lock.is_in_another_folder():
    raise ValueError(
      f"MODEL_DIR {directory} was moved or removed during the run, and another folder is in its place: "
      "move it back, then run the same command to continue"
    )
  if other := lock.restore_or_find_new_owner():
    raise ModelDirInUseError(
      f"MODEL_DIR {directory} was taken over by {other}: run.lock was damaged, or had no heartbeat for "
      f"{HEARTBEAT_TIMEOUT_S:.0f} s. This run stops and writes no more checkpoints there."
    )


def was_moved(directory: epath.PathLike) -> bool:
  """Returns whether this process has locked a folder that is no longer in its place."""
  path = epath.Path(directory)
  lock = _locks_held.get(os.fspath(path))
  return lock is not None and (not path.exists() or lock.is_in_another_folder())


class RunLock:
  """The lock of one MODEL_DIR, held from its construction until `release`."""

  def __init__(self, model_dir: epath.PathLike, owner: LockOwner):
    """Acquires the lock for `owner`.

    Raises:
      ModelDirInUseError: another run holds the lock.
      OSError: the folder cannot be written to.
    """
    self._path = epath.Path(model_dir) / LOCK_FILE
    self._owner = owner
    self._released = threading.Event()
    self._path.parent.mkdir(parents=True, exist_ok=True)
    with _acquiring:
      self._acquire()
      self._inode = _inode(self._path.parent)
      _locks_held[os.fspath(self._path.parent)] = self
    self._thread = threading.Thread(target=self._send_heartbeats, name="run-lock", daemon=True)
    self._thread.start()

  def release(self) -> None:
    """Removes the lock file unless another run has taken the lock over."""
    self._released.set()
    self._thread.join()
    _locks_held.pop(os.fspath(self._path.parent), None)
    with contextlib.suppress(OSError):  # the lock of an ended process has no effect
      if self._is_mine():
        self._path.unlink(missing_ok=True)

  def is_in_another_folder(self) -> bool:
    """Returns whether the lock is missing because another folder is in the place of the locked one."""
    return _inode(self._path.parent) not in (None, self._inode) and not self._path.exists()

  def restore_or_find_new_owner(self) -> LockOwner | None:
    """Returns the run that has taken the lock over, or None. Writes a missing or damaged lock again."""
    try:
      owner, _ = self._read()
      if owner is None:
        self._write_temporary(beat=0).replace(self._path)
        _log.warning("%s was removed or damaged during the run; it is written again", self._path)
    except OSError:  # for example a full disk; the next heartbeat may succeed
      return None
    return None if owner == self._owner else owner

  def _acquire(self) -> None:
    contended = False
    while True:
      if self._create(self._write_temporary(beat=0)):
        if not contended:
          return
        # A competitor may have mistaken this new lock for the ended run's and moved it away briefly.
        time.sleep(_SETTLE_S)
        if self._is_mine():
          return
      contended = True
      owner, text = self._read()
      if text is not None and self._has_ended(owner, text):
        self._remove(owner)

  def _write_temporary(self, beat: int) -> epath.Path:
    """Writes the lock's content into another file in the folder, and returns its path."""
    temporary = self._temporary_path()
    try:
      temporary.write_text(self._owner.to_json(beat))
    except OSError:
      temporary.unlink(missing_ok=True)  # empty, on a full disk
      raise
    return temporary

  def _temporary_path(self) -> epath.Path:
    return self._path.with_name(f"{LOCK_FILE}.{uuid.uuid4().hex}")

  def _create(self, temporary: epath.Path) -> bool:
    """Makes `temporary` the lock file if there is none; only one of several processes succeeds."""
    try:
      os.link(temporary, self._path)
    except FileExistsError:
      return False
    except OSError:  # the file system has no links, as on gs://
      if self._path.exists():
        return False
      temporary.replace(self._path)
      return True
    finally:
      temporary.unlink(missing_ok=True)
    return True

  def _read(self) -> tuple[LockOwner | None, str | None]:
    """Returns the owner, None if unreadable, and the lock file's text, None if there is no file."""
    try:
      text = _read_text(self._path)
    except OSError as error:
      if error.errno in (errno.ENOENT, errno.ESTALE):  # ESTALE: replaced on NFS during the read
        return None, None
      raise
    return LockOwner.from_json(text), text

  def _is_mine(self) -> bool:
    return self._read()[0] == self._owner

  def _has_ended(self, owner: LockOwner | None, text: str) -> bool:
    """Returns whether the run that holds the lock has ended; False if the lock has changed.

    Raises:
      ModelDirInUseError: the run is still running.
    """
    me = self._owner
    if owner is None:
      return True  # A run writes its lock at once, so this one was damaged.
    if owner.machine == me.machine:
      is_me = (owner.pid, owner.born) == (me.pid, me.born)
      left_by_me = is_me and os.fspath(self._path.parent) not in _locks_held
      if is_running(owner) and not left_by_me:
        raise ModelDirInUseError(str(owner))
      return True
    if me.job and owner.job == me.job and owner.restart < me.restart:
      return True  # Slurm ends a job before it starts the job again
    return self._has_timed_out(owner, text)

  def _has_timed_out(self, owner: LockOwner, text: str) -> bool:
    """Waits for a heartbeat of the run that holds the lock; returns whether none came.

    Raises:
      ModelDirInUseError: a heartbeat came.
    """
    silence = self._seconds_since_heartbeat()
    if silence < HEARTBEAT_TIMEOUT_S:
      _log.warning(
        f"{self._path} belongs to a run on another machine ({owner}). "
        f"Waiting up to {HEARTBEAT_TIMEOUT_S - silence:.0f} s for its heartbeat"
      )
    while silence < HEARTBEAT_TIMEOUT_S:
      time.sleep(min(POLL_INTERVAL_S, HEARTBEAT_TIMEOUT_S - silence))
      silence += POLL_INTERVAL_S
      new_owner, new_text = self._read()
      if new_text is None or new_owner != owner:
        return False
      if new_text != text:
        raise ModelDirInUseError(str(owner))
    return True

  def _seconds_since_heartbeat(self) -> float:
    """Returns the age of the lock file by the file server's clock, which all machines share."""
    probe = self._temporary_path()
    probe.write_text("")
    try:
      return max(0.0, probe.stat().mtime - self._path.stat().mtime)
    except FileNotFoundError:
      return 0.0
    finally:
      probe.unlink(missing_ok=True)

  def _remove(self, owner: LockOwner | None) -> None:
    """Removes the lock of a run that has ended, unless a competitor has replaced it meanwhile."""
    temporary = self._temporary_path()
    try:
      self._path.rename(temporary)
    except FileNotFoundError:
      return
    if LockOwner.from_json(_read_text(temporary)) != owner:
      self._create(temporary)
      return
    left_by = f"was left by a run that has ended ({owner})" if owner else "is empty or damaged"
    _log.warning("%s %s; this run takes over", self._path, left_by)
    temporary.unlink(missing_ok=True)

  def _send_heartbeats(self) -> None:
    beat = 0
    while not self._released.wait(HEARTBEAT_INTERVAL_S):
      if self.is_in_another_folder():
        continue  # The next save ends the run, unless the folder has been moved back.
      if self.restore_or_find_new_owner():
        return
      beat += 1
      with contextlib.suppress(OSError):
        self._write_temporary(beat).replace(self._path)


def _unwritable_text(model_dir: epath.PathLike, error: OSError) -> str:
  is_no_folder = isinstance(error, FileExistsError)
  reason = "it is a file, or a link to a folder that does not exist" if is_no_folder else error
  return (
    f"MODEL_DIR {os.fspath(model_dir)} cannot be written to ({reason}): set it to a writable folder "
    "with space for checkpoints (--gin.MODEL_DIR=\"'...'\")"
  )


def _in_use_text(model_dir: epath.PathLike, error: ModelDirInUseError) -> str:
  return (
    f"MODEL_DIR {os.fspath(model_dir)} is in use by another training run: {error}. Two runs in one "
    "folder would mix their checkpoints. Wait until that run ends, stop it, or give this "
    f"run its own folder (--gin.MODEL_DIR=\"'...'\"). {LOCK_FILE} in the folder names the other run."
  )


def _read_text(path: epath.Path) -> str:
  """Returns a file's text, which is empty for a pipe, a device or a broken link."""
  with contextlib.suppress(OSError):  # of other file systems, such as gs://
    mode = os.lstat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or os.path.isfile(path)):
      return ""
  return path.read_text()


def _inode(folder: epath.Path) -> int | None:
  """Returns the number that identifies a folder, whatever its name; None for gs:// and if it is absent."""
  try:
    return os.stat(folder).st_ino
  except OSError:
    return None
