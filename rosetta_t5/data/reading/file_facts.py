"""Describes which files are read, as plain values: their names, sizes and samples of their contents.

Files of at most 64 MiB together are read completely. Of more data, eight blocks of each file are read,
so that thousands of files take less than a second.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Facts = dict[str, Any]
# Descriptions of the changes that make a position invalid, and of those that do not.
Differences = tuple[list[str], list[str]]

_MAX_BYTES = 64 << 20  # read from all files together, unless there are very many
_MIN_BYTES = 64 << 10  # read from each file, if it is as large
_BLOCKS = 8
_THREADS = 16
_SHOWN = 3


def file_facts(paths: Sequence[str], is_movable: bool) -> Facts:
  """Returns the facts of files, in the order in which they are read.

  Args:
    paths: the files. Of files in the cloud, only the names are known.
    is_movable: whether a position in them remains valid if their folder is moved.
  """
  paths = [path if "://" in path else os.path.abspath(path) for path in paths]
  sizes = [os.path.getsize(path) if os.path.isfile(path) else 0 for path in paths]
  share = max(_MIN_BYTES, _MAX_BYTES // max(1, len(paths)))
  limit = _MAX_BYTES if sum(sizes) <= _MAX_BYTES else 1 << (share.bit_length() - 1)
  with ThreadPoolExecutor(_THREADS) as threads:
    digests = list(threads.map(functools.partial(_digest, limit=limit), paths, sizes))
  return listing(paths, sizes, digests, is_movable) | {"bytes_read": limit}


def listing(
  paths: Sequence[str], sizes: Sequence[int], digests: Sequence[str], is_movable: bool
) -> Facts:
  """Returns facts that `compare_files` compares; see `file_facts`."""
  is_local = not any("://" in path for path in paths)
  folder = os.path.commonpath(map(os.path.dirname, paths)) if is_local else ""
  names = [path.removeprefix(folder).lstrip("/") for path in paths]
  files = [list(file) for file in zip(names, sizes, digests, strict=True)]
  return {"folder": folder, "files": files, "is_movable": is_movable}


def compare_files(stored: Facts, current: Facts) -> Differences:
  """Compares two results of `file_facts` or `listing`."""
  if [file[1:] for file in stored["files"]] == [file[1:] for file in current["files"]]:
    return _compare_paths(stored, current)
  old, new = ({name: contents for name, *contents in facts["files"]} for facts in (stored, current))
  # Digests of samples of different sizes cannot be compared; the sizes of the files can.
  compared = 2 if stored.get("bytes_read") == current.get("bytes_read") else 1
  common = sorted(old.keys() & new.keys())
  changed = [name for name in common if old[name][:compared] != new[name][:compared]]
  kinds = {
    "changed": [f"{name} ({_size_change(old[name][0], new[name][0])})" for name in changed],
    "removed": sorted(old.keys() - new.keys()),
    "added": sorted(new.keys() - old.keys()),
  }
  texts = [f"{kind}: {_first(names)}" for kind, names in kinds.items() if names]
  return [f"in {current['folder']}, {'; '.join(texts or ['files are read in another order'])}"], []


def _compare_paths(stored: Facts, current: Facts) -> Differences:
  """Compares the names and folders of files whose contents are the same."""
  old_folder, new_folder = stored["folder"], current["folder"]
  if old_folder == new_folder and stored["files"] == current["files"]:
    return [], []
  moved = "renamed in" if old_folder == new_folder else f"moved from {old_folder} to"
  moved = f"{moved} {new_folder}"
  if current["is_movable"]:
    return [], [moved]
  return [f"{moved} (the position contains paths: make the old path a link to the new one)"], []


def digest_of(parts: Iterable[bytes]) -> str:
  """Returns a short digest of bytes."""
  digest = hashlib.blake2b(digest_size=8)
  for part in parts:
    digest.update(part)
  return digest.hexdigest()


def _digest(path: str, size: int, limit: int) -> str:
  """Returns a digest of a file or, if it is larger than `limit` bytes, of blocks of that size."""
  if not os.path.isfile(path):
    return ""
  with open(path, "rb", buffering=0) as file:
    if size <= limit:
      return digest_of(iter(lambda: file.read(1 << 20), b""))
    block = limit // _BLOCKS
    starts = ((size - block) * number // (_BLOCKS - 1) for number in range(_BLOCKS))
    return digest_of(os.pread(file.fileno(), block, start) for start in starts)


def _size_change(old: int, new: int) -> str:
  return f"size {old:,} → {new:,}" if old != new else f"other contents of the same size, {new:,}"


def _first(names: Sequence[str]) -> str:
  more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
  return ", ".join(names[:_SHOWN]) + more
