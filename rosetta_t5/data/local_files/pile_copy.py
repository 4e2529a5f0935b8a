"""A copy of the Pile on this machine: which files it has, whether they are whole, what is in them."""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rosetta_t5.data.local_files.dataset_folders import (
  VARIABLE,
  data_folders,
  find_local,
  find_tfds,
)
from rosetta_t5.data.reading import BadExample, read_records
from rosetta_t5.data.tasks.known.pretraining import PILE_FILES

_TRAIN_SHARDS = [f"{number:02}.jsonl.zst" for number in range(30)]
INDEX = "index.json"

GONE = f"""The Pile's public copies are gone since 2023: this script downloads nothing.

What there is to do instead:
  1. You have a copy. As it was distributed it has train/00.jsonl.zst to train/29.jsonl.zst,
     val.jsonl.zst and test.jsonl.zst. Put it (or a link) into DIR/the_pile and check it:
       python scripts_gpu/download_the_pile.py --data_dir DIR
     Then train with --tfds_data_dir=DIR, or {VARIABLE}=DIR. A folder that TensorFlow Datasets
     wrote (DIR/ThePile/1.0.0 or DIR/the_pile/1.0.0) is read as it is.
  2. Train on C4: --gin.MIXTURE_OR_TASK_NAME="'c4_v220_span_corruption'", with the files of
     huggingface.co/datasets/allenai/c4 in DIR/c4/en, or what `tfds build c4/en` makes.
  3. Train on text of your own: docs/data.md, "Your own files"."""


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the script; returns 0 if a whole copy was found, else 1."""
  parser = argparse.ArgumentParser("download_the_pile.py", description=GONE,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
  parser.add_argument("--data_dir", help="the folder that holds the_pile/ or ThePile/")
  parser.add_argument(
    "--full", action="store_true", help="read every byte, not only each file's begin"
  )
  arguments, _ = parser.parse_known_args(argv)  # the old script's other flags mean nothing here
  folders = [pathlib.Path(arguments.data_dir)] if arguments.data_dir else data_folders()
  made = find_tfds("the_pile:1.0.0", folders)
  if made is not None:
    print(f"There is a copy made by TensorFlow Datasets in {made}: it is read as it is.")
    return 0
  found = find_local(PILE_FILES, folders)
  if not found:
    print(GONE)
    return 1
  index = make_index(found, arguments.full)
  folder = pathlib.Path(_top(found))
  try:
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
  except OSError as error:
    print(f"The index is not kept: {error}", file=sys.stderr)
  print("\n".join(_told(index, folder)))
  return int(bool(index["problems"]))


def make_index(found: Any, full: bool = False) -> dict[str, Any]:
  """Returns what is in a copy: for each file size, examples, subsets; and what is wrong.

  Args:
    found: split → files.
    full: read all of each file and take its checksum; else the first 1000 records are looked at.
  """
  files = {path: _look(path, full) for paths in found.values() for path in paths}
  problems = [f"{path}: {facts['problem']}" for path, facts in files.items() if facts["problem"]]
  names = {pathlib.Path(path).name for path in found.get("train", ())}
  missing = [name for name in _TRAIN_SHARDS if name not in names]
  if missing and any(name in names for name in _TRAIN_SHARDS):
    problems.append(f"{len(missing)} of the 30 training shards are missing: {', '.join(missing)}")
  problems += [f"there is no file of the split '{s}'" for s in PILE_FILES.splits if s not in found]
  return {"splits": dict(found), "files": files, "problems": problems}


def _look(path: str, full: bool) -> dict[str, Any]:
  subsets: collections.Counter[str] = collections.Counter()
  problem, count, characters = "", 0, 0
  for place, record in _first(read_records(path), None if full else 1000):
    if isinstance(record, BadExample):
      problem = problem or f"line {place}: {record.reason}"
    elif not isinstance(record.get("text"), str):
      problem = problem or f"line {place}: no column 'text'"
    else:
      count, characters = count + 1, characters + len(record["text"])
      meta = record.get("meta")
      subsets[str(meta.get("pile_set_name", "?")) if isinstance(meta, dict) else "?"] += 1
  return {
    "bytes": pathlib.Path(path).stat().st_size,
    "examples_read": count,
    "characters_read": characters,
    "subsets": dict(subsets.most_common()),
    "sha256": _sha256(path) if full else None,
    "problem": problem or ("" if count else "it has no example"),
  }


def _first(records: Iterator[Any], count: int | None) -> Iterator[Any]:
  for number, record in enumerate(records):
    if number == count:
      return
    yield record


def _sha256(path: str) -> str:
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _top(found: Any) -> pathlib.Path:
  """The copy's folder: that of a file beside it, or the one above train/."""
  first = pathlib.Path(next(iter(found.values()))[0]).parent
  return first.parent if first.name in PILE_FILES.splits or first.name == "val" else first


def _told(index: dict[str, Any], folder: pathlib.Path) -> Iterator[str]:
  yield f"A copy of the Pile is in {folder}:"
  for split, paths in index["splits"].items():
    size = sum(index["files"][path]["bytes"] for path in paths)
    yield f"  {split:<12}{len(paths):>3} files {size / 1e9:>9.2f} GB"
  for problem in index["problems"]:
    yield f"  wrong: {problem}"
  if not index["problems"]:
    yield f"Nothing is wrong. Train with --tfds_data_dir={folder.parent}"
