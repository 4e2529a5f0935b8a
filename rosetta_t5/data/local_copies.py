"""Finds local copies of vocabularies and datasets that recipes name by public paths; nothing is downloaded.

The environment variable ROSETTA_T5_ASSETS lists where the copies of vocabularies are, separated by commas. An
entry is a folder that holds the copies (t5-data/vocabs/…, with or without the bucket's name, or only the last
folder and file of a path), or a mapping `gs://path=/local/path` of one file or folder. ROSETTA_T5_DATA names
the folder of datasets.
"""

import os
import pathlib
import re

T5_VOCABULARY = "gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model"
ASSETS_VARIABLE = "ROSETTA_T5_ASSETS"
DATA_VARIABLE = "ROSETTA_T5_DATA"
_EXTRA_IDS = re.compile(r"\.(\d+)extra$")  # at the end of a folder's name


def local_path(path: str) -> str:
  """Returns the local copy of a gs:// path, or of a file that does not exist; other paths unchanged.

  Raises:
    ValueError: the file does not exist. The message lists the paths searched and what to set.
  """
  is_remote = path.startswith("gs://")
  if not is_remote and ("://" in path or os.path.isfile(path)):
    return path
  candidates = _candidates(path, os.environ.get(ASSETS_VARIABLE, ""))
  for candidate in candidates:
    if candidate.exists():
      return str(candidate)
  if not is_remote:
    raise ValueError(
      f"There is no vocabulary file {path}: give the path of an existing one, or train one: "
      "rosetta-t5 vocab train --input 'TEXT*.txt' --size 32000 --out vocabulary.model"
    )
  searched = f" Looked for {', '.join(map(str, candidates))}." if candidates else ""
  raise ValueError(
    f"{path} is not on this machine, and files are never downloaded.{searched} Copy it here and set "
    f"the environment variable {ASSETS_VARIABLE}='{path}=/path/of/the/copy' (or to a folder that holds "
    f"{path.removeprefix('gs://')}), or give a local path instead (in a gin file: "
    "seqio.SentencePieceVocabulary.sentencepiece_model_file = '/path/of/the/copy')"
  )


def add_copy(path: str, copy: str | os.PathLike[str]) -> None:
  """Adds a local copy of a file, which is used if the environment variable names no other."""
  entries = [*os.environ.get(ASSETS_VARIABLE, "").split(","), f"{path}={os.fspath(copy)}"]
  os.environ[ASSETS_VARIABLE] = ",".join(dict.fromkeys(filter(None, entries)))


def _candidates(path: str, setting: str) -> list[pathlib.Path]:
  """Returns every local path that may hold a copy of `path`, in the order of the setting."""
  bucket_path = path.removeprefix("gs://")
  path_in_bucket = bucket_path.partition("/")[2]
  last_two_parts = "/".join(path_in_bucket.split("/")[-2:])
  candidates: list[pathlib.Path] = []
  for entry in filter(None, setting.split(",")):
    prefix, equals, target = entry.strip().rpartition("=")
    if not equals:
      suffixes = (bucket_path, path_in_bucket, last_two_parts)
      candidates += [pathlib.Path(target, suffix) for suffix in suffixes]
    elif f"{path}/".startswith(prefix.rstrip("/") + "/"):
      candidates.append(pathlib.Path(target, path.removeprefix(prefix).lstrip("/")))
  return candidates


def announced_extra_ids(path: str | os.PathLike[str]) -> int:
  """Returns the number of extra ids that the folder of a vocabulary announces, or 0."""
  announced = _EXTRA_IDS.search(pathlib.PurePosixPath(path).parent.name)
  return int(announced[1]) if announced else 0


def data_folders(tfds_data_dir: str | None = None) -> list[pathlib.Path]:
  """Returns the folders that are searched for datasets, in this order and without duplicates.

  Args:
    tfds_data_dir: the value of --tfds_data_dir.
  """
  variables = map(os.environ.get, (DATA_VARIABLE, "TFDS_DATA_DIR"))
  named = [tfds_data_dir, *variables, "~/tensorflow_datasets"]
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

  def rank(path: pathlib.Path) -> tuple[bool, list[int]]:
    return path.name == version, [int(number) for number in re.findall(r"\d+", path.name)]

  return max(built, key=rank, default=None)
