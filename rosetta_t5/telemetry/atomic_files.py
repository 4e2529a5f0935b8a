"""Files that appear under their names only when they are complete."""

from __future__ import annotations

import os
import pathlib


def unfinished_path(path: pathlib.Path) -> pathlib.Path:
  """Returns the hidden name, one per process, under which a file is written before it is renamed."""
  return path.with_name(f".{path.name}.{os.getpid()}")


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
  """Writes a file, text as UTF-8; a killed process leaves the old file or none, never a part."""
  path = pathlib.Path(path)
  unfinished = unfinished_path(path)
  unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
  unfinished.replace(path)
