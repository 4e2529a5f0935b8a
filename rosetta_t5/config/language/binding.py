"""Binds the statements of gin files and the command line, so that functions receive the values."""

import collections
import contextlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import gin
from gin.config import Configurable, ParseContext
from gin.config_parser import ImportStatement

from rosetta_t5.config import t5x_surface
from rosetta_t5.config.language import gin_internals, statements
from rosetta_t5.config.language.allow_list import check_binding, check_import
from rosetta_t5.user_errors import ConfigError, FollowOnError, Problems, did_you_mean

# Other programs may parse gin files with gin's own parser: their includes find the recipes too.
gin.config.register_file_reader(t5x_surface.open_recipe, t5x_surface.find_recipe)
_DYNAMIC = ImportStatement("__gin__.dynamic_registration", True, None, None)
# Fields that flax adds to every module and that no recipe sets.
_FLAX_FIELDS = {"parent", "name"}


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
  problems, names = Problems(), _Names(function)
  for statement in program.statements:
    found = []
    with (Problems() if _may_skip(statement, skip_unknown) else problems).collect(statement.source):
      found.append(names.resolve(statement))
    with problems.collect(statement.source):
      if found and isinstance(statement, statements.Binding):
        _bind_value(statement, found[0], names)
  return problems


def _may_skip(statement: Any, skip_unknown: bool | Sequence[str]) -> bool:
  if isinstance(skip_unknown, bool):
    return skip_unknown
  is_import = isinstance(statement, statements.Import)
  return (statement.gin_statement.module if is_import else statement.selector) in skip_unknown


def _bind_value(
  binding: statements.Binding, configurable: Configurable | None, names: "_Names"
) -> None:
  """Sets one argument, or a macro if `configurable` is None."""

  def as_gin_reference(leaf: Any) -> Any:
    match leaf:
      case statements.Reference(evaluate=evaluate):
        *scopes, selector = leaf.name.split("/")
        full_name = names.find(selector, binding.source.file).selector
        return gin.config.ConfigurableReference("/".join([*scopes, full_name]), evaluate)
      case statements.Macro(name=name):
        return gin.config.ParserDelegate().macro(name)
      case _:
        return leaf

  value = statements.map_leaves(as_gin_reference, binding.value)
  check_binding(configurable, value)
  if configurable is None:
    gin.bind_parameter((binding.macro, gin_internals.MACRO, "value"), value)
  elif (configurable.name, binding.argument) not in t5x_surface.RETIRED_ARGUMENTS:
    _check_argument(configurable, binding.argument)
    gin.bind_parameter((binding.scope, configurable.selector, binding.argument), value)


class _Names:
  """The modules that gin files import, by the names under which they import them.

  A name means what its own file imports, or else what the files before it import, or else a function or
  class that is registered with gin. (Gin itself requires each file to import every name, which T5X's own
  files do not always do.)

  Args:
    function: the function that runs; gin files find it in `__main__`.
  """

  def __init__(self, function: Callable[..., Any] | None):
    # By name and file. None: the import failed.
    self._imports: dict[str, dict[str, tuple[ParseContext, ModuleType] | None]]
    self._imports = collections.defaultdict(dict)
    name = function.__name__ if function else "train"
    script = f"{'eval' if name == 'evaluate' else name}_script"
    # One of T5X's files does not import `train_script`.
    for alias in (*t5x_surface.T5X_RUN_ALIASES, script):
      self.add_import(ImportStatement("__main__", False, alias, None), "")
    if function is None:
      return
    if name == "train":
      # NVIDIA's scripts use te_helper in flags, but no gin file imports it.
      self.add_import(ImportStatement("t5x.te_helper", True, None, None), "")
    # Under the console script, pytest and in a notebook, `__main__` is another module. Registered, the
    # function is reached by `--gin.train.X` even if no gin file binds any of its arguments. If several
    # functions have this name, the one that runs now takes it.
    setattr(sys.modules["__main__"], name, function)
    gin_internals.unregister(function)
    with gin.config.interactive_mode():
      self.find(f"{script}.{name}", "")

  def resolve(self, statement: statements.Import | statements.Binding) -> Configurable | None:
    """Imports a module, or returns what has the argument that a binding sets; None for a macro."""
    if isinstance(statement, statements.Import):
      self.add_import(statement.gin_statement, statement.source.file)
      return None
    is_macro = statement.macro is not None
    return None if is_macro else self.find(statement.selector, statement.source.file)

  def add_import(self, statement: ImportStatement, file: str) -> None:
    """Imports a module, if it is allowed, and makes its name usable in a file and those after it.

    Raises:
      ConfigError: the import fails.
    """
    if stand_in := t5x_surface.stand_in_of(statement.module):
      statement = statement._replace(module=stand_in, alias=statement.bound_name())
    if statement.module != _DYNAMIC.module:
      by_file = self._imports[statement.bound_name()]
      by_file[file] = None  # until the import has succeeded
      by_file[file] = _import_module(statement)
    if file:
      gin_internals.record_imports([statement])

  def find(self, selector: str, file: str) -> Configurable:
    """Returns the function or class that `selector` names in a file, registered with gin.

    Raises:
      ConfigError: there is none, or more than one.
    """
    first = selector.partition(".")[0]
    by_file = self._imports.get(first, {})
    errors: list[ConfigError] = []
    found = {}
    for imported in [by_file[file]] if file in by_file else by_file.values():
      try:
        if imported is None:
          raise FollowOnError(f"{selector!r}: the import of {first!r} failed.")
        configurable = _find_in_module(selector, *imported)
        found[configurable.selector] = configurable
      except ConfigError as error:
        errors.append(error)
    found = found or {c.selector: c for c in gin_internals.find_configurables(selector)}
    if len(found) > 1:
      choices = " or ".join(sorted(found))
      raise ConfigError(f"{selector!r} may mean {choices}: write one of them in full.")
    if not found:
      raise errors[0] if errors else ConfigError(self._unknown_text(selector))
    return next(iter(found.values()))

  def _unknown_text(self, selector: str) -> str:
    first = selector.partition(".")[0]
    hint = did_you_mean(first, self._imports)
    if first == selector:
      known = (c.selector for c in gin_internals.registered_configurables() if c.module != "gin")
      hint = hint or did_you_mean(selector, map(gin_internals.shortest_name, known))
    return f"nothing is called {selector!r}.{hint or f' Import it: from … import {first}'}"


