"""Finds a known dataset on this machine, as TensorFlow Datasets wrote it or as it was distributed."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Mapping, Sequence

from rosetta_t5.data.tasks.task_spec import LocalFiles, TaskSpec

VARIABLE = "ROSETTA_T5_DATA"


def data_folders(tfds_data_dir: str | None = None) -> list[pathlib.Path]:
  """Returns the folders that are searched for datasets, in this order and without duplicates.

  Args:
    tfds_data_dir: the value of --tfds_data_dir.
  """
  named = [
    tfds_data_dir,
    os.environ.get(VARIABLE),
    os.environ.get("TFDS_DATA_DIR"),
    "~/tensorflow_datasets",
  ]
  return list(dict.fromkeys(pathlib.Path(name).expanduser() for name in named if name))


def find_tfds(dataset: str, folder: pathlib.Path) -> pathlib.Path | None:
  """Returns the folder of a dataset that TensorFlow Datasets wrote, or None.

  If the requested version does not exist, the latest other version is returned. The code that built the
  dataset is not needed. `ThePile` and `the_pile` name the same dataset.

  Args:
    dataset: "name/configuration:version".
    folder: the data folder to search.
  """
  name, _, version = dataset.partition(":")
  first, slash, rest = name.partition("/")
  camel_case = "".join(word.capitalize() for word in first.split("_")) + slash + rest
  built = [
    info.parent
    for spelling in (name, camel_case)
    for info in folder.joinpath(spelling).glob("*/dataset_info.json")
  ]
  return max(built, key=lambda path: (path.name == version, _version_numbers(path)), default=None)


def _version_numbers(path: pathlib.Path) -> list[int]:
  return [int(number) for number in re.findall(r"\d+", path.name)]


def find_distributed_files(files: LocalFiles, folder: pathlib.Path) -> Mapping[str, list[str]]:
  """Returns the dataset's files in a data folder by split, without splits that have no files."""
  found = {
    split: sorted({str(f) for pattern in patterns for f in (folder / files.folder).glob(pattern)})
    for split, patterns in files.splits.items()
  }
  return {split: paths for split, paths in found.items() if paths}


def missing_data_message(name: str, spec: TaskSpec, folders: Sequence[pathlib.Path]) -> str:
  """Returns the error message for a task whose data is in none of the folders."""
  lines = [
    f"The data of the task '{name}' is not on this machine, and data is never downloaded.",
    "Searched:",
  ]
  patterns = ", ".join(of_split[0] for of_split in spec.files.splits.values())
  for folder in folders:
    if spec.tfds:
      lines.append(f"  {folder / spec.tfds.replace(':', '/')}, as TensorFlow Datasets writes it")
    lines.append(f"  {folder / spec.files.folder}/ with {patterns}")
  if spec.source_hint:
    lines.append(f"{spec.source_hint}.")
  lines.append(f"Name another folder with --tfds_data_dir=DIR or the variable {VARIABLE}.")
  return "\n".join(lines)
