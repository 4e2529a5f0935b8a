"""LAMBADA's test set (Paperno et al. 2016) as a local file, put where its task finds it."""

from __future__ import annotations

import argparse
import pathlib
import shutil
from collections.abc import Sequence

from rosetta_t5.data.local_files.dataset_folders import VARIABLE, data_folders
from rosetta_t5.data.reading import BadExample, read_records

EXAMPLES = 5153
_HOW = f"""LAMBADA's test set as OpenAI cleaned it is one file of {EXAMPLES} lines, {{"text": …}}:
  https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl
  https://huggingface.co/datasets/EleutherAI/lambada_openai
This script downloads nothing. Fetch the file, then:
  python scripts_gpu/download_lambada.py --file lambada_test.jsonl --data_dir DIR
and evaluate the task 'lambada' with --tfds_data_dir=DIR, or {VARIABLE}=DIR."""


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the script; returns 0 if the file is in its place and good."""
  parser = argparse.ArgumentParser("download_lambada.py", description=_HOW,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
  parser.add_argument("--file", help="the file that you have")
  parser.add_argument("--data_dir", help="the data folder; the file goes into its folder lambada")
  arguments, _ = parser.parse_known_args(argv)
  if not arguments.file:
    print(_HOW)
    return 1
  problem = _problem(arguments.file)
  if problem:
    print(f"{arguments.file} is not LAMBADA's test set: {problem}")
    return 1
  folder = pathlib.Path(arguments.data_dir or data_folders()[0]).expanduser() / "lambada"
  folder.mkdir(parents=True, exist_ok=True)
  place = folder / "lambada_test.jsonl"
  if not (place.exists() and place.samefile(arguments.file)):
    shutil.copyfile(arguments.file, place)
  print(f"{place}: {EXAMPLES} passages. Evaluate with --tfds_data_dir={folder.parent}")
  return 0


def _problem(path: str) -> str:
  if not pathlib.Path(path).is_file():
    return "there is no such file"
  count = 0
  for place, record in read_records(path):
    if isinstance(record, BadExample) or "text" not in record:
      return f"line {place}: {record.reason if isinstance(record, BadExample) else 'no text'}"
    count += 1
  return "" if count == EXAMPLES else f"it has {count} lines, not {EXAMPLES}"
