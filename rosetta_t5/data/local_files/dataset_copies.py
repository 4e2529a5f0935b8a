"""The scripts download_the_pile and download_lambada, which check local copies of these datasets."""

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
import json
import pathlib
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rosetta_t5.data.local_files.dataset_folders import (
  VARIABLE,
  data_folders,
  find_distributed_files,
  find_tfds,
)
from rosetta_t5.data.reading import BadExample, read_records
from rosetta_t5.data.tasks.known.pretraining import PILE_FILES

_TRAIN_SHARDS = [f"{number:02}.jsonl.zst" for number in range(30)]
_SAMPLE_SIZE = 1000  # records that are read of each file of the Pile without --full
_LAMBADA_EXAMPLES = 5153

_PILE_TEXT = f"""The Pile's public copies have been gone since 2023, so this script downloads nothing.

Your options:
  1. If you have a copy as it was distributed (train/00.jsonl.zst to train/29.jsonl.zst,
     val.jsonl.zst and test.jsonl.zst), put it or a link into DIR/the_pile and check it:
       python scripts_gpu/download_the_pile.py --data_dir DIR
     Then train with --tfds_data_dir=DIR, or {VARIABLE}=DIR. A folder that TensorFlow Datasets
     wrote (DIR/ThePile/1.0.0 or DIR/the_pile/1.0.0) is read as it is.
  2. Train on C4: --gin.MIXTURE_OR_TASK_NAME="'c4_v220_span_corruption'", with the files of
     huggingface.co/datasets/allenai/c4 in DIR/c4/en, or with the output of `tfds build c4/en`.
  3. Train on your own text: docs/data.md, "Your own files"."""

_LAMBADA_TEXT = f"""OpenAI's cleaned test set of LAMBADA is a file of {_LAMBADA_EXAMPLES} lines {{"text": …}}:
  https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl
  https://huggingface.co/datasets/EleutherAI/lambada_openai
This script downloads nothing. Download the file, then run:
  python scripts_gpu/download_lambada.py --file lambada_test.jsonl --data_dir DIR
and evaluate the task 'lambada' with --tfds_data_dir=DIR, or {VARIABLE}=DIR."""


def check_pile(argv: Sequence[str] | None = None) -> int:
  """Runs download_the_pile: checks a copy and writes its index.json. Returns 0 if it is complete."""
  parser = _parser("download_the_pile.py", _PILE_TEXT)
  parser.add_argument("--data_dir", help="the folder that holds the_pile/ or ThePile/")
  parser.add_argument("--full", action="store_true", help="read every file to its end")
  # Other flags of NVIDIA's script are ignored.
  arguments, _ = parser.parse_known_args(argv)
  folders = [pathlib.Path(arguments.data_dir)] if arguments.data_dir else data_folders()
  for folder in folders:
    if tfds_folder := find_tfds("the_pile:1.0.0", folder):
      print(f"TensorFlow Datasets wrote a copy to {tfds_folder}, which is read as it is.")
      return 0
  for folder in folders:
    if found := find_distributed_files(PILE_FILES, folder):
      return _report_pile(found, folder / PILE_FILES.folder, arguments.full)
  print(_PILE_TEXT)
  return 1


def install_lambada(argv: Sequence[str] | None = None) -> int:
  """Runs download_lambada: checks a file and copies it to its task's folder. Returns 0 on success."""
  parser = _parser("download_lambada.py", _LAMBADA_TEXT)
  parser.add_argument("--file", help="the file that you have")
  parser.add_argument("--data_dir", help="the data folder; the file goes into its folder lambada")
  arguments, _ = parser.parse_known_args(argv)
  if not arguments.file:
    print(_LAMBADA_TEXT)
    return 1
  problem = _lambada_problem(arguments.file)
  if problem:
    print(f"{arguments.file} is not LAMBADA's test set: {problem}")
    return 1
  folder = pathlib.Path(arguments.data_dir or data_folders()[0]).expanduser() / "lambada"
  folder.mkdir(parents=True, exist_ok=True)
  copy = folder / "lambada_test.jsonl"
  if not (copy.exists() and copy.samefile(arguments.file)):
    shutil.copyfile(arguments.file, copy)
  print(f"{copy}: {_LAMBADA_EXAMPLES} passages. Evaluate with --tfds_data_dir={folder.parent}")
  return 0


