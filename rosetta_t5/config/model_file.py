"""MODEL_DIR/model.json: the parts of a run that evaluation and inference need, as data that runs no code.

Training writes it beside config.gin. A value is a number, a string, true, false, null, a list, an
object, or one of

    {"@call": "t5x.examples.t5.network.T5Config", "vocab_size": 32128}   what this returns
    {"@name": "t5x.decoding.beam_search", "alpha": 0.6}    the function itself, with these arguments
    {"@tuple": ["gelu", "linear"]}
    {"@file": "vocabulary/spiece.model", "of": "/data/spiece.model"}    a copy in MODEL_DIR
    {"@other": "my_models.Model"}    what only config.gin can refer to

Only functions and classes in `allow_list.CALLED` can be named. If a run uses others, such as a model of
the user's own, the folder is opened by its config.gin.

MODEL_DIR can be opened in another place: it has copies of the vocabularies' files. Paths of data become
absolute, and the folders of data are recorded. checksums.json in MODEL_DIR has the hash of model.json; a
file without one is read too.
"""

import copy
import dataclasses
import filecmp
import functools
import importlib
import itertools
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gin
from gin.config import Configurable, ConfigurableReference

from rosetta_t5 import files
from rosetta_t5.config.language import allow_list, gin_internals
from rosetta_t5.config.language.binding import bound_arguments, defaults
from rosetta_t5.config.language.statements import leaves
from rosetta_t5.user_errors import ConfigError

NAME = "model.json"
_VERSION = 1
# The arguments of `train` that evaluation and inference need.
_DATA = [f"{use}_dataset_cfg" for use in ("train", "train_eval", "infer_eval")]
ARGUMENTS = ("model", "partitioner", *_DATA, "eval_steps")
# The modules that a file may name; a list, because a file may contain what has no hash.
_MODULES = [module for module in allow_list.IMPORTABLE if not module.startswith("__")]
_LENGTHS = "task_feature_lengths"
_PLAIN = (bool, int, float, str, type(None))
# Functions for gin files alone, which return plain values.
_CALCULATIONS = "t5x.gin_utils."
_FOLDER = "vocabulary"
# The arguments of functions that name a vocabulary's file.
_VOCABULARY_FILES = {
  "seqio.SentencePieceVocabulary": ("sentencepiece_model_file",),
  "rosetta_t5.data.gpt2_vocabulary": ("vocab_file", "merges_file"),
  "rosetta_t5.data.tokenizer_vocabulary": ("file",),
}
# The arguments of functions that name data, a path or a list of paths.
_DATA_FILES = {
  "rosetta_t5.data.chat_task": ("files", "validation_files"),
  "rosetta_t5.data.file_task": ("files", "validation_files"),
  "rosetta_t5.data.prepared_task": ("folders",),
}
_QUICKSTART = "rosetta_t5.data.tasks.stdlib_docs.vocabulary"


def write_model_file(folder: pathlib.Path) -> None:
  """Writes FOLDER/model.json, if `train` runs with arguments from gin."""
  names = [name for _, name in gin_internals.arguments_in_use() if name.split(".")[-1] == "train"]
  if not names:
    return
  (train,) = gin_internals.find_configurables(names[0])
  bound = bound_arguments(train)
  run = {name: _describe(bound[name], folder) for name in ARGUMENTS if name in bound}
  cfg = run.get("train_dataset_cfg")
  content = {
    "version": _VERSION,
    # Some of them register tasks. Those of the user are left out: predictions for texts need no task.
    "modules": [module for module in gin_internals.imported_modules() if module in _MODULES],
    # Inference needs nothing else of the data.
    _LENGTHS: cfg.get(_LENGTHS) if isinstance(cfg, dict) else None,
    **run,
    "surroundings": _data_folders(),
  }
  files.write_atomically(folder / NAME, json.dumps(content, indent=2) + "\n")
  files.write_checksums(folder, [NAME])


def read_model_file(file: pathlib.Path) -> "ModelFile":
  """Returns what a model file describes.

  Raises:
    ConfigError: it is not a model file, or one of a later version.
    DamagedFileError: it was changed since it was written.
  """
  files.verify_checksums(file.parent, lambda name: name == file.name)
  try:
    content = files.read_json_object(file, functools.partial(_use_copy, file.parent))
    if (version := content.get("version")) != _VERSION:
      raise ConfigError(f"it must have the version {_VERSION} of a model file, got {version!r}")
    has_all = {"model", "partitioner", _LENGTHS} <= content.keys()
    return ModelFile(file, content, has_all and "@other" not in leaves(content))
  except (ValueError, RecursionError) as error:
    raise ConfigError(f"{file} cannot be read as a model file: {error}") from error


