"""Modules that are read, not imported: their functions' names and arguments, without what they pull in.

A gin file that says `import seqio` brings TensorFlow, ten seconds and more. To check such a file, only
the names and arguments of SeqIO's functions are needed, and those stand in its source.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.machinery
import importlib.util
import inspect
import pathlib
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

# What imports TensorFlow, or is TensorFlow.
SLOW = frozenset({"seqio", "t5", "tensorflow", "tensorflow_datasets", "tensorflow_text"})
# Task modules of ours, which are made to import it at once.
_TASKS = "rosetta_t5.data.tasks."
# Ours, which are searched for such imports.
_OWN = frozenset({"rosetta_t5", "t5x"})


class NeedsImport(Exception):
  """What a function of a module that was only read would return is needed after all."""


class NotMade:
  """Stands for what a call would have returned, had its module been imported.

  Attributes:
    function: the function's or class's name, with its module's.
    arguments: what it was called with.
  """

  def __init__(self, function: str, arguments: Mapping[str, Any]):
    self.function = function
    self.arguments = dict(arguments)

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__"):  # copying and printing look for these, and do without
      raise AttributeError(name)
    raise NeedsImport(f"{name} of what {self.function} returns is needed")

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    raise NeedsImport(f"what {self.function} returns is called")

  def __repr__(self) -> str:
    given = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
    return f"{self.function}({given})"


def is_slow(module: str) -> bool:
  """Whether importing a module, now, would import TensorFlow: itself, or by way of one of ours."""
  seen: set[str] = set()
  unseen = [module]
  while unseen:
    name = unseen.pop()
    top = name.split(".")[0]
    if name in seen or name in sys.modules or not (top in SLOW or (top in _OWN and _exists(name))):
      continue
    if top in SLOW or name.startswith(_TASKS):
      return True
    seen.add(name)
    unseen += [m for node in _at_once(_body(name)) for m in _imported(node, name)]
  return False


def is_stand_in(value: Any) -> bool:
  """Whether a function, class or value stands for one of a module that was not imported."""
  return isinstance(value, NotMade) or bool(getattr(value, "is_stand_in", False))


@contextlib.contextmanager
def read_instead(module: str) -> Iterator[None]:
  """In this context an import of `module` finds a stand-in made from its source."""
  parts = module.split(".")
  names = [".".join(parts[: n + 1]) for n in range(len(parts))]
  missing = [name for name in names if name == module or is_slow(name)]
  try:
    for name in missing:
      sys.modules[name] = StandIn(name)
    yield
  finally:
    for name in missing:
      sys.modules.pop(name, None)


class StandIn(ModuleType):
  """A module whose functions and classes are known by name and arguments, and do nothing."""

  def __init__(self, name: str):
    super().__init__(name)
    self.__file__ = str(_source(name))  # raises ModuleNotFoundError
    self.__path__: list[str] = []  # a package too, so that `import a.b` is content with it
    # find_spec answers from here while this stands in sys.modules.
    self.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=self.__file__)

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__"):
      raise AttributeError(name)
    found = _find(self.__name__, name)
    if found is None:
      raise AttributeError(f"{self.__name__} has no {name!r}")
    setattr(self, name, found)
    return found

  def __dir__(self) -> Iterable[str]:
    return sorted(_names(self.__name__))


def submodules(package: str) -> list[str]:
  """The names of a package's modules, found without importing it; none if there is no such package."""
  if not _exists(package):
    return []
  return [module.name for module in pkgutil.iter_modules([str(_source(package).parent)])]


def _source(module: str) -> pathlib.Path:
  """The file of a module, found without importing the packages that it is in.

  Raises:
    ModuleNotFoundError: there is none.
  """
  top, *rest = module.split(".")
  spec = importlib.util.find_spec(top)
  if spec is None or spec.origin is None:
    raise ModuleNotFoundError(f"No module named {top!r}", name=top)
  path = pathlib.Path(spec.origin)
  for n, part in enumerate(rest, 2):
    found = [path.parent / part / "__init__.py", path.parent / f"{part}.py"]
    path = next((file for file in found if file.is_file()), pathlib.Path())
    if not path.name:
      name = ".".join(module.split(".")[:n])
      raise ModuleNotFoundError(f"No module named {name!r}", name=name)
  return path


@functools.cache
def _body(module: str) -> list[ast.stmt]:
  return ast.parse(_source(module).read_text(encoding="utf-8")).body


