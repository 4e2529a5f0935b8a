"""Binds the statements of gin files and the command line, so that functions receive the values."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gin

from rosetta_t5.config.errors import ConfigError, FollowOnError, Problems, did_you_mean
from rosetta_t5.config.language.gin_internals import record_imports
from rosetta_t5.config.language.names import Namespace, check_argument, namespace_of_run
from rosetta_t5.config.language.statements import (
  Binding,
  GinFile,
  Import,
  Macro,
  Program,
  Reference,
  SourceLine,
  map_leaves,
)
from rosetta_t5.config.t5x.paths import find_recipe, open_recipe
from rosetta_t5.config.t5x.retired_arguments import is_retired

# Programs that call gin's own parser can include recipes too.
gin.config.register_file_reader(open_recipe, lambda path: find_recipe(path) is not None)


@dataclasses.dataclass(frozen=True)
class BindOptions:
  """How to treat statements that cannot be bound.

  Attributes:
    skip_unknown: skip imports and bindings of names that do not exist: all, or only these names.
    problems: collects the errors.
  """

  skip_unknown: bool | Sequence[str] = False
  problems: Problems = dataclasses.field(default_factory=Problems)

  def may_skip(self, name: str) -> bool:
    """Returns whether `name` may be unknown."""
    return self.skip_unknown if isinstance(self.skip_unknown, bool) else name in self.skip_unknown


def bind(
  program: Program, options: BindOptions, function: Callable[..., Any] | None = None
) -> None:
  """Binds every statement in order: the files, then the command line.

  Args:
    program: the statements.
    options: how to treat statements that cannot be bound.
    function: the function that will run, if known. Gin files find it in `__main__`.
  """
  if gin.config_is_locked():  # by an earlier run of this process
    gin.clear_config()
  earlier = [namespace_of_run(function)] if function else []
  for file in program.files:
    _bind_file(file, earlier, options)


def _bind_file(file: GinFile, earlier: list[Namespace], options: BindOptions) -> None:
  """Binds one file's statements and adds its namespace to those of the earlier files."""
  namespace = Namespace(earlier)
  for statement in file.statements:
    with options.problems.collect():
      if isinstance(statement, GinFile):
        _bind_file(statement, earlier, options)
      elif isinstance(statement, Import):
        _import(statement, namespace, options)
      else:
        _bind_statement(statement, namespace, options)
  record_imports(namespace.imports)
  earlier.append(namespace)


def _bind_statement(statement: Binding, namespace: Namespace, options: BindOptions) -> None:
  """Sets one argument or macro."""
  with _adding_source(statement.source):
    if statement.macro is not None:
      key = (statement.macro, "gin.macro", "value")
    else:
      try:
        configurable = namespace.find(statement.selector)
      except ConfigError:
        if options.may_skip(statement.selector):
          return
        raise
      if is_retired(configurable.name, statement.argument):
        return
      check_argument(configurable, statement.argument)
      key = (statement.scope, configurable.selector, statement.argument)
    resolve = functools.partial(_as_gin_reference, namespace=namespace)
    gin.bind_parameter(key, map_leaves(resolve, statement.value))


def _as_gin_reference(value: Any, namespace: Namespace) -> Any:
  """Returns gin's own object for a reference or macro, and other values as they are."""
  match value:
    case Reference(evaluate=evaluate):
      *scopes, selector = value.name.split("/")
      full_name = "/".join([*scopes, namespace.find(selector).selector])
      return gin.config.ConfigurableReference(full_name, evaluate)
    case Macro(name=name):
      return gin.config.ParserDelegate().macro(name)
    case _:
      return value


def _import(statement: Import, namespace: Namespace, options: BindOptions) -> None:
  """Imports a module for one gin file."""
  module = statement.gin_statement.module
  try:
    namespace.add_import(statement.gin_statement)
  except ModuleNotFoundError as error:
    if not options.may_skip(module):
      raise ConfigError(f"{_missing_module_text(module, error)}\n  {statement.source}") from error
  except Exception as error:
    raise ConfigError(
      f"importing {module} failed: {type(error).__name__}: {error}\n"
      f"  {_last_line_of_user(error)}\n  {statement.source}"
    ) from error


def _missing_module_text(module: str, error: ModuleNotFoundError) -> str:
  missing = error.name or module
  if missing == "t5" or missing.startswith("t5."):
    return (
      "there is no module 't5'. Install it without its dependencies, which would replace seqio:\n"
      "  pip install 'rosetta-t5[t5]' && pip install --no-deps t5==0.9.4"
    )
  if not (module == missing or module.startswith(missing + ".")):
    return f"importing {module} needs the module {missing!r}: pip install {missing.split('.')[0]}"
  parent, _, name = missing.rpartition(".")
  folders = getattr(sys.modules.get(parent), "__path__", [])
  hint = did_you_mean(
    name, [found.name for found in pkgutil.iter_modules(folders)] if parent else []
  )
  return f"there is no module {missing!r}.{hint or ' Is its folder on PYTHONPATH?'}"


def _last_line_of_user(error: Exception) -> SourceLine:
  """Returns the last line of the traceback that is not in an installed package."""
  frames = traceback.extract_tb(error.__traceback__)
  installed = ("<frozen", *sysconfig.get_paths().values())
  own = [frame for frame in frames if not frame.filename.startswith(installed)]
  last = (own or frames)[-1]
  return SourceLine(last.filename, last.lineno or 0, last.line or "")


@contextlib.contextmanager
def _adding_source(source: SourceLine) -> Iterator[None]:
  """Adds the line to the text of any error in a statement."""
  try:
    yield
  except FollowOnError:
    raise
  except Exception as error:
    raise ConfigError(f"{error}\n  {source}") from error