def _parser(script: str, text: str) -> argparse.ArgumentParser:
  return argparse.ArgumentParser(
    script, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
  )


def _lambada_problem(path: str) -> str:
  """Returns what is wrong with a file, or "" if it is LAMBADA's test set."""
  if not pathlib.Path(path).is_file():
    return "there is no such file"
  facts = _scan(path)
  if not facts["problem"] and facts["examples_read"] != _LAMBADA_EXAMPLES:
    return f"it has {facts['examples_read']} lines, not {_LAMBADA_EXAMPLES}"
  return facts["problem"]


def _report_pile(found: Mapping[str, list[str]], folder: pathlib.Path, full: bool) -> int:
  """Writes the copy's index, prints a summary, and returns 1 if there are problems."""
  limit = None if full else _SAMPLE_SIZE
  files = {path: _scan(path, limit) for paths in found.values() for path in paths}
  if full:
    for path, facts in files.items():
      with open(path, "rb") as file:
        facts["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
  problems = list(_pile_problems(found, files))
  index = {"splits": dict(found), "files": files, "problems": problems}
  try:
    (folder / "index.json").write_text(json.dumps(index, indent=2) + "\n")
  except OSError as error:
    print(f"The index cannot be written: {error}", file=sys.stderr)
  print(f"A copy of the Pile is in {folder}:")
  for split, paths in found.items():
    size = sum(files[path]["bytes"] for path in paths)
    print(f"  {split:<12}{len(paths):>3} files {size / 1e9:>9.2f} GB")
  for problem in problems:
    print(f"  problem: {problem}")
  if not problems:
    print(f"No problems found. Train with --tfds_data_dir={folder.parent}")
  return int(bool(problems))


def _pile_problems(
  found: Mapping[str, list[str]], files: Mapping[str, dict[str, Any]]
) -> Iterator[str]:
  for path, facts in files.items():
    if facts["problem"]:
      yield f"{path}: {facts['problem']}"
  names = {pathlib.Path(path).name for path in found.get("train", ())}
  missing = [name for name in _TRAIN_SHARDS if name not in names]
  if 0 < len(missing) < len(_TRAIN_SHARDS):
    yield f"{len(missing)} of the 30 training shards are missing: {', '.join(missing)}"
  for split in PILE_FILES.splits:
    if split not in found:
      yield f"there is no file of the split '{split}'"


def _scan(path: str, limit: int | None = None) -> dict[str, Any]:
  """Returns the size of a jsonl file, counts of its records, and its first problem.

  Args:
    path: the file.
    limit: the number of records to read; None reads all.

  Returns:
    The keys bytes, examples_read, characters_read, subsets (counts by name) and problem ("" if none).
  """
  subsets: collections.Counter[str] = collections.Counter()
  problem, characters = "", 0
  for line, record in itertools.islice(read_records(path), limit):
    if isinstance(record, BadExample):
      problem = problem or f"line {line}: {record.reason}"
    elif not isinstance(record.get("text"), str):
      problem = problem or f"line {line}: no column 'text'"
    else:
      characters += len(record["text"])
      meta = record.get("meta")
      subsets[str(meta.get("pile_set_name", "?")) if isinstance(meta, dict) else "?"] += 1
  return {
    "bytes": pathlib.Path(path).stat().st_size,
    "examples_read": subsets.total(),
    "characters_read": characters,
    "subsets": dict(subsets.most_common()),
    "problem": problem or ("" if subsets else "it has no example"),
  }
