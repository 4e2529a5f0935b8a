"""Looks gin's names up: which object `utils.DatasetConfig` is, and whether it takes an argument."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import gin
from gin import config_parser

from rosetta_t5.config.errors import ConfigError, FollowOnError, near
from rosetta_t5.config.language.unimported import StandIn, is_slow, is_stand_in, read_instead
from rosetta_t5.config.t5x.run_functions import RUN_MODES, SCRIPTS, find_script

_NO_LOCATION = config_parser.Location(None, 0, None, "")
_TURN_ON = config_parser.ImportStatement(
  "__gin__.dynamic_registration", is_from=True, alias=None, location=_NO_LOCATION
)
# What a flax module takes beside its own fields: no recipe sets these.
_FLAX_ARGUMENTS = {"parent", "name"}


class Names:
  """The names that one gin file can use: what it imports, or else what code has registered.

  A name may also be one that an earlier file imports (`others`, the latest last): what a file
  includes, what stands before it, and for the command line all files. Gin wants it to be imported
  in the file itself, or else used before, which users cannot see from outside; some of T5X's own
  files therefore do not bind there.

  With `read_slow`, modules that would import TensorFlow are read instead (see `unimported`).
  """

  def __init__(self, others: Sequence[Names] = (), read_slow: bool = False):
    self._context = gin.config.ParseContext()
    self._modules: dict[str, ModuleType] = {}
    self._failed: set[str] = set()
    self._others = others
    self._read_slow = read_slow
    self._dynamic = False

  @property
  def imports(self) -> list[config_parser.ImportStatement]:
    """The import statements so far."""
    return self._context.imports

  def add_import(self, statement: config_parser.ImportStatement) -> None:
    """Imports a module and makes its name usable."""
    read = self._read_slow and is_slow(statement.module)
    name = statement.bound_name()
    self._failed.add(name)  # until it is there
    with read_instead(statement.module) if read else contextlib.nullcontext():
      self._context.process_import(statement)
      if statement.module == _TURN_ON.module:
        self._dynamic = True
      else:
        is_whole_name = statement.is_from or statement.alias  # else `import a.b`, which binds a
        self._modules[name] = sys.modules[statement.module if is_whole_name else name]
    self._failed.discard(name)

  def find(self, selector: str) -> gin.config.Configurable:
    """Returns the object that `selector` names, registered with gin.

    Raises:
      ConfigError: there is none, or more than one.
    """
    if self._dynamic:
      return self._find_imported(selector)
    known = gin.config._REGISTRY.matching_selectors(selector)
    if len(known) == 1:
      return gin.config._REGISTRY[known[0]]
    # Of several, another program in this process, or a part of this one, may have registered some.
    elsewhere = self._find_elsewhere(selector)
    if len(elsewhere) == 1:
      return elsewhere[0]
    if known:
      raise _may_mean(selector, known)
    raise ConfigError(f"nothing is called {selector!r}.{near(selector, self._registered())}")

  def _find_elsewhere(self, selector: str) -> list[gin.config.Configurable]:
    """What `selector` names in the earlier files that import its first part; all that differ.

    Raises:
      ConfigError: some import the first part, and in none of them it has the rest.
    """
    first = selector.split(".")[0]
    modules = {
      id(n._modules[first]): n for n in reversed(self._others) if n._dynamic and first in n._modules
    }
    found: dict[str, gin.config.Configurable] = {}
    wrong = None
    for names in modules.values():
      try:
        configurable = names._find_imported(selector)
        found[configurable.selector] = configurable
      except ConfigError as error:
        wrong = wrong or error
    if wrong and not found:
      raise wrong
    return list(found.values())

  def _find_imported(self, selector: str) -> gin.config.Configurable:
    first, *rest = selector.split(".")
    if first == "gin":
      return self._context.get_configurable(selector)
    if first in self._failed:
      raise FollowOnError(f"{selector!r}: the import of {first!r} failed.")
    if first not in self._modules:
      elsewhere = self._find_elsewhere(selector)
      if len(elsewhere) > 1:
        raise _may_mean(selector, [configurable.selector for configurable in elsewhere])
      if elsewhere:
        return elsewhere[0]
      if any(first in names._failed for names in self._others):
        raise FollowOnError(f"{selector!r}: the import of {first!r} failed.")
      where = near(first, self._modules) or f" Import it: from … import {first}"
      raise ConfigError(f"{selector!r}: this file imports nothing called {first!r}.{where}")
    found: Any = self._modules[first]
    if found is sys.modules["__main__"] and rest and rest[0] in SCRIPTS:
      self._make_script(rest[0])
    for name in rest:
      if not hasattr(found, name):
        owner = getattr(found, "__name__", first)
        raise ConfigError(f"{owner} has no {name!r}.{near(name, _public(found))}")
      found = getattr(found, name)
    return self._context.get_configurable(selector)

  def _make_script(self, name: str) -> None:
    """Puts a run where `import __main__` finds it, whatever program `__main__` is."""
    main = sys.modules["__main__"]
    if self._read_slow and name not in RUN_MODES.values():
      if not is_stand_in(getattr(main, name, None)):
        setattr(main, name, getattr(StandIn(SCRIPTS[name]), name))
    elif not hasattr(main, name):
      setattr(main, name, find_script(name))

  def _registered(self) -> list[str]:
    """The names of everything registered, as short as they are unique."""
    registry = gin.config._REGISTRY
    complete = [selector for selector, _ in registry.items() if not selector.startswith("gin.")]
    return complete + [registry.minimal_selector(selector) for selector in complete]


def _may_mean(selector: str, known: Sequence[str]) -> ConfigError:
  choices = " or ".join(sorted(known))
  return ConfigError(f"{selector!r} may mean {choices}: write one of them in full.")


def run_script_names(function: Any) -> Names:
  """Makes `function` what `import __main__ as train_script` finds, and registers it.

  `__main__` is another program under the console script, under pytest, and in a notebook. Once
  registered, `--gin.train.X` reaches the function even if no gin file sets anything of it.
  """
  setattr(sys.modules["__main__"], function.__name__, function)
  names = Names()
  names.add_import(_TURN_ON)
  alias = {"evaluate": "eval"}.get(function.__name__, function.__name__) + "_script"
  names.add_import(
    config_parser.ImportStatement("__main__", is_from=False, alias=alias, location=_NO_LOCATION)
  )
  # Registered anew each time: of two functions of this name, the one to run now has it.
  gin.config._INVERSE_REGISTRY.pop(function, None)
  with gin.config.interactive_mode():
    names.find(f"{alias}.{function.__name__}")
  if function.__name__ == "train":
    # NVIDIA's scripts name it in flags while no gin file imports it.
    names.add_import(
      config_parser.ImportStatement(
        "t5x.te_helper", is_from=True, alias=None, location=_NO_LOCATION
      )
    )
  return names


def check_takes(configurable: gin.config.Configurable, argument: str) -> None:
  """Raises ConfigError, naming like ones, if `configurable` has no such argument."""
  if not gin.config._might_have_parameter(configurable.wrapper, argument):
    names = [name for name in parameters(configurable) if name not in _FLAX_ARGUMENTS]
    raise ConfigError(
      f"{configurable.name} has no argument {argument!r}.{near(argument, names)}\n"
      f"  its arguments: {', '.join(names)}"
    )


def parameters(configurable: gin.config.Configurable) -> dict[str, inspect.Parameter]:
  """The arguments of a function or class that gin may set, by name."""
  try:
    signature = inspect.signature(configurable.wrapped)
  except (TypeError, ValueError):  # some built-in callables have no signature
    return {}
  kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
  return {name: p for name, p in signature.parameters.items() if p.kind in kinds}


def _public(module: Any) -> list[str]:
  return [name for name in dir(module) if not name.startswith("_")]


@contextlib.contextmanager
def forgotten_afterwards(is_passing: Callable[[Any], bool]) -> Iterator[None]:
  """Inside a `with`, gin may find passing functions under `__main__`; afterwards the runs themselves.

  Args:
    is_passing: tells the functions that only stand in for a run or a part of it.
  """
  main = vars(sys.modules["__main__"])
  before = {name: main[name] for name in SCRIPTS if name in main}
  try:
    yield
  finally:
    for selector, configurable in list(gin.config._REGISTRY.items()):
      if is_passing(configurable.wrapped):
        gin.config._REGISTRY.pop(selector)
        gin.config._INVERSE_REGISTRY.pop(configurable.wrapped, None)
    for name in [name for name in SCRIPTS if is_passing(main.get(name))]:
      del main[name]
    main.update(before)
