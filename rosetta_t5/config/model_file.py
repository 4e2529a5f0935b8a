"""MODEL_DIR/model.json: the parts of a run that evaluation and inference need, as data that runs no code.

Training writes it beside config.gin. A value is a number, a string, true, false, null, a list, an
object, or one of

    {"@call": "t5x.examples.t5.network.T5Config", "vocab_size": 32128}   what this returns
    {"@name": "t5x.decoding.beam_search", "alpha": 0.6}    the function itself, with these arguments
    {"@tuple": ["gelu", "linear"]}
    {"@file": "vocabulary/spiece.model", "of": "/data/spiece.model"}    a copy in MODEL_DIR

Only functions and classes in `allow_list.CALLED` can be named. If a run uses others, such as a model of
the user's own, the file has only their names, and the folder is opened by its config.gin.

The manifest in MODEL_DIR has its hash. A file without one is read too.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gin
from gin.config import ConfigurableReference

from rosetta_t5 import manifest
from rosetta_t5.config.language import allow_list, gin_internals
from rosetta_t5.config.language.binding import bound_arguments, defaults
from rosetta_t5.config.language.statements import leaves
from rosetta_t5.config.run_inputs import describe_surroundings, keep_inputs, open_inputs
from rosetta_t5.files import read_json_object, write_atomically
from rosetta_t5.user_errors import ConfigError

NAME = "model.json"
_VERSION = 1
# The arguments of `train` that evaluation and inference need.
ARGUMENTS = (
  "model",
  "partitioner",
  "train_dataset_cfg",
  "train_eval_dataset_cfg",
  "infer_eval_dataset_cfg",
  "eval_steps",
)
_OLD_CHECKSUM = "xxh3_64"  # Earlier versions stored the hash of the content in it.
_MODULES = "modules"
_LENGTHS = "task_feature_lengths"
_VOCABULARIES = "vocabularies"
_SURROUNDINGS = "surroundings"
_SIDES = {"input_vocabulary", "output_vocabulary"}
_PLAIN = (bool, int, float, str, type(None))
# The key of the list of functions and classes that only config.gin can refer to.
_OTHERS = "only_in_config_gin"
# Functions for gin files alone, which return plain values.
_CALCULATIONS = "t5x.gin_utils."


@dataclasses.dataclass(frozen=True)
class _Other:
  """The name of a function or class that model.json cannot describe."""

  name: str


def write_model_file(folder: pathlib.Path) -> None:
  """Writes FOLDER/model.json, if `train` runs with arguments from gin."""
  names = [name for _, name in gin_internals.arguments_in_use() if name.split(".")[-1] == "train"]
  if not names:
    return
  (train,) = gin_internals.find_configurables(names[0])
  bound = bound_arguments(train)
  run = {name: _describe(bound[name]) for name in ARGUMENTS if name in bound}
  # Some of them register tasks. Those of the user are left out: predictions for texts need no task.
  modules = [module for module in gin_internals.imported_modules() if _may_import(module)]
  content = {_MODULES: modules, _LENGTHS: _lengths(run), **run}
  if others := sorted({leaf.name for leaf in leaves(run) if isinstance(leaf, _Other)}):
    content = {_OTHERS: others}
  users = {module for module in gin_internals.imported_modules() if not _may_import(module)}
  content |= {
    "version": _VERSION,
    _VOCABULARIES: _vocabularies(bound.get("model")),
    _SURROUNDINGS: describe_surroundings(users),
  }
  content = keep_inputs(json.loads(json.dumps(content)), folder)
  write_atomically(folder / NAME, json.dumps(content, indent=2) + "\n")
  manifest.write(folder, [NAME])


def read_model_file(file: pathlib.Path) -> ModelFile:
  """Returns what a model file describes.

  Raises:
    ConfigError: it is not a model file, one of a later version, or was changed since it was written.
  """
  try:
    content = read_json_object(file)
  except (ValueError, RecursionError) as error:
    raise ConfigError(f"{file} is not a model file: {error}") from error
  if (version := content.get("version")) != _VERSION:
    raise ConfigError(f"{file} must have the version {_VERSION} of a model file, got {version!r}")
  content.pop(_OLD_CHECKSUM, None)
  try:
    manifest.verify(file.parent, lambda name: name == file.name)
  except manifest.DamagedFileError as error:
    raise ConfigError(str(error)) from error
  missing = {"model", "partitioner", _LENGTHS} - content.keys()
  if missing and _OTHERS not in content:
    raise ConfigError(f"{file} must describe {' and '.join(sorted(missing))}")
  return ModelFile(file, content)


def read_network_config(file: pathlib.Path) -> dict[str, Any] | None:
  """Returns the arguments of the network's config in a model file; None if it does not have them.

  Nothing else is built: a vocabulary's file may be missing.

  Raises:
    ConfigError: see `read_model_file`.
  """
  node: Any = read_model_file(file).content
  for name in ("model", "module", "config"):
    node = node.get(name) if isinstance(node, dict) else None
  return _arguments(node) if isinstance(node, dict) else None


@dataclasses.dataclass(frozen=True)
class ModelFile(Mapping[str, Any]):
  """The arguments of `train` in a model file, and task_feature_lengths. Each is built when it is read.

  Attributes:
    file: the path.
    content: the JSON.
  """

  file: pathlib.Path
  content: dict[str, Any]

  def __iter__(self) -> Iterator[str]:
    return (name for name in self.content if name in (*ARGUMENTS, _LENGTHS))

  def __len__(self) -> int:
    return sum(1 for _ in self)

  @property
  def is_complete(self) -> bool:
    """Whether it describes the run; otherwise the run has functions that only config.gin can name."""
    return _OTHERS not in self.content

  @property
  def surroundings(self) -> Mapping[str, Any]:
    """Where the run's data and modules are; see `run_inputs`."""
    found = self.content.get(_SURROUNDINGS)
    return found if isinstance(found, dict) else {}

  def with_copied_vocabularies(self, model: Any) -> Any:
    """Returns a model that config.gin has built with the copies of its vocabularies in the folder."""
    described = self.content.get(_VOCABULARIES)
    nodes = open_inputs(described, self.file.parent) if isinstance(described, dict) else {}
    changed = copy.copy(model)
    for name in _SIDES.intersection(nodes):
      setattr(changed, f"_{name}", _build(nodes[name]))
    return changed

  def import_modules(self) -> None:
    """Imports the modules that the run has imported and that may be imported.

    Raises:
      ConfigError: the file names others.
    """
    modules = self.content.get(_MODULES, [])
    for module in modules if isinstance(modules, list) else [modules]:
      if not _may_import(module):
        raise ConfigError(f"{self.file}: {module!r} is not a module that this file may name")
      importlib.import_module(module)

  def __getitem__(self, name: str) -> Any:
    """Returns an argument.

    Raises:
      KeyError: the file does not have it.
      ConfigError: the file names what it may not, or a function cannot be called with its values.
    """
    node = self.content[name]
    try:
      with allow_list.limited_to_list():
        return _build(open_inputs(node, self.file.parent))
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


