"""Files and folders that appear only when complete, locks on them, JSON that may be damaged, and checksums.

A folder's checksums.json has the size and the XXH3 of each file, which show files that were damaged later.
Checkpoints, prepared data, exports, Hugging Face folders that `convert` writes, and MODEL_DIR's
model.json have one. A folder without it, such as one of another program, is read as it is.
"""

import contextlib
import fcntl
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import IO, Any

import xxhash
from etils import epath

CHECKSUMS_NAME = "checksums.json"
_BLOCK_BYTES = 1 << 20
_THREADS = 8


class DamagedFileError(ValueError):
  """A file differs from the one that was written, or is missing."""


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


def lock_until_closed(file: int | IO[str]) -> bool:
  """Locks an open file; returns False if another process has locked it.

  A file system without locks, such as a Lustre that is mounted without flock, locks nothing.
  """
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError as error:
    return not isinstance(error, BlockingIOError)
  return True


@contextlib.contextmanager
def exclusive_output(path: str | os.PathLike[str]) -> Iterator[None]:
  """Locks a file or folder inside the `with`, so that no other command writes to it.

  Raises:
    ValueError: another process is writing to it.
  """
  descriptor = os.open(path, os.O_RDONLY)
  try:
    if not lock_until_closed(descriptor):
      raise ValueError(
        f"another process is writing to {os.fspath(path)}: wait until it ends, or choose another output"
      )
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


def read_json_object(
  path: epath.PathLike, convert: Callable[[dict[str, Any]], Any] | None = None
) -> dict[str, Any]:
  """Returns the object that a JSON file contains; `convert` replaces each object in it.

  Raises:
    ValueError: the file contains something else.
    OSError: the file cannot be read.
  """
  try:
    value = json.loads(epath.Path(path).read_bytes(), object_hook=convert)
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


def write_checksums(folder: epath.PathLike, names: Iterable[str] | None = None) -> None:
  """Writes checksums.json into a folder that is complete.

  Args:
    folder: the folder.
    names: the files, relative to the folder; None for all files in it and in its folders.
  """
  root = epath.Path(folder)
  found = sorted(files_in(root) if names is None else names)
  with futures.ThreadPoolExecutor(_THREADS) as threads:
    entries = threads.map(lambda name: _describe(root / name), found)
    content = {"files": dict(zip(found, entries, strict=True))}
  write_atomically(root / CHECKSUMS_NAME, json.dumps(content, indent=1))


def verify_checksums(
  folder: epath.PathLike,
  select: Callable[[str], bool] | None = None,
  share: tuple[int, int] = (0, 1),
) -> bool:
  """Reads the files that checksums.json lists and compares them with it.

  Args:
    folder: the folder.
    select: returns whether the file with a relative name is verified; None for all files.
    share: (n, count) for every `count`-th file from the n-th on, where several processes share the work.

  Returns:
    Whether the folder has a checksums.json.

  Raises:
    DamagedFileError: a file is damaged or missing, or checksums.json is damaged.
  """
  root = epath.Path(folder)
  file = root / CHECKSUMS_NAME
  if not file.exists():
    return False
  try:
    with expect_content(file, "the files of a folder"):
      entries = {name: dict(entry) for name, entry in read_json_object(file)["files"].items()}
  except ValueError as error:
    raise DamagedFileError(str(error)) from error

  def check(name: str) -> None:
    if not (root / name).is_file():
      raise DamagedFileError(f"{root / name} is missing. If you removed it, remove {file}")
    if _describe(root / name) != entries[name]:
      raise DamagedFileError(
        f"{root / name} is damaged: it has changed since it was written. If you changed it, remove {file}"
      )

  with futures.ThreadPoolExecutor(_THREADS) as threads:
    list(threads.map(check, sorted(filter(select, entries))[share[0] :: share[1]]))
  return True


def hash_file(path: epath.PathLike) -> str:
  """Returns the XXH3 of a file, in hexadecimal."""
  digest = xxhash.xxh3_64()
  with epath.Path(path).open("rb") as file:
    while block := file.read(_BLOCK_BYTES):
      digest.update(block)
  return digest.hexdigest()


def files_in(root: epath.PathLike) -> Iterator[str]:
  """Yields the files in a folder and its folders, with relative names and without checksums.json."""
  for folder, _, files in os.walk(root):
    for file in files:
      if (name := pathlib.PurePath(folder, file).relative_to(root).as_posix()) != CHECKSUMS_NAME:
        yield name


def _describe(path: epath.Path) -> dict[str, Any]:
  return {"bytes": path.stat().length, "xxh3_64": hash_file(path)}
