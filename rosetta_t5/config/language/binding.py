"""Binds what gin files and the command line say, so that configured functions receive it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gin

from rosetta_t5.config.checks.completeness import check_arguments, check_macros, check_required
from rosetta_t5.config.checks.spelling import check_spelling
from rosetta_t5.config.checks.values import check_calls, check_whole_numbers
from rosetta_t5.config.errors import ConfigError, FollowOnError, Problems, near
from rosetta_t5.config.language.names import Names, check_takes, run_script_names
from rosetta_t5.config.language.statements import (
  Binding,
  GinFile,
  Import,
  Macro,
  Place,
  Program,
  Reference,
  read_program,
)
from rosetta_t5.config.language.unimported import submodules
from rosetta_t5.config.t5x.paths import open_recipe, recipe
from rosetta_t5.config.t5x.retired_arguments import is_retired

# Programs that call gin's own parser can include recipes too.
gin.config.register_file_reader(open_recipe, lambda path: recipe(path) is not None)


@dataclasses.dataclass(frozen=True)
class How:
  """How statements are bound.

  Attributes:
    skip_unknown: leave out bindings of, and imports of, what does not exist: all, or those named.
    problems: takes what is wrong.
    read_slow: read modules that would import TensorFlow instead of importing them.
  """

  skip_unknown: bool | Sequence[str] = False
  problems: Problems = dataclasses.field(default_factory=Problems)
  read_slow: bool = False

  def may_skip(self, name: str) -> bool:
    """Whether `name` may be unknown."""
    return self.skip_unknown if isinstance(self.skip_unknown, bool) else name in self.skip_unknown


def parse_gin_flags(
  gin_search_paths: Sequence[str],
  gin_files: Sequence[str],
  gin_bindings: Sequence[str],
  skip_unknown: bool | Sequence[str] = False,
  finalize_config: bool = True,
) -> None:
  """Parses gin files, then bindings, later ones winning (T5X: gin_utils.parse_gin_flags).

  Args:
    gin_search_paths: folders in which files and includes are looked for, before the recipes.
    gin_files: gin files, each absolute or found through the search paths.
    gin_bindings: single statements such as "BATCH_SIZE = 8".
    skip_unknown: leave out bindings of, and imports of, what does not exist: all, or those named.
    finalize_config: check that nothing required is missing, and lock the configuration.

  Raises:
    ConfigError: something is missing, misspelt or no valid gin; names its file and line.
  """
  program = read_program(gin_files, gin_bindings, gin_search_paths)
  how = How(skip_unknown)
  if finalize_config:
    check_required(program)
  bind(program, how)
  if finalize_config:
    check_bound(program, None, how.problems)
  how.problems.refuse()
  if finalize_config:
    gin.finalize()
  for line in gin.config_str().splitlines():
    logging.getLogger(__name__).info("%s", line)


def configure(program: Program, function: Callable[..., Any]) -> Callable[..., Any]:
  """Binds a whole program and returns `function` as gin configures it, everything checked.

  Raises:
    ConfigError: with all that is wrong.
  """
  how = How()
  bind(program, how, function)
  check_bound(program, function, how.problems)
  how.problems.refuse()
  gin.finalize()
  return gin.get_configurable(function)


def check_bound(program: Program, function: Callable[..., Any] | None, problems: Problems) -> None:
  """Notes what is misspelt or missing in a program that has been bound."""
  all_bound = not problems.texts
  with problems.noted():
    check_spelling(program)
  with problems.noted():
    check_macros(program)
  with problems.noted():
    check_calls(program)
  # What could not be bound would only be told a second time.
  if function is not None and all_bound:
    with problems.noted():
      check_arguments(program, function)
      check_whole_numbers(function)


def bind(program: Program, how: How, function: Callable[..., Any] | None = None) -> None:
  """Binds every statement in order: files, then the command line.

  Args:
    program: the statements.
    how: what to do about what cannot be bound.
    function: what will be run, if that is known; gin files find it in `__main__`.
  """
  if gin.config_is_locked():  # by an earlier run of this process
    gin.clear_config()
  seen = [run_script_names(function)] if function else []
  for file in program.files:
    _bind_file(file, Names(seen, how.read_slow), seen, how)
  _bind_file(program.bindings, Names(seen, how.read_slow), seen, how)


def _bind_file(file: GinFile, names: Names, seen: list[Names], how: How) -> None:
  """Binds one file's statements; its names are kept for the files after it."""
  for statement in file.statements:
    with how.problems.noted():
      if isinstance(statement, GinFile):
        _bind_file(statement, Names(seen, how.read_slow), seen, how)
      elif isinstance(statement, Import):
        _import(statement, names, how)
      else:
        _bind_statement(statement, names, how)
  gin.config._IMPORTS.update(names.imports)
  seen.append(names)