def _may_import(module: Any) -> bool:
  is_name = isinstance(module, str) and not module.startswith("__")
  return is_name and module in allow_list.IMPORTABLE


def _lengths(run: Mapping[str, Any]) -> Any:
  """Returns the feature lengths of the training data: inference needs nothing else of the data."""
  cfg = run.get("train_dataset_cfg")
  return cfg.get(_LENGTHS) if isinstance(cfg, dict) else None


def _vocabularies(model: Any) -> dict[str, Any]:
  """Returns the descriptions of a model's vocabularies that can be described."""
  while (
    isinstance(model, ConfigurableReference) and model.configurable.selector == gin_internals.MACRO
  ):
    model = bound_arguments(model.configurable, model.scopes).get("value")
  if not isinstance(model, ConfigurableReference):
    return {}
  bound = bound_arguments(model.configurable, model.scopes)
  if "vocabulary" in bound:  # a decoder's
    bound = dict.fromkeys(_SIDES, bound["vocabulary"])
  nodes = {n: _describe(bound[n]) for n in sorted(_SIDES & bound.keys())}
  return {n: x for n, x in nodes.items() if not any(isinstance(y, _Other) for y in leaves(x))}


def _describe(value: Any, scopes: Sequence[str] = ()) -> Any:
  """Returns a value that gin has bound, in these scopes, as JSON."""
  match value:
    case ConfigurableReference():
      return _describe_reference(value, value.scopes or scopes)
    case tuple():
      return {"@tuple": [_describe(item, scopes) for item in value]}
    case list():
      return [_describe(item, scopes) for item in value]
    case dict() if all(isinstance(key, str) and key[:1] != "@" for key in value):
      return {key: _describe(item, scopes) for key, item in value.items()}
    case _:
      return value if isinstance(value, _PLAIN) else _Other(repr(value))


def _describe_reference(reference: ConfigurableReference, scopes: Sequence[str]) -> Any:
  configurable = reference.configurable
  bound = bound_arguments(configurable, scopes)
  name = allow_list.public_name(configurable.wrapped)
  if configurable.selector == gin_internals.MACRO and "value" in bound:
    return _describe(bound["value"], scopes)
  if name is None:
    return _Other(configurable.selector)
  if methods := _bound_methods(configurable):
    return _Other(methods[0])
  if name.startswith(_CALCULATIONS) and reference.evaluate:
    with gin.config_scope(list(scopes) or None):
      return copy.deepcopy(reference)  # Gin calls the function when its reference is copied.
  known = defaults(configurable) if reference.evaluate else {}
  plain = {key: item for key, item in known.items() if isinstance(item, _PLAIN)}
  # Inference needs no optimizer, so one that cannot be described does not matter.
  arguments = {**plain, **bound} | ({"optimizer_def": None} if "optimizer_def" in bound else {})
  described = {key: _describe(item, scopes) for key, item in arguments.items()}
  return {"@call" if reference.evaluate else "@name": name, **described}


def _bound_methods(configurable: Any) -> list[str]:
  """Returns the selectors of the class's methods that gin has bound arguments of."""
  return [
    method.selector
    for method in gin_internals.registered_configurables()
    if method.is_method and method.module == configurable.selector and bound_arguments(method)
  ]