def _import_module(statement: ImportStatement) -> tuple[ParseContext, ModuleType]:
  """Returns a context of gin in which only this import has been made, and the module that it binds."""
  module = statement.module
  check_import(module)
  context = ParseContext()
  context.process_import(_DYNAMIC)
  try:
    context.process_import(statement)
  except ModuleNotFoundError as error:
    raise ConfigError(_missing_module_text(module, error)) from error
  except Exception as error:
    kind, line = type(error).__name__, _last_line(error)
    raise ConfigError(f"importing {module} failed: {kind}: {error}\n  {line}") from error
  is_whole_name = statement.is_from or statement.alias  # `import a.b` binds only `a`
  return context, sys.modules[module if is_whole_name else statement.bound_name()]


def _find_in_module(selector: str, context: ParseContext, module: ModuleType) -> Configurable:
  """Returns the function or class that `selector` names, whose first part stands for `module`."""
  first, *rest = selector.split(".")
  if module is sys.modules["__main__"] and rest and rest[0] in t5x_surface.RUN_FUNCTION_MODULES:
    setattr(module, rest[0], t5x_surface.find_run_function(rest[0]))
  found: Any = module
  for name in rest:
    if not hasattr(found, name):
      public = [known for known in dir(found) if not known.startswith("_")]
      owner = getattr(found, "__name__", first)
      raise ConfigError(f"{owner} has no {name!r}.{did_you_mean(name, public)}")
    found = getattr(found, name)
  if not callable(found):
    raise ConfigError(f"{selector!r} is not a function or class")
  gin_internals.record_imports([_DYNAMIC])
  try:
    return context.get_configurable(selector)
  except ValueError:  # Another file has used this name, such as an alias, for another object.
    return gin_internals.register_under_own_module(found)


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


def _check_argument(configurable: Configurable, argument: str) -> None:
  """Raises ConfigError, with similar names, if `configurable` accepts no such argument."""
  known = _signature(configurable)
  if argument in known or any(p.kind is p.VAR_KEYWORD for p in known.values()):
    return
  names = [name for name in parameters(configurable) if name not in _FLAX_FIELDS]
  raise ConfigError(
    f"{configurable.name} has no argument {argument!r}.{did_you_mean(argument, names)}\n"
    f"  its arguments: {', '.join(names)}"
  )


def parameters(configurable: Configurable) -> dict[str, inspect.Parameter]:
  """Returns the arguments of a function or class that gin can set, by name."""
  known = _signature(configurable).items()
  return {n: p for n, p in known if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def defaults(configurable: Configurable) -> dict[str, Any]:
  """Returns the default values of the arguments that have one, by name."""
  return {
    name: p.default
    for name, p in parameters(configurable).items()
    if p.default is not p.empty and p.default is not gin.REQUIRED
  }


def bound_arguments(
  configurable: Configurable, scopes: Sequence[str] = (), resolve_references: bool = False
) -> dict[str, Any]:
  """Returns the arguments that gin binds for a call in these scopes, or what it passes if references are resolved."""
  with gin.config_scope(list(scopes) or None):
    return gin.get_bindings(configurable.selector, resolve_references)


def _signature(configurable: Configurable) -> dict[str, inspect.Parameter]:
  try:
    return dict(inspect.signature(configurable.wrapped).parameters)
  except (TypeError, ValueError):  # some built-in callables have no signature
    return {}
