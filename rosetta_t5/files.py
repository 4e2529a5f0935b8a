"""Files and folders that appear only when complete, locks on them, and JSON files that may be damaged."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from etils import epath


def unfinished_path(path: epath.PathLike) -> epath.Path:
  """Returns the hidden name, one per process, under which a file is written before it is renamed."""
  path = epath.Path(path)
  return path.with_name(f".{path.name}.{os.getpid()}")


def write_atomically(path: epath.PathLike, content: str | bytes) -> None:
  """Writes a file, text as UTF-8; a killed process leaves the old file or none, never a part."""
  data = content.encode() if isinstance(content, str) else content
  if os.path.exists(path) and not os.path.isfile(path):  # such as /dev/stdout
    pathlib.Path(path).write_bytes(data)
    return
  unfinished = unfinished_path(path)
  try:
    unfinished.write_bytes(data)
    unfinished.replace(path)
  except OSError:
    unfinished.unlink(missing_ok=True)  # It would keep a full disk full.
    raise


@contextlib.contextmanager
def exclusive_output(path: str | os.PathLike[str]) -> Iterator[None]:
  """Locks a file or folder inside the `with`, so that no other command writes to it.

  Raises:
    ValueError: another process is writing to it.
  """
  descriptor = os.open(path, os.O_RDONLY)
  try:
    with contextlib.suppress(OSError):  # The file system may have no locks.
      try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError as error:
        raise ValueError(
          f"another process is writing to {os.fspath(path)}: wait until it ends, or choose another "
          "output"
        ) from error
    yield
  finally:
    os.close(descriptor)


@contextlib.contextmanager
def complete_folder(path: epath.PathLike) -> Iterator[epath.Path]:
  """Yields a path at which the body creates a folder, which is then renamed to `path`.

  An existing `path` is replaced. After an error the unfinished folder is removed. A killed process, also
  one that Ctrl-C has ended, leaves `path.unfinished`, which the next call removes.
  """
  final = epath.Path(path)
  unfinished = final.parent / f"{final.name}.unfinished"
  unfinished.rmtree(missing_ok=True)
  try:
    yield unfinished
  except BaseException as error:
    unfinished.rmtree(missing_ok=True)
    if isinstance(error, OSError) and error.filename is None:  # such as a full disk
      error.filename = os.fspath(final)
    raise
  final.rmtree(missing_ok=True)
  unfinished.rename(final)


def read_json_object(path: epath.PathLike) -> dict[str, Any]:
  """Returns the object that a JSON file contains.

  Raises:
    ValueError: the file contains something else.
    OSError: the file cannot be read.
  """
  try:
    value = json.loads(epath.Path(path).read_bytes())
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path} is not valid JSON: {error}") from error
  if not isinstance(value, dict):
    raise ValueError(f"{path} must contain a JSON object, got a {type(value).__name__}")
  return value


@contextlib.contextmanager
def expect_content(path: epath.PathLike, what: str) -> Iterator[None]:
  """Turns the errors of a body that reads unexpected parsed values into a ValueError with the path.

  Args:
    what: what the file must describe.
  """
  try:
    yield
  except (AttributeError, LookupError, TypeError) as error:
    reason = f"{type(error).__name__}: {error}"
    raise ValueError(f"{path} is damaged: it must describe {what} ({reason})") from error
