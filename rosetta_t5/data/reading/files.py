"""Finds the files that match patterns, infers their formats, decompresses them, and compares them with others."""

import dataclasses
import glob
import gzip
import hashlib
import io
import lzma
import os
import pathlib
from collections.abc import Sequence
from typing import Any, BinaryIO

from rosetta_t5.argument_types import check_one_of, near_hint

# The suffixes of each format. The suffix of a compression may follow.
FORMATS = {
  "text": (".txt", ".text", ".md", ".tokens"),
  "jsonl": (".jsonl", ".json", ".ndjson"),
  "csv": (".csv",),
  "tsv": (".tsv",),
  "parquet": (".parquet",),
  "arrow": (".arrow",),
}
COMPRESSIONS = (".gz", ".zst", ".zstd", ".xz", ".bz2")
TEXT_UNITS = ("line", "paragraph", "file")
_FORMAT_OF_SUFFIX = {suffix: name for name, suffixes in FORMATS.items() for suffix in suffixes}
_KNOWN_SUFFIXES = f"{', '.join(_FORMAT_OF_SUFFIX)}, each also with {', '.join(COMPRESSIONS)}"
# Files with metadata that Hugging Face's library stores beside the data.
_METADATA = ("dataset_info.json", "state.json", "dataset_dict.json", "manifest.json")
_HEAD = 64 << 10  # bytes of a file that are compared, besides its size


@dataclasses.dataclass(frozen=True)
class ReadOptions:
  """How a file's bytes become records.

  Attributes:
    format: a key of FORMATS; None infers it from each file's name.
    columns: column names of csv and tsv files without a header.
    text_unit: what one record of a text file is: a line, a paragraph that ends at an empty line, or
      the whole file.
    quoted: whether fields of csv and tsv files may be in quotes; None means that they may in csv files,
      and finds it out for each tsv file.
  """

  format: str | None = None
  columns: tuple[str, ...] | None = None
  text_unit: str = "line"
  quoted: bool | None = None

  def __post_init__(self) -> None:
    if self.format is not None:
      check_one_of("format", self.format, FORMATS)
    check_one_of("text_unit", self.text_unit, TEXT_UNITS)

  def format_of(self, path: str) -> str:
    """Returns the format that is set here, or else the one that the file's name shows.

    Raises:
      ValueError: neither shows a known format.
    """
    name = self.format or _FORMAT_OF_SUFFIX.get(_data_suffix(pathlib.Path(path)))
    if name is None:
      raise ValueError(
        f"The format of {path} cannot be inferred from its name. Known suffixes: {_KNOWN_SUFFIXES}. "
        "Convert the file to one of these formats, or set data.file_task.format."
      )
    return name


DEFAULT_OPTIONS = ReadOptions()


def find_files(patterns: str | Sequence[str]) -> list[str]:
  """Returns the files that match the patterns, sorted and without duplicates.

  A folder stands for all data files under it, such as those of a dataset that Hugging Face's library
  has saved. `**` matches any number of folders.

  Raises:
    ValueError: a pattern matches nothing, or a folder contains no data file.
  """
  if not patterns:
    raise ValueError("files must be at least one pattern, such as 'corpus/*.txt', got none")
  found: set[str] = set()
  for pattern in [patterns] if isinstance(patterns, str) else patterns:
    path = os.path.expanduser(pattern)
    # A name such as "part[1].txt" may be a pattern or a file.
    matches = glob.glob(path, recursive=True) or glob.glob(glob.escape(path))
    if not matches:
      folder, name = os.path.split(os.path.abspath(path))
      hint = near_hint(name, os.listdir(folder)) if os.path.isdir(folder) else ""
      raise ValueError(f"There is no file {pattern!r}{hint} (in {os.getcwd()})")
    for match in matches:
      files = _data_files(match) if os.path.isdir(match) else [match]
      if not files:
        raise ValueError(f"{match} contains no file of a known format: {_KNOWN_SUFFIXES}")
      found.update(files)
  return sorted(found)


def open_bytes(path: str) -> BinaryIO:
  """Opens a file for reading; its content is decompressed while it is read."""
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


def describe_files(paths: Sequence[str], is_movable: bool) -> dict[str, Any]:
  """Returns the names, the sizes and digests of the heads of files, in the order in which they are read.

  Args:
    paths: the files. Of files in the cloud, only the names are known.
    is_movable: whether a position in them remains valid if their folder is moved.
  """

  sizes, heads = [0] * len(paths), [""] * len(paths)
  for number, path in enumerate(paths):
    if os.path.isfile(path):
      sizes[number] = os.path.getsize(path)
      with open(path, "rb") as file:
        heads[number] = digest_of(file.read(_HEAD))
  return list_files(paths, sizes, heads, is_movable)


def list_files(
  paths: Sequence[str], sizes: Sequence[int], digests: Sequence[str], is_movable: bool
) -> dict[str, Any]:
  """Returns JSON values about files that `compare_files` compares; see `describe_files`."""
  is_local = not any("://" in path for path in paths)
  paths = [os.path.abspath(path) for path in paths] if is_local else paths
  folder = os.path.commonpath(map(os.path.dirname, paths)) if is_local else ""
  names = [path.removeprefix(folder).lstrip("/") for path in paths]
  files = [list(file) for file in zip(names, sizes, digests, strict=True)]
  return {"folder": folder, "files": files, "is_movable": is_movable}


def compare_files(stored: dict[str, Any], current: dict[str, Any]) -> list[str]:
  """Returns the differences of two results of `list_files` that make a position invalid."""
  before, after, folder = stored["files"], current["files"], current["folder"]
  if before != after:
    return [f"in {folder}, {_describe_changes(before, after)}"]
  if current["is_movable"] or stored["folder"] == folder:
    return []
  hint = "the position contains paths: make the old path a link to the new one"
  return [f"moved from {stored['folder']} to {folder} ({hint})"]


def _describe_changes(before: list[list[Any]], after: list[list[Any]]) -> str:
  old, new = ({name: rest for name, *rest in files} for files in (before, after))
  changed = [name for name in sorted(old.keys() & new.keys()) if old[name] != new[name]]
  sizes = {name: f"size {old[name][0]:,} → {new[name][0]:,}" for name in changed}
  same = {name: "other contents" for name in changed if old[name][0] == new[name][0]}
  kinds = {
    "changed": [f"{name} ({text})" for name, text in (sizes | same).items()],
    "removed": sorted(old.keys() - new.keys()),
    "added": sorted(new.keys() - old.keys()),
  }
  texts = [f"{kind}: {', '.join(names[:3])}" for kind, names in kinds.items() if names]
  return "; ".join(texts or ["files are read in another order"])


def digest_of(data: bytes) -> str:
  """Returns a short digest of bytes."""
  return hashlib.blake2b(data, digest_size=8).hexdigest()


def _data_suffix(path: pathlib.Path) -> str:
  return (path.with_suffix("") if path.suffix in COMPRESSIONS else path).suffix


def _data_files(folder: str) -> list[str]:
  """Returns the data files under a folder, also under linked folders."""
  paths = map(pathlib.Path, glob.glob(f"{glob.escape(folder)}/**", recursive=True))
  return [
    str(path)
    for path in paths
    if _data_suffix(path) in _FORMAT_OF_SUFFIX and path.name not in _METADATA and not path.is_dir()
  ]