def _at_once(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
  """The statements that an import runs, but for `if TYPE_CHECKING`."""
  for node in statements:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
      continue
    yield node
    for inner in ("body", "orelse", "finalbody"):
      if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield from _at_once(getattr(node, inner, []))


def _imported(node: ast.stmt, module: str) -> list[str]:
  if isinstance(node, ast.Import):
    return [alias.name for alias in node.names]
  if isinstance(node, ast.ImportFrom):
    origin = _origin(node, module)
    return [origin, *(f"{origin}.{alias.name}" for alias in node.names)]
  return []


def _origin(node: ast.ImportFrom, module: str) -> str:
  """The module after `from`, relative ones made absolute."""
  if not node.level:
    return node.module or ""
  package = module if _source(module).name == "__init__.py" else module.rpartition(".")[0]
  for _ in range(node.level - 1):
    package = package.rpartition(".")[0]
  return f"{package}.{node.module}" if node.module else package


def _exists(module: str) -> bool:
  try:
    _source(module)
  except ModuleNotFoundError:
    return False
  return True


def _names(module: str) -> set[str]:
  """What a module defines or takes from others, as far as its text says."""
  names: set[str] = set()
  for node in _at_once(_body(module)):
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
      names.add(node.name)
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
      for alias in node.names:
        if alias.name != "*":
          names.add((alias.asname or alias.name).split(".")[0])
        elif isinstance(node, ast.ImportFrom) and _exists(_origin(node, module)):
          names |= _names(_origin(node, module))
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
      targets = node.targets if isinstance(node, ast.Assign) else [node.target]
      names |= {target.id for target in targets if isinstance(target, ast.Name)}
  return {name for name in names if not name.startswith("_")}


@functools.cache
def _find(module: str, name: str) -> Any:
  """What a module has under a name: a stand-in for a function, class, module or value; or None."""
  if _exists(f"{module}.{name}"):
    return StandIn(f"{module}.{name}")
  for node in _at_once(_body(module)):
    if isinstance(node, ast.Import) and name in (modules := _bound(node)):
      return StandIn(modules[name]) if _exists(modules[name]) else None
    found = _made_by(node, module, name)
    if found is not None:
      return found
  return NotMade(f"{module}.{name}", {}) if name in _names(module) else None


def _bound(node: ast.Import) -> dict[str, str]:
  """The names that `import …` binds, with the modules that they stand for."""
  top_levels = {alias.name.split(".")[0] for alias in node.names if not alias.asname}
  return {name: name for name in top_levels} | {a.asname: a.name for a in node.names if a.asname}


def _made_by(node: ast.stmt, module: str, name: str) -> Any:
  """What a statement makes of a name: a stand-in; None if it does nothing to it."""
  if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
    return _callable(node, module)
  if isinstance(node, ast.ImportFrom):
    return _find_imported(node, module, name)
  if isinstance(node, ast.Assign) and name in {ast.unparse(target) for target in node.targets}:
    return _find_assigned(node.value, module) or NotMade(f"{module}.{name}", {})
  return None


def _find_assigned(value: ast.expr, module: str) -> Any:
  """What `name = other` or `name = module.other` makes of the name."""
  *owner, name = ast.unparse(value).split(".")
  if not all(part.isidentifier() for part in (*owner, name)):
    return None
  found = _find(module, owner[0]) if owner else None
  return getattr(found, name, None) if len(owner) == 1 and isinstance(found, StandIn) else None


def _find_imported(node: ast.ImportFrom, module: str, name: str) -> Any:
  origin = _origin(node, module)
  for alias in node.names:
    if alias.name == "*" and _exists(origin):
      return _find(origin, name) if name in _names(origin) else None
    if name == (alias.asname or alias.name) and _exists(origin):
      return _find(origin, alias.name)
  return None


def _callable(node: ast.FunctionDef | ast.ClassDef, module: str) -> Any:
  """A function with the definition's name and arguments that returns `NotMade`."""
  full_name = f"{module}.{node.name}"

  def stand_in(*args: Any, **kwargs: Any) -> NotMade:
    return NotMade(full_name, {**{str(n): arg for n, arg in enumerate(args)}, **kwargs})

  stand_in.is_stand_in = True  # type: ignore[attr-defined]
  stand_in.__name__ = stand_in.__qualname__ = node.name
  stand_in.__module__ = module
  stand_in.__doc__ = ast.get_docstring(node)
  stand_in.__signature__ = inspect.Signature(_parameters(node, module))  # type: ignore[attr-defined]
  return stand_in


_ANY = [
  inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
  inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
]


def _parameters(node: ast.FunctionDef | ast.ClassDef, module: str) -> list[inspect.Parameter]:
  """The arguments of a function, or of a class's `__init__`; any, where that cannot be told."""
  if isinstance(node, ast.FunctionDef):
    return _of_function(node)
  for inner in node.body:
    if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
      return _of_function(inner)[1:]
  bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
  found = [_find(module, base) for base in bases] if not node.decorator_list else []
  signatures = [f.__signature__ for f in found if hasattr(f, "__signature__")]
  return list(signatures[0].parameters.values()) if signatures else _ANY


def _of_function(node: ast.FunctionDef) -> list[inspect.Parameter]:
  arguments = node.args
  positional = [*arguments.posonlyargs, *arguments.args]
  required = len(positional) - len(arguments.defaults)
  kinds = inspect.Parameter
  made = [
    kinds(a.arg, kinds.POSITIONAL_OR_KEYWORD, default=kinds.empty if n < required else ...)
    for n, a in enumerate(positional)
  ]
  if arguments.vararg:
    made.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
  made += [
    kinds(a.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else ...)
    for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
  ]
  if arguments.kwarg:
    made.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
  return made
