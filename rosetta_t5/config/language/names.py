"""Resolves names in gin files: which class `utils.DatasetConfig` is, and which arguments it accepts."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import gin
from gin import config_parser
from gin.config import Configurable

from rosetta_t5.config.language import gin_internals
from rosetta_t5.config.language.allow_list import check_import
from rosetta_t5.config.language.statements import Import, read_program
from rosetta_t5.config.t5x_surface import (
  RUN_FUNCTION_MODULES,
  T5X_RUN_ALIASES,
  find_run_function,
)
from rosetta_t5.user_errors import ConfigError, FollowOnError, did_you_mean

# Fields that flax adds to every module and that no recipe sets.
_FLAX_FIELDS = {"parent", "name"}


class Namespace:
  """The names that one gin file can use.

  A file with `from __gin__ import dynamic_registration` can use the names that it imports. Other
  files can use all functions and classes that are registered with gin. Both can also use the imports
  of earlier files, which include the files that they include. The command line comes after all files.

  Gin itself requires a file to import every name, unless an earlier file has used the name. That is
  why gin alone cannot bind some of T5X's own files.

  Args:
    earlier: the namespaces of the files before this one, the latest last.
  """

  def __init__(self, earlier: Sequence[Namespace] = ()):
    self._context = gin.config.ParseContext()
    self._modules: dict[str, ModuleType] = {}
    self._failed: set[str] = set()  # names whose import failed
    self._earlier = earlier
    self._is_dynamic = False

  @property
  def imports(self) -> list[config_parser.ImportStatement]:
    """The import statements so far."""
    return self._context.imports

  def add_import(self, statement: config_parser.ImportStatement) -> None:
    """Imports a module, if it is allowed, and makes its name usable."""
    name = statement.bound_name()
    self._failed.add(name)  # until the import has succeeded
    check_import(statement.module)
    self._context.process_import(statement)
    if statement.module == "__gin__.dynamic_registration":
      self._is_dynamic = True
    else:
      is_whole_name = statement.is_from or statement.alias  # `import a.b` binds only `a`
      self._modules[name] = sys.modules[statement.module if is_whole_name else name]
    self._failed.discard(name)

  def find(self, selector: str) -> Configurable:
    """Returns the function or class that `selector` names, registered with gin.

    Raises:
      ConfigError: there is none, or more than one.
    """
    if self._is_dynamic:
      return self._find_imported(selector)
    known = gin_internals.find_configurables(selector)
    if len(known) == 1:
      return known[0]
    # An earlier run in this process may have registered some of them: the files' imports decide.
    imported = self._find_in_earlier_files(selector)
    if len(imported) == 1:
      return imported[0]
    if known:
      raise _ambiguous(selector, known)
    first = selector.split(".")[0]
    if any(first in namespace._modules for namespace in [self, *self._earlier]):
      raise ConfigError(
        f"the import of {first!r} has no effect: its file must begin with\n"
        "  from __gin__ import dynamic_registration"
      )
    raise ConfigError(f"nothing is called {selector!r}.{did_you_mean(selector, _all_names())}")

  def _find_in_earlier_files(self, selector: str) -> list[Configurable]:
    """Returns the different objects that `selector` names in the earlier files.

    Raises:
      ConfigError: earlier files import the first part, but it does not have the rest.
    """
    first = selector.split(".")[0]
    namespaces = {
      id(n._modules[first]): n
      for n in reversed(self._earlier)
      if n._is_dynamic and first in n._modules
    }
    found: dict[str, Configurable] = {}
    first_error = None
    for namespace in namespaces.values():
      try:
        configurable = namespace._find_imported(selector)
        found[configurable.selector] = configurable
      except ConfigError as error:
        first_error = first_error or error
    if first_error and not found:
      raise first_error
    return list(found.values())

  def _find_imported(self, selector: str) -> Configurable:
    """Returns what a file with dynamic registration calls `selector`."""
    first, *rest = selector.split(".")
    if first == "gin":
      return self._context.get_configurable(selector)
    if first in self._failed:
      raise FollowOnError(f"{selector!r}: the import of {first!r} failed.")
    if first not in self._modules:
      return self._find_not_imported(selector)
    found: Any = self._modules[first]
    if found is sys.modules["__main__"] and rest and rest[0] in RUN_FUNCTION_MODULES:
      setattr(found, rest[0], find_run_function(rest[0]))
    for name in rest:
      if not hasattr(found, name):
        owner = getattr(found, "__name__", first)
        raise ConfigError(f"{owner} has no {name!r}.{did_you_mean(name, _public_names(found))}")
      found = getattr(found, name)
    try:
      return self._context.get_configurable(selector)
    except ValueError:
      # Another file has used this name, such as an alias, for another object.
      return gin_internals.register_under_own_module(found)

  def _find_not_imported(self, selector: str) -> Configurable:
    """Returns what earlier files call `selector`. This file does not import its first part."""
    first = selector.split(".")[0]
    found = self._find_in_earlier_files(selector)
    if len(found) > 1:
      raise _ambiguous(selector, found)
    if found:
      return found[0]
    if any(first in namespace._failed for namespace in self._earlier):
      raise FollowOnError(f"{selector!r}: the import of {first!r} failed.")
    rest = selector.split(".")[1:]
    if first in T5X_RUN_ALIASES and rest[0] in RUN_FUNCTION_MODULES:
      return gin_internals.register_under_own_module(find_run_function(rest[0]))
    hint = did_you_mean(first, self._modules) or f" Import it: from … import {first}"
    raise ConfigError(f"{selector!r}: this file imports nothing called {first!r}.{hint}")


def namespace_of_run(function: Callable[..., Any]) -> Namespace:
  """Registers `function` as what `import __main__ as train_script` finds.

  Under the console script, pytest and in a notebook, `__main__` is another module. Once the function
  is registered, `--gin.train.X` reaches it even if no gin file binds any of its arguments.
  """
  name = function.__name__
  setattr(sys.modules["__main__"], name, function)
  alias = ("eval" if name == "evaluate" else name) + "_script"
  imports = ["from __gin__ import dynamic_registration", f"import __main__ as {alias}"]
  if name == "train":
    # NVIDIA's scripts use te_helper in flags, but no gin file imports it.
    imports.append("from t5x import te_helper")
  namespace = Namespace()
  for statement in read_program([], imports, []).statements():
    if isinstance(statement, Import):
      namespace.add_import(statement.gin_statement)
  # If several functions have this name, the one that runs now takes it.
  gin_internals.unregister(function)
  with gin.config.interactive_mode():
    namespace.find(f"{alias}.{name}")
  return namespace


@contextlib.contextmanager
def temporary_run_function(function: Callable[..., Any]) -> Iterator[None]:
  """Lets gin files find `function` in `__main__` inside the `with`, and unregisters it afterwards."""
  main, name = vars(sys.modules["__main__"]), function.__name__
  before = {name: main[name]} if name in main else {}
  try:
    yield
  finally:
    gin_internals.unregister(function)
    main.pop(name, None)
    main.update(before)


def check_argument(configurable: Configurable, argument: str) -> None:
  """Raises ConfigError, with similar names, if `configurable` accepts no such argument."""
  signature = _signature(configurable)
  if signature is None or argument in signature.parameters:
    return
  if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
    return
  names = [name for name in parameters(configurable) if name not in _FLAX_FIELDS]
  raise ConfigError(
    f"{configurable.name} has no argument {argument!r}.{did_you_mean(argument, names)}\n"
    f"  its arguments: {', '.join(names)}"
  )


def parameters(configurable: Configurable) -> dict[str, inspect.Parameter]:
  """Returns the arguments of a function or class that gin can set, by name."""
  signature = _signature(configurable)
  found = signature.parameters if signature else {}
  return {n: p for n, p in found.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def defaults(configurable: Configurable) -> dict[str, Any]:
  """Returns the default values of the arguments that have one, by name."""
  return {
    name: p.default
    for name, p in parameters(configurable).items()
    if p.default is not p.empty and p.default is not gin.REQUIRED
  }


def bound_arguments(configurable: Configurable, scopes: Sequence[str] = ()) -> dict[str, Any]:
  """Returns the arguments that gin binds for a call in these scopes, references unresolved."""
  with gin.config_scope(list(scopes) or None):
    return gin.get_bindings(configurable.selector, resolve_references=False)


def _signature(configurable: Configurable) -> inspect.Signature | None:
  try:
    return inspect.signature(configurable.wrapped)
  except (TypeError, ValueError):  # some built-in callables have no signature
    return None


def _all_names() -> list[str]:
  """Returns the full name and the shortest unique name of everything registered, except gin's own."""
  known = [c for c in gin_internals.registered_configurables() if c.module != "gin"]
  return [c.selector for c in known] + [gin_internals.shortest_name(c.selector) for c in known]


def _ambiguous(selector: str, known: Sequence[Configurable]) -> ConfigError:
  choices = " or ".join(sorted(configurable.selector for configurable in known))
  return ConfigError(f"{selector!r} may mean {choices}: write one of them in full.")


def _public_names(module: Any) -> list[str]:
  return [name for name in dir(module) if not name.startswith("_")]
