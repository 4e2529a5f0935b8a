"""Which files a pattern means, what is in them, and how their bytes are unpacked."""

from __future__ import annotations

import dataclasses
import glob
import gzip
import io
import lzma
import os
import pathlib
from collections.abc import Sequence
from typing import BinaryIO

# By the ending that is left once a compression's ending is taken away.
FORMATS = {
  ".txt": "text",
  ".text": "text",
  ".md": "text",
  ".tokens": "text",
  ".jsonl": "jsonl",
  ".json": "jsonl",
  ".ndjson": "jsonl",
  ".csv": "csv",
  ".tsv": "tsv",
  ".parquet": "parquet",
  ".arrow": "arrow",
}
COMPRESSIONS = (".gz", ".zst", ".zstd", ".xz", ".bz2")
TEXT_UNITS = ("line", "paragraph", "file")


@dataclasses.dataclass(frozen=True)
class Layout:
  """How a file's bytes become records.

  Attributes:
    format: one of FORMATS' values; None goes by each file's name.
    columns: names for the columns of csv and tsv files that have no first line with names.
    text_unit: what one record of a text file is: a line, a paragraph (up to an empty line), a file.
  """

  format: str | None = None
  columns: tuple[str, ...] | None = None
  text_unit: str = "line"

  def __post_init__(self) -> None:
    if self.format is not None and self.format not in FORMATS.values():
      raise ValueError(f"format = {self.format!r} is none of {sorted(set(FORMATS.values()))}")
    if self.text_unit not in TEXT_UNITS:
      raise ValueError(f"text_unit = {self.text_unit!r} is none of {', '.join(TEXT_UNITS)}")


def find_files(patterns: str | Sequence[str]) -> list[str]:
  """Returns the files that patterns match, sorted, each once.

  A folder means the data files under it, so a Hugging Face dataset saved to disk can be named by
  its folder. `**` matches any number of folders.

  Raises:
    ValueError: a pattern matches nothing, or a folder holds no data file.
  """
  found: set[str] = set()
  for pattern in [patterns] if isinstance(patterns, str) else patterns:
    matches = glob.glob(os.path.expanduser(pattern), recursive=True)
    if not matches:
      raise ValueError(f"There is no file {pattern!r} (in {os.getcwd()}): {_nearest(pattern)}")
    for match in matches:
      files = _data_files(match) if os.path.isdir(match) else [match]
      if not files:
        raise ValueError(f"The folder {match} holds no file of a known format: {known_endings()}")
      found.update(files)
  return sorted(found)


def format_of(path: str, layout: Layout | None = None) -> str:
  """Returns a file's format, by `layout` or by its name.

  Raises:
    ValueError: the name's ending is not known.
  """
  if layout is not None and layout.format is not None:
    return layout.format
  found = FORMATS.get(pathlib.Path(_uncompressed_name(path)).suffix)
  if found is None:
    raise ValueError(
      f"What is in {path} cannot be told from its name: the endings known are {known_endings()}. "
      "Set format = 'text', say."
    )
  return found


def known_endings() -> str:
  """Returns the endings of data files, as a sentence's part."""
  return f"{', '.join(FORMATS)}, each also with {', '.join(COMPRESSIONS)}"


def open_bytes(path: str) -> BinaryIO:
  """Opens a file for reading, unpacked while it is read."""
  if path.endswith(".gz"):
    return io.BufferedReader(gzip.open(path, "rb"), 1 << 20)
  if path.endswith(".xz"):
    return io.BufferedReader(lzma.open(path, "rb"), 1 << 20)
  if path.endswith((".zst", ".zstd", ".bz2")):
    import pyarrow

    codec = "bz2" if path.endswith(".bz2") else "zstd"
    stream = pyarrow.CompressedInputStream(pyarrow.OSFile(path, "rb"), codec)
    return io.BufferedReader(stream, 1 << 20)
  return open(path, "rb", 1 << 20)


def _uncompressed_name(path: str) -> str:
  for ending in COMPRESSIONS:
    if path.endswith(ending):
      return path.removesuffix(ending)
  return path


def _data_files(folder: str) -> list[str]:
  """Files of a known format under a folder, without the notes that Hugging Face keeps beside them."""
  files = (str(path) for path in pathlib.Path(folder).rglob("*") if path.is_file())
  notes = ("dataset_info.json", "state.json", "dataset_dict.json", "manifest.json")
  known = (f for f in files if pathlib.Path(_uncompressed_name(f)).suffix in FORMATS)
  return sorted(f for f in known if pathlib.Path(f).name not in notes)


def _nearest(pattern: str) -> str:
  """Says how far down the path exists."""
  folder = pathlib.Path(pattern).parent
  while not folder.exists() and folder != folder.parent:
    folder = folder.parent
  inside = sorted(path.name for path in folder.iterdir())[:5] if folder.is_dir() else []
  return (
    f"{folder} holds {', '.join(inside)}{', …' if len(inside) == 5 else ''}"
    if inside
    else (f"{folder} is empty")
  )
