"""The manifest of a folder: the size and the XXH3 of each file, which show files that were damaged later.

Checkpoints, prepared data, exports, Hugging Face folders that `convert` writes, and MODEL_DIR's
model.json have one. A folder without a manifest, such as one of another program, is read as it is.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any

import xxhash
from etils import epath

from rosetta_t5.files import expect_content, read_json_object, write_atomically

NAME = "checksums.json"
_BLOCK_BYTES = 1 << 20
_THREADS = 8
_ADVICE = f"If you changed it, remove {NAME} beside it"


class DamagedFileError(ValueError):
  """A file differs from the one that was written, or is missing."""


def write(folder: epath.PathLike, names: Iterable[str] | None = None) -> None:
  """Writes the manifest of a folder that is complete.

  Args:
    folder: the folder.
    names: the files, relative to the folder; None for all files in it and in its folders.
  """
  root = epath.Path(folder)
  found = sorted(files_in(root) if names is None else names)
  with futures.ThreadPoolExecutor(_THREADS) as threads:
    entries = threads.map(lambda name: _describe(root / name), found)
    content = {"files": dict(zip(found, entries, strict=True))}
  write_atomically(root / NAME, json.dumps(content, indent=1))


def verify(
  folder: epath.PathLike,
  select: Callable[[str], bool] | None = None,
  share: tuple[int, int] = (0, 1),
) -> bool:
  """Reads the files of a manifest and compares them with it.

  Args:
    folder: the folder.
    select: returns whether the file with a relative name is verified; None for all files.
    share: (n, count) for every `count`-th file from the n-th on, where several processes share the work.

  Returns:
    Whether the folder has a manifest.

  Raises:
    DamagedFileError: a file, or the manifest, is damaged or missing.
  """
  root, entries = epath.Path(folder), read(folder)
  if entries is None:
    return False
  names = sorted(filter(select, entries))[share[0] :: share[1]]
  with futures.ThreadPoolExecutor(_THREADS) as threads:
    for _ in threads.map(lambda name: _verify_file(root / name, entries[name]), names):
      pass
  return True


def read(folder: epath.PathLike) -> dict[str, Any] | None:
  """Returns {relative name: {"bytes": size, "xxh3_64": hash}}; None if the folder has no manifest.

  Raises:
    DamagedFileError: the manifest is damaged.
  """
  file = epath.Path(folder) / NAME
  if not file.exists():
    return None
  try:
    with expect_content(file, "the files of a folder"):
      return {name: dict(entry) for name, entry in read_json_object(file)["files"].items()}
  except ValueError as error:
    raise DamagedFileError(str(error)) from error


def hash_file(path: epath.PathLike) -> str:
  """Returns the XXH3 of a file, in hexadecimal."""
  digest = xxhash.xxh3_64()
  with epath.Path(path).open("rb") as file:
    while block := file.read(_BLOCK_BYTES):
      digest.update(block)
  return digest.hexdigest()


def files_in(root: epath.PathLike) -> Iterator[str]:
  """Yields the files in a folder and its folders, with relative names and without the manifest."""
  for folder, _, files in os.walk(root):
    for file in files:
      if (name := pathlib.PurePath(folder, file).relative_to(root).as_posix()) != NAME:
        yield name


def _describe(path: epath.Path) -> dict[str, Any]:
  return {"bytes": path.stat().length, "xxh3_64": hash_file(path)}


def _verify_file(path: epath.Path, expected: Any) -> None:
  if not path.is_file():
    raise DamagedFileError(f"{path} is missing. If you removed it, remove {NAME} beside it")
  found = path.stat().length
  if found != expected.get("bytes"):
    raise DamagedFileError(
      f"{path} is damaged: it has {found} bytes instead of {expected.get('bytes')}. {_ADVICE}"
    )
  if hash_file(path) != expected.get("xxh3_64"):
    raise DamagedFileError(f"{path} is damaged: it has changed since it was written. {_ADVICE}")
