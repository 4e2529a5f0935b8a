"""The scripts download_the_pile and download_lambada, which find or place local copies of these datasets."""

from __future__ import annotations

import argparse
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

from rosetta_t5.data.local_copies import DATA_VARIABLE, data_folders, find_tfds
from rosetta_t5.data.tasks.known_tasks import PILE_FILES

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
  """Runs download_the_pile: describes a copy. Returns 0 if it has files of every split."""
  parser = argparse.ArgumentParser("download_the_pile.py", description=_PILE_TEXT, **_AS_WRITTEN)
  parser.add_argument("--data_dir", help="the folder that holds the_pile/ or ThePile/")
  # Other flags of NVIDIA's script are ignored.
  arguments, _ = parser.parse_known_args(argv)
  for folder in [pathlib.Path(arguments.data_dir)] if arguments.data_dir else data_folders():
    if tfds_folder := find_tfds("the_pile:1.0.0", folder):
      print(f"TensorFlow Datasets wrote a copy to {tfds_folder}, which is read as it is.")
      return 0
    if found := PILE_FILES.find(folder):
      print(
        f"A copy of the Pile is in {folder / PILE_FILES.folder}; the whole has 30, 1 and 1 files:"
      )
      for split in PILE_FILES.splits:
        sizes = [pathlib.Path(path).stat().st_size for path in found.get(split, ())]
        print(f"  {split:<12}{len(sizes):>3} files {sum(sizes) / 1e9:>9.2f} GB")
      print(f"Train with --tfds_data_dir={folder}")
      return int(len(found) < len(PILE_FILES.splits))
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
  number = len(pathlib.Path(arguments.file).read_text(encoding="utf-8").splitlines())
  if number != _LAMBADA_EXAMPLES:
    print(
      f"{arguments.file} is not LAMBADA's test set: it has {number} lines, not {_LAMBADA_EXAMPLES}"
    )
    return 1
  folder = pathlib.Path(arguments.data_dir or data_folders()[0]).expanduser() / "lambada"
  folder.mkdir(parents=True, exist_ok=True)
  copy = folder / "lambada_test.jsonl"
  if not (copy.exists() and copy.samefile(arguments.file)):
    shutil.copyfile(arguments.file, copy)
  print(f"{copy}: {number} passages. Evaluate with --tfds_data_dir={folder.parent}")
  return 0
