"""What a run reads from outside MODEL_DIR, so that MODEL_DIR can be opened in another place.

The files of its vocabularies are copied to MODEL_DIR/vocabulary. model.json names them relative to
MODEL_DIR, as {"@file": "vocabulary/spiece.model", "of": "the path in the gin files"}. Paths of data
become absolute, and the folders of data and the files of the user's modules are recorded.
"""

from __future__ import annotations

import filecmp
import importlib.util
import itertools
import os
import pathlib
import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rosetta_t5.user_errors import ConfigError

_FOLDER = "vocabulary"
# The arguments of functions that name a vocabulary's file.
_VOCABULARY_FILES = {
  "seqio.SentencePieceVocabulary": ("sentencepiece_model_file",),
  "rosetta_t5.data.gpt2_vocabulary": ("vocab_file", "merges_file"),
  "rosetta_t5.data.tokenizer_vocabulary": ("file",),
}
# The arguments of functions that name data, a path or a list of paths.
_DATA_FILES = {
  "rosetta_t5.data.file_task": ("files", "validation_files"),
  "rosetta_t5.data.prepared_task": ("folders",),
}
_QUICKSTART = "rosetta_t5.data.tasks.stdlib_docs.vocabulary"


def keep_inputs(node: Any, folder: pathlib.Path) -> Any:
  """Returns a value of a model file with portable paths, and copies its vocabularies to the folder."""
  if isinstance(node, list):
    return [keep_inputs(item, folder) for item in node]
  if not isinstance(node, dict):
    return node
  node = {key: keep_inputs(value, folder) for key, value in node.items()}
  if node.get("@call") == _QUICKSTART:
    node = {"@call": "seqio.SentencePieceVocabulary", **_quickstart_vocabulary()}
  for name in _VOCABULARY_FILES.get(node.get("@call", ""), ()):
    if isinstance(node.get(name), str):
      node[name] = _copy_vocabulary(node[name], folder)
  for name in _DATA_FILES.get(node.get("@call", ""), ()):
    if node.get(name):
      node[name] = _absolute(node[name])
  return node


def open_inputs(node: Any, folder: pathlib.Path) -> Any:
  """Returns a value of a model file in `folder` with the paths of its copies."""
  match node:
    case list():
      return [open_inputs(item, folder) for item in node]
    case {"@file": str(name), **others}:
      file = folder / name
      if os.path.isabs(name) or ".." in file.relative_to(folder).parts:
        raise ConfigError(f"{name!r} is not a file in the folder of the run")
      if str(others.get("of")).startswith("gs://"):
        from rosetta_t5.data.local_copies import add_copy

        add_copy(str(others["of"]), file)  # Tasks name these vocabularies too.
      return str(file)
    case dict():
      return {key: open_inputs(value, folder) for key, value in node.items()}
    case _:
      return node


def describe_surroundings(modules: Iterable[str]) -> dict[str, Any]:
  """Returns where the run finds its data, and the files of its modules that are the user's own."""
  from rosetta_t5.data import local_copies, quickstart_data
  from rosetta_t5.data.seqio_internals import tfds_data_dir_override

  given = tfds_data_dir_override() or os.environ.get(local_copies.DATA_VARIABLE)
  files = {module: getattr(sys.modules.get(module), "__file__", None) for module in modules}
  return {
    "data_folder": given and _absolute(given),
    "quickstart_data": str(quickstart_data.data_folder()),
    "module_files": {module: file for module, file in files.items() if file},
  }


def use_data_folders(surroundings: Mapping[str, Any]) -> None:
  """Makes tasks read the folders of data that a run has recorded, unless the user names others."""
  from rosetta_t5.data import local_copies, quickstart_data

  folders = {
    local_copies.DATA_VARIABLE: surroundings.get("data_folder"),
    quickstart_data.FOLDER_VARIABLE: surroundings.get("quickstart_data"),
  }
  for variable, folder in folders.items():
    if isinstance(folder, str) and os.path.isdir(folder):
      os.environ.setdefault(variable, folder)


def check_modules(surroundings: Mapping[str, Any]) -> None:
  """Raises ConfigError if one of the user's modules is not found; it names the file that the run used."""
  for module, file in surroundings.get("module_files", {}).items():
    try:
      is_found = module in sys.modules or importlib.util.find_spec(module) is not None
    except ImportError:  # its package
      is_found = False
    if not is_found:
      raise ConfigError(
        f"there is no module {module!r}: the run used {file}. Add the folder that contains "
        f"{module.partition('.')[0]} to PYTHONPATH"
      )


def _quickstart_vocabulary() -> dict[str, Any]:
  from rosetta_t5.data import quickstart_data

  file = quickstart_data.data_folder() / quickstart_data.VOCABULARY_FILE
  return {"sentencepiece_model_file": str(file), "extra_ids": quickstart_data.EXTRA_IDS}


def _copy_vocabulary(path: str, folder: pathlib.Path) -> Any:
  """Returns the description of a vocabulary's copy in a folder; the path, if there is no such file."""
  from rosetta_t5.data.local_copies import announced_extra_ids, local_path

  try:
    source = pathlib.Path(local_path(path))
  except ValueError:
    return path
  given = pathlib.PurePosixPath(path)
  # The name of this folder announces the number of sentinels.
  parts = [*([given.parent.name] if announced_extra_ids(path) else []), given.name]
  numbers = itertools.count(2)
  copy = folder.joinpath(_FOLDER, *parts)
  while copy.exists() and not filecmp.cmp(source, copy, shallow=False):
    copy = folder.joinpath(_FOLDER, str(next(numbers)), *parts)
  if not copy.exists():
    copy.parent.mkdir(parents=True, exist_ok=True)
    unfinished = copy.with_name(f".{copy.name}.{os.getpid()}")
    shutil.copyfile(source, unfinished)
    unfinished.replace(copy)
  return {"@file": copy.relative_to(folder).as_posix(), "of": path}


def _absolute(paths: Any) -> Any:
  """Returns a path, a pattern or a list of them as absolute paths; names such as gs://… are unchanged."""
  if not isinstance(paths, str):
    return [_absolute(path) for path in paths]
  return paths if "://" in paths else os.path.abspath(os.path.expanduser(paths))