def read_network_config(file: pathlib.Path) -> dict[str, Any] | None:
  """Returns the arguments of the network's config in a model file; None if it does not have them.

  Nothing else is built: a vocabulary's file may be missing.

  Raises:
    ConfigError: see `read_model_file`.
  """
  described = read_model_file(file)
  node: Any = described.content if described.is_complete else None
  for name in ("model", "module", "config"):
    node = node.get(name) if isinstance(node, dict) else None
  return _arguments(node) if isinstance(node, dict) else None


@dataclasses.dataclass(frozen=True)
class ModelFile(Mapping[str, Any]):
  """The arguments of `train` in a model file, and task_feature_lengths. Each is built when it is read.

  Attributes:
    file: the path.
    content: the JSON, with the paths of copies in the place of `@file`.
    is_complete: whether it describes the run; otherwise the run has functions that only config.gin can name.
  """

  file: pathlib.Path
  content: dict[str, Any]
  is_complete: bool = False

  def __iter__(self) -> Iterator[str]:
    return (name for name in self.content if name in (*ARGUMENTS, _LENGTHS))

  def __len__(self) -> int:
    return sum(1 for _ in self)

  def use_data_folders(self) -> None:
    """Makes tasks read the folders of data that the run has recorded, unless the user names others."""
    from rosetta_t5.data import local_copies, quickstart_data

    recorded = self.content.get("surroundings", {})
    for name, variable in (
      ("data_folder", local_copies.DATA_VARIABLE),
      ("quickstart_data", quickstart_data.FOLDER_VARIABLE),
    ):
      if isinstance(recorded.get(name), str) and os.path.isdir(recorded[name]):
        os.environ.setdefault(variable, recorded[name])

  def import_modules(self) -> None:
    """Imports the modules that the run has imported and that may be imported.

    Raises:
      ConfigError: the file names others.
    """
    modules = self.content.get("modules", [])
    for module in modules if isinstance(modules, list) else [modules]:
      if module not in _MODULES:
        raise ConfigError(f"{self.file}: {module!r} is not a module that this file may name")
      importlib.import_module(module)

  def __getitem__(self, name: str) -> Any:
    """Returns an argument.

    Raises:
      KeyError: the file does not have it.
      ConfigError: the file names what it may not, or a function cannot be called with its values.
    """
    try:
      with allow_list.limited_to_list():
        return _build(self.content[name])
    except (ConfigError, RecursionError) as error:
      raise ConfigError(f"{self.file}: {name}: {error}") from error


def _build(node: Any) -> Any:
  """Returns the value that JSON describes."""
  match node:
    case {"@call": str(name)}:
      function, arguments = allow_list.find_public(name), _arguments(node)
      try:
        return function(**arguments)
      except Exception as error:
        raise ConfigError(f"{name} cannot be built: {error}") from error
    case {"@name": str(name)}:
      function, arguments = allow_list.find_public(name), _arguments(node)
      return functools.partial(function, **arguments) if arguments else function
    case {"@tuple": list(items)}:
      return tuple(map(_build, items))
    case list():
      return list(map(_build, node))
    case dict() if not any(key.startswith("@") for key in node):
      return _arguments(node)
    case dict():
      raise ConfigError(f"{node} is not a value of a model file")
    case _:
      return node


def _arguments(node: Mapping[str, Any]) -> dict[str, Any]:
  return {name: _build(value) for name, value in node.items() if not name.startswith("@")}


def _describe(value: Any, folder: pathlib.Path, scopes: Sequence[str] = ()) -> Any:
  """Returns a value that gin has bound, in these scopes, as JSON, and copies its vocabularies to the folder."""
  match value:
    case ConfigurableReference():
      return _describe_reference(value, folder, value.scopes or scopes)
    case tuple():
      return {"@tuple": [_describe(item, folder, scopes) for item in value]}
    case list():
      return [_describe(item, folder, scopes) for item in value]
    case dict() if all(isinstance(key, str) and key[:1] != "@" for key in value):
      return {key: _describe(item, folder, scopes) for key, item in value.items()}
    case _:
      return value if isinstance(value, _PLAIN) else {"@other": repr(value)}