def _bind_statement(statement: Binding, names: Names, how: How) -> None:
  """Sets one argument or macro."""
  with _at(statement.place):
    if statement.macro is not None:
      key = (statement.macro, "gin.macro", "value")
    else:
      try:
        configurable = names.find(statement.selector)
      except ConfigError:
        if how.may_skip(statement.selector):
          return
        raise
      if is_retired(configurable.name, statement.argument):
        return
      check_takes(configurable, statement.argument)
      key = (statement.scope, configurable.selector, statement.argument)
    gin.bind_parameter(key, _with_references(statement.value, names))


def _with_references(value: Any, names: Names) -> Any:
  """Returns a parsed value with gin's own references in place of names."""
  match value:
    case Reference(name=name, evaluate=evaluate):
      *scopes, selector = name.split("/")
      full_name = "/".join([*scopes, names.find(selector).selector])
      return gin.config.ConfigurableReference(full_name, evaluate)
    case Macro(name=name):
      return gin.config.ParserDelegate().macro(name)
    case dict():
      return {_with_references(k, names): _with_references(v, names) for k, v in value.items()}
    case list() | tuple():
      return type(value)(_with_references(item, names) for item in value)
    case _:
      return value


def _import(statement: Import, names: Names, how: How) -> None:
  """Imports a module for one gin file."""
  module = statement.statement.module
  try:
    names.add_import(statement.statement)
  except ModuleNotFoundError as error:
    if not how.may_skip(module):
      raise ConfigError(f"{_what_is_missing(module, error)}\n  {statement.place}") from error
  except Exception as error:
    raise ConfigError(
      f"importing {module} failed: {type(error).__name__}: {error}\n"
      f"  {_last_line_of_users(error)}\n  {statement.place}"
    ) from error


def _what_is_missing(module: str, error: ModuleNotFoundError) -> str:
  missing = error.name or module
  if missing == "t5" or missing.startswith("t5."):
    return (
      "there is no module 't5'. Install it so that it leaves seqio as it is:\n"
      "  pip install 'rosetta-t5[t5]' && pip install --no-deps t5==0.9.4"
    )
  if not (module == missing or module.startswith(missing + ".")):
    return f"importing {module} needs the module {missing!r}: pip install {missing.split('.')[0]}"
  parent, _, name = missing.rpartition(".")
  hint = near(name, submodules(parent)) if parent else ""
  hint = hint or " Is its folder on PYTHONPATH?"
  return f"there is no module {missing!r}.{hint}"


def _last_line_of_users(error: Exception) -> Place:
  """The last line on the way to an error that lies in no installed package."""
  frames = traceback.extract_tb(error.__traceback__)
  installed = ("<frozen", *sysconfig.get_paths().values())
  own = [frame for frame in frames if not frame.filename.startswith(installed)]
  last = (own or frames)[-1]
  return Place(last.filename, last.lineno or 0, last.line or "")


@contextlib.contextmanager
def _at(place: Place) -> Iterator[None]:
  """Adds the place to whatever goes wrong with a statement."""
  try:
    yield
  except FollowOnError:
    raise
  except Exception as error:
    raise ConfigError(f"{error}\n  {place}") from error
