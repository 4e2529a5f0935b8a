"""The scripts download_the_pile and download_lambada, which check local copies of these datasets."""

from __future__ import annotations

import argparse
import itertools
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from rosetta_t5.data.local_copies import DATA_VARIABLE, data_folders, find_tfds
from rosetta_t5.data.reading import BadExample, read_records
from rosetta_t5.data.tasks.known_tasks import PILE_FILES

_TRAIN_SHARDS = [f"{number:02}.jsonl.zst" for number in range(30)]
_SAMPLE_SIZE = 1000  # records that are read of each file of the Pile without --full
_LAMBADA_EXAMPLES = 5153
_AS_WRITTEN: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter}

_PILE_TEXT = f"""The Pile's public copies have been gone since 2023, so this script downloads nothing.

Your options:
  1. If you have a copy as it was distributed (train/00.jsonl.zst to train/29.jsonl.zst,
     val.jsonl.zst and test.jsonl.zst), put it or a link into DIR/the_pile and check it:
       python scripts_gpu/download_the_pile.py --data_dir DIR
     Then train with --tfds_data_dir=DIR, or {DATA_VARIABLE}=DIR. A folder that TensorFlow Datasets
     wrote (DIR/ThePile/1.0.0 or DIR/the_pile/1.0.0) is read as it is.
  2. Train on C4: --gin.MIXTURE_OR_TASK_NAME="'c4_v220_span_corruption'", with the files of
     huggingface.co/datasets/allenai/c4 in DIR/c4/en, or with the output of `tfds build c4/en`.
  3. Train on your own text: docs/data.md, "Your own files"."""

_LAMBADA_TEXT = f"""OpenAI's cleaned test set of LAMBADA is a file of {_LAMBADA_EXAMPLES} lines {{"text": …}}:
  https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl
  https://huggingface.co/datasets/EleutherAI/lambada_openai
This script downloads nothing. Download the file, then run:
  python scripts_gpu/download_lambada.py --file lambada_test.jsonl --data_dir DIR
and evaluate the task 'lambada' with --tfds_data_dir=DIR, or {DATA_VARIABLE}=DIR."""


def check_pile(argv: Sequence[str] | None = None) -> int:
  """Runs download_the_pile: checks a copy. Returns 0 if it is complete."""
  parser = argparse.ArgumentParser("download_the_pile.py", description=_PILE_TEXT, **_AS_WRITTEN)
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
    if found := PILE_FILES.find(folder):
      return _report_pile(found, folder, None if arguments.full else _SAMPLE_SIZE)
  print(_PILE_TEXT)
  return 1


def install_lambada(argv: Sequence[str] | None = None) -> int:
  """Runs download_lambada: checks a file and copies it to its task's folder. Returns 0 on success."""
  parser = argparse.ArgumentParser("download_lambada.py", description=_LAMBADA_TEXT, **_AS_WRITTEN)
  parser.add_argument("--file", help="the file that you have")
  parser.add_argument("--data_dir", help="the data folder; the file goes into its folder lambada")
  arguments, _ = parser.parse_known_args(argv)
  if not arguments.file:
    print(_LAMBADA_TEXT)
    return 1
  number, problem = _scan(arguments.file)
  if not problem and number != _LAMBADA_EXAMPLES:
    problem = f"it has {number} lines, not {_LAMBADA_EXAMPLES}"
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


def _report_pile(found: Mapping[str, list[str]], folder: pathlib.Path, limit: int | None) -> int:
  """Prints a summary of a copy, and returns 1 if there are problems.

  Args:
    found: the files of each split.
    folder: the data folder.
    limit: the number of records of each file to read; None reads all.
  """
  problems = [f"there is no file of the split '{s}'" for s in PILE_FILES.splits if s not in found]
  names = {pathlib.Path(path).name for path in found.get("train", ())}
  missing = [name for name in _TRAIN_SHARDS if name not in names]
  if 0 < len(missing) < len(_TRAIN_SHARDS):
    problems.append(f"{len(missing)} of the 30 training shards are missing: {', '.join(missing)}")
  print(f"A copy of the Pile is in {folder / PILE_FILES.folder}:")
  for split, paths in found.items():
    size = sum(pathlib.Path(path).stat().st_size for path in paths)
    print(f"  {split:<12}{len(paths):>3} files {size / 1e9:>9.2f} GB")
    problems += [f"{path}: {text}" for path in paths if (text := _scan(path, limit)[1])]
  for problem in problems:
    print(f"  problem: {problem}")
  if not problems:
    print(f"No problems found. Train with --tfds_data_dir={folder}")
  return int(bool(problems))


def _scan(path: str, limit: int | None = None) -> tuple[int, str]:
  """Returns the number of records of a jsonl file, up to `limit`, and its first problem, or ""."""
  number = 0
  for line, record in itertools.islice(read_records(path), limit):
    if isinstance(record, BadExample):
      return number, f"line {line}: {record.reason}"
    if not isinstance(record.get("text"), str):
      return number, f"line {line}: no column 'text'"
    number += 1
  return number, "" if number else "it has no example"