def _describe_reference(
  reference: ConfigurableReference, folder: pathlib.Path, scopes: Sequence[str]
) -> Any:
  configurable = reference.configurable
  bound = bound_arguments(configurable, scopes)
  name = allow_list.name_in(allow_list.CALLED, configurable.wrapped)
  if configurable.selector == gin_internals.MACRO and "value" in bound:
    return _describe(bound["value"], folder, scopes)
  if name is None or _has_bound_methods(configurable):
    return {"@other": configurable.selector}
  if name.startswith(_CALCULATIONS) and reference.evaluate:
    with gin.config_scope(list(scopes) or None):
      return copy.deepcopy(reference)  # Gin calls the function when its reference is copied.
  known = defaults(configurable) if reference.evaluate else {}
  plain = {key: item for key, item in known.items() if isinstance(item, _PLAIN)}
  # Inference needs no optimizer, so one that cannot be described does not matter.
  arguments = {**plain, **bound} | ({"optimizer_def": None} if "optimizer_def" in bound else {})
  described = {key: _describe(item, folder, scopes) for key, item in arguments.items()}
  return (
    _describe_call(name, described, folder) if reference.evaluate else {"@name": name, **described}
  )


def _describe_call(name: str, arguments: dict[str, Any], folder: pathlib.Path) -> dict[str, Any]:
  """Returns a call with portable paths, and copies its vocabularies to the folder."""
  if name == _QUICKSTART:
    from rosetta_t5.data import quickstart_data

    path = str(quickstart_data.data_folder() / quickstart_data.VOCABULARY_FILE)
    arguments = {"sentencepiece_model_file": path, "extra_ids": quickstart_data.EXTRA_IDS}
    name = "seqio.SentencePieceVocabulary"
  for key in _VOCABULARY_FILES.get(name, ()):
    if isinstance(arguments.get(key), str):
      arguments[key] = _copy_vocabulary(arguments[key], folder)
  for key in _DATA_FILES.get(name, ()):
    if arguments.get(key):
      arguments[key] = _absolute(arguments[key])
  return {"@call": name, **arguments}


def _has_bound_methods(configurable: Configurable) -> bool:
  """Returns whether gin has bound arguments of a method of a class."""
  known = gin_internals.registered_configurables()
  methods = [each for each in known if each.is_method and each.module == configurable.selector]
  return any(map(bound_arguments, methods))


def _use_copy(folder: pathlib.Path, node: dict[str, Any]) -> Any:
  """Returns an object of a model file in `folder`, or the path of the copy that it describes."""
  from rosetta_t5.data.local_copies import add_copy

  if not isinstance(name := node.get("@file"), str):
    return node
  if os.path.isabs(name) or ".." in pathlib.PurePath(name).parts:
    raise ConfigError(f"{name!r} is not a file in the folder of the run")
  add_copy(str(node.get("of")), folder / name)  # Tasks and config.gin name these vocabularies too.
  return str(folder / name)


def _data_folders() -> dict[str, str | None]:
  """Returns where the run finds its data."""
  from rosetta_t5.data import local_copies, quickstart_data
  from rosetta_t5.data.tensorflow_import import tfds_data_dir_override

  given = tfds_data_dir_override() or os.environ.get(local_copies.DATA_VARIABLE)
  quickstart = str(quickstart_data.data_folder())
  return {"data_folder": given and _absolute(given), "quickstart_data": quickstart}


def _copy_vocabulary(path: str, folder: pathlib.Path) -> Any:
  """Returns the description of a vocabulary's copy in a folder; the path, if there is no such file."""
  from rosetta_t5.data.local_copies import announced_extra_ids, local_path
  from rosetta_t5.data.vocabularies.tokenizer_folder import TOKENIZER, copy_vocabulary

  if os.path.isdir(path):
    path = os.path.join(path, TOKENIZER)
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
  copy.parent.mkdir(parents=True, exist_ok=True)
  copy_vocabulary(source, copy)
  return {"@file": copy.relative_to(folder).as_posix(), "of": path}


def _absolute(paths: Any) -> Any:
  """Returns a path, a pattern or a list of them as absolute paths; names such as gs://… are unchanged."""
  if isinstance(paths, dict):  # {"@tuple": paths}
    return {name: _absolute(value) for name, value in paths.items()}
  if not isinstance(paths, str):
    return [_absolute(path) for path in paths]
  return paths if "://" in paths else os.path.abspath(os.path.expanduser(paths))


def copied_vocabulary(folder: pathlib.Path) -> pathlib.Path | None:
  """Returns the vocabulary beside a model.json: a folder with tokenizer.json, or a SentencePiece model.

  None if there is none, or if there are several.
  """
  from rosetta_t5.data.vocabularies.tokenizer_folder import TOKENIZER

  found = [*folder.joinpath(_FOLDER).rglob(TOKENIZER), *folder.joinpath(_FOLDER).rglob("*.model")]
  if len(found) != 1:
    return None
  return found[0].parent if found[0].name == TOKENIZER else found[0]
