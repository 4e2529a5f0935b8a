"""Finds a known dataset on this machine: TensorFlow Datasets' folder, or files as distributed."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterator, Mapping

from rosetta_t5.data.tasks.task_recipe import LocalFiles

VARIABLE = "ROSETTA_T5_DATA"


def data_folders(tfds_data_dir: str | None = None) -> list[pathlib.Path]:
  """Returns where datasets are looked for, first to last, each once.

  Args:
    tfds_data_dir: the command line's --tfds_data_dir.
  """
  named = [
    tfds_data_dir,
    os.environ.get(VARIABLE),
    os.environ.get("TFDS_DATA_DIR"),
    "~/tensorflow_datasets",
  ]
  return list(dict.fromkeys(pathlib.Path(name).expanduser() for name in named if name))


def find_tfds(dataset: str, folders: list[pathlib.Path]) -> pathlib.Path | None:
  """Returns the folder with `dataset`'s files, of its version or, if there is only another, of that.

  A folder is taken as it is, with or without the code that made it. ThePile and the_pile are one.

  Args:
    dataset: name/configuration:version.
    folders: where to look.
  """
  name, _, version = dataset.partition(":")
  for folder in folders:
    for spelling in _spellings(name):
      made = sorted(folder.joinpath(spelling).glob("*/dataset_info.json"), key=_version)
      exact = [info for info in made if info.parent.name == version]
      if made:
        return (exact or made)[-1].parent
  return None


def find_local(files: LocalFiles, folders: list[pathlib.Path]) -> Mapping[str, list[str]]:
  """Returns the files of each split that there are, from the first folder that has any."""
  for folder in folders:
    found = {
      split: sorted({str(f) for pattern in patterns for f in (folder / files.folder).glob(pattern)})
      for split, patterns in files.splits.items()
    }
    if any(found.values()):
      return {split: paths for split, paths in found.items() if paths}
  return {}


def missing_text(
  task: str, dataset: str, files: LocalFiles | None, where: str, folders: list[pathlib.Path]
) -> str:
  """Returns the error for a dataset that is nowhere."""
  lines = [f"The data of the task '{task}' is not on this machine, and is not fetched. Looked for:"]
  for folder in folders:
    if dataset:
      lines.append(f"  {folder / dataset.replace(':', '/')}, as TensorFlow Datasets writes it")
    if files is not None:
      patterns = [pattern for of_split in files.splits.values() for pattern in of_split[:1]]
      lines.append(f"  {folder / files.folder}/ with {', '.join(patterns)}")
  lines += [f"  {where}."] if where else []
  lines.append(f"Name another folder with --tfds_data_dir=DIR or the variable {VARIABLE}.")
  return "\n".join(lines)


def _spellings(name: str) -> Iterator[str]:
  yield name
  first, slash, rest = name.partition("/")
  yield "".join(word.capitalize() for word in first.split("_")) + slash + rest


def _version(info: pathlib.Path) -> list[int]:
  return [int(number) for number in re.findall(r"\d+", info.parent.name)]
