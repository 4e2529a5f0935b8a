"""Binds the statements of gin files and the command line, so that functions receive the values."""

from __future__ import annotations

import dataclasses
import pkgutil
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import gin
from gin.config import Configurable
from gin.config_parser import ImportStatement

from rosetta_t5.config.language import statements
from rosetta_t5.config.language.allow_list import check_binding
from rosetta_t5.config.language.gin_internals import record_imports
from rosetta_t5.config.language.names import Namespace, check_argument, namespace_of_run
from rosetta_t5.config.t5x_surface import RETIRED_ARGUMENTS, find_recipe, open_recipe
from rosetta_t5.user_errors import ConfigError, Problems, did_you_mean

# Other programs may parse gin files with gin's own parser: their includes find the recipes too.
gin.config.register_file_reader(open_recipe, find_recipe)


def bind(
  program: statements.Program,
  function: Callable[..., Any] | None = None,
  skip_unknown: bool | Sequence[str] = False,
) -> Problems:
  """Binds every statement in order: the files, then the command line. Returns the problems.

  Args:
    program: the statements.
    function: the function that will run, if known. Gin files find it in `__main__`.
    skip_unknown: skip imports and bindings of names that do not exist: all, or only these names.
  """
  if gin.config_is_locked():  # by an earlier run of this process
    gin.clear_config()
  binder = _Binder([namespace_of_run(function)] if function else [], skip_unknown)
  for file in program.files:
    binder.bind_file(file)
  return binder.problems


@dataclasses.dataclass
class _Binder:
  """Binds files one after another.

  Attributes:
    namespaces: the names that each file bound so far imports.
    skip_unknown: see `bind`.
    problems: the errors so far.
  """

  namespaces: list[Namespace]
  skip_unknown: bool | Sequence[str]
  problems: Problems = dataclasses.field(default_factory=Problems)

  def bind_file(self, file: statements.GinFile) -> None:
    """Binds a file and all files that it includes."""
    namespace = Namespace(self.namespaces)
    for statement in file.statements:
      if isinstance(statement, statements.GinFile):
        self.bind_file(statement)
        continue
      with self.problems.collect(statement.source):
        if isinstance(statement, statements.Import):
          self._import(statement.gin_statement, namespace)
        else:
          self._bind_value(statement, namespace)
    record_imports(namespace.imports)
    self.namespaces.append(namespace)

  def _import(self, statement: ImportStatement, namespace: Namespace) -> None:
    """Imports a module for one file."""
    try:
      namespace.add_import(statement)
    except ConfigError:
      raise
    except ModuleNotFoundError as error:
      if not self._may_skip(statement.module):
        raise ConfigError(_missing_module_text(statement.module, error)) from error
    except Exception as error:
      raise ConfigError(
        f"importing {statement.module} failed: {type(error).__name__}: {error}\n"
        f"  {_last_line(error)}"
      ) from error

  def _bind_value(self, binding: statements.Binding, namespace: Namespace) -> None:
    """Sets one argument or macro."""
    try:
      configurable = None if binding.macro is not None else self._find(binding, namespace)
      value = statements.map_leaves(lambda leaf: _as_gin_reference(leaf, namespace), binding.value)
      check_binding(configurable, value)
      if configurable is not None:
        check_argument(configurable, binding.argument)
        gin.bind_parameter((binding.scope, configurable.selector, binding.argument), value)
      elif binding.macro is not None:
        gin.bind_parameter((binding.macro, "gin.macro", "value"), value)
    except ConfigError:
      raise
    except Exception as error:  # one of gin's own
      raise ConfigError(str(error)) from error

  def _find(self, binding: statements.Binding, namespace: Namespace) -> Configurable | None:
    """Returns what has the argument that is set; None if the binding is to be skipped."""
    try:
      configurable = namespace.find(binding.selector)
    except ConfigError:
      if self._may_skip(binding.selector):
        return None
      raise
    is_retired = (configurable.name, binding.argument) in RETIRED_ARGUMENTS
    return None if is_retired else configurable

  def _may_skip(self, name: str) -> bool:
    return self.skip_unknown if isinstance(self.skip_unknown, bool) else name in self.skip_unknown


def _as_gin_reference(value: Any, namespace: Namespace) -> Any:
  """Returns gin's own object for a reference or macro, and other values as they are."""
  match value:
    case statements.Reference(evaluate=evaluate):
      *scopes, selector = value.name.split("/")
      full_name = "/".join([*scopes, namespace.find(selector).selector])
      return gin.config.ConfigurableReference(full_name, evaluate)
    case statements.Macro(name=name):
      return gin.config.ParserDelegate().macro(name)
    case _:
      return value


def _missing_module_text(module: str, error: ModuleNotFoundError) -> str:
  """Returns which module is missing, `module` or one that it imports, and how to get it."""
  missing = error.name or module
  if missing == "t5" or missing.startswith("t5."):
    return (
      "there is no module 't5'. Install it without its dependencies, which would replace seqio:\n"
      "  pip install 'rosetta-t5[t5]' && pip install --no-deps t5==0.9.4"
    )
  if not (module == missing or module.startswith(missing + ".")):
    return (
      f"importing {module} needs the module {missing!r}, which was not found: install the package that "
      "provides it, or add its folder to PYTHONPATH"
    )
  parent, _, name = missing.rpartition(".")
  folders = getattr(sys.modules.get(parent), "__path__", [])
  hint = did_you_mean(name, [module.name for module in pkgutil.iter_modules(folders)])
  return f"there is no module {missing!r}.{hint or ' Is its folder on PYTHONPATH?'}"


def _last_line(error: Exception) -> str:
  """Returns the last line of the traceback whose text is known."""
  last = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.line][-1]
  return str(statements.SourceLine(last.filename, last.lineno or 0, last.line or ""))
