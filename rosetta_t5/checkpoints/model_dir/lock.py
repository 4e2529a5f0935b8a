"""The lock of a MODEL_DIR, which allows one training run at a time."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import inspect
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from etils import epath

from rosetta_t5.distributed.coordination import broadcast_text

LOCK_FILE = "run.lock"
_TIMEOUT_S = 600.0


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

  The operating system releases the lock when process 0 ends, however it ends. Folders in the cloud
  and file systems without locks are not locked.

  Raises:
    ModelDirInUseError: another run holds the lock. All processes of this run raise it.
    ValueError: the folder cannot be written to.
  """
  refusal, lock = "", None
  if jax.process_index() == 0 and "://" not in os.fspath(model_dir):
    path = epath.Path(model_dir) / LOCK_FILE
    try:
      path.parent.mkdir(parents=True, exist_ok=True)
      lock = _lock(path)
    except BlockingIOError:
      refusal = f"in_use {_in_use_text(path)}"
    except OSError as error:
      refusal = f"error {_unwritable_text(model_dir, error)}"
  refusal = broadcast_text(refusal, f"run lock {model_dir}", _TIMEOUT_S)
  if refusal:
    kind, _, text = refusal.partition(" ")
    raise (ModelDirInUseError if kind == "in_use" else ValueError)(text)
  try:
    yield
  finally:
    if lock is not None:
      with contextlib.suppress(OSError):  # The folder was moved, or its disk is gone.
        path.unlink()
      os.close(lock)


def _lock(path: epath.Path) -> int:
  """Locks a file, writes into it which process holds the lock, and returns its descriptor.

  Raises:
    BlockingIOError: another process holds the lock.
    OSError: the file cannot be written.
  """
  while True:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
    try:
      _flock(descriptor)
      # The run that held the lock before may have removed the file after it was opened here.
      if path.exists() and os.path.samestat(os.fstat(descriptor), os.stat(path)):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{_this_process()}\n".encode())
        return descriptor
    except OSError:
      os.close(descriptor)
      raise
    os.close(descriptor)


def _flock(descriptor: int) -> None:
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    raise
  except OSError as error:  # as on a Lustre that is mounted without flock
    logging.getLogger(__name__).warning("MODEL_DIR is not locked: %s", error.strerror)


def _this_process() -> str:
  job = os.environ.get("SLURM_JOB_ID", "")
  since = time.strftime("%Y-%m-%d %H:%M:%S %z")
  of_job = f", Slurm job {job}" if job else ""
  return f"process {os.getpid()} on {socket.gethostname()}{of_job}, since {since}"


def _unwritable_text(model_dir: epath.PathLike, error: OSError) -> str:
  return (
    f"MODEL_DIR {os.fspath(model_dir)} cannot be written to ({error}): set it to a writable folder "
    "with space for checkpoints (--gin.MODEL_DIR=\"'...'\")"
  )


def _in_use_text(path: epath.Path) -> str:
  return (
    f"MODEL_DIR {path.parent} is in use by another training run: {path.read_text().strip()}. Two runs "
    "in one folder would mix their checkpoints. Wait until that run ends, stop it, or give this run "
    f"its own folder (--gin.MODEL_DIR=\"'...'\"). {LOCK_FILE} in the folder names the other run."
  )
