"""Gin files as statements that know their file and line, read before anything is imported."""

from __future__ import annotations

import dataclasses
import io
import tokenize
from collections.abc import Iterator, Sequence
from typing import Any

from gin import config_parser

from rosetta_t5.config.errors import ConfigError, Problems
from rosetta_t5.config.t5x.paths import find_gin_file

COMMAND_LINE = "the command line"


@dataclasses.dataclass(frozen=True)
class Reference:
  """`@scope/name`, or with `evaluate` `@scope/name()`."""

  name: str
  evaluate: bool


@dataclasses.dataclass(frozen=True)
class Macro:
  """`%NAME`."""

  name: str


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a statement stands: the file as it was named, the line's number, its text."""

  file: str
  line: int
  text: str

  def __str__(self) -> str:
    where = self.file if self.file == COMMAND_LINE else f"{self.file}, line {self.line}"
    return f"{where}:  {self.text.strip()}"


@dataclasses.dataclass(frozen=True)
class Import:
  """`import X` or `from X import Y`, as gin's own parser holds it."""

  statement: config_parser.ImportStatement
  place: Place


@dataclasses.dataclass(frozen=True)
class Binding:
  """`scope/selector.argument = value`; without an argument it sets the macro `scope/selector`."""

  scope: str
  selector: str
  argument: str
  value: Any
  place: Place

  @property
  def macro(self) -> str | None:
    """The name of the macro that this sets, if it sets one."""
    if not self.argument:
      return f"{self.scope}/{self.selector}" if self.scope else self.selector
    is_macro = self.selector in ("macro", "gin.macro") and self.argument == "value"
    return self.scope if is_macro else None

  @property
  def name(self) -> str:
    """What this sets, as it would be written on the left of the equals sign."""
    return self.macro or f"{self.scope}{'/' if self.scope else ''}{self.selector}.{self.argument}"

  @property
  def key(self) -> tuple[str, ...]:
    """The same for two bindings of one thing, whatever its module is called in their files."""
    if self.macro is not None:
      return (self.macro,)
    return (self.scope, self.selector.rsplit(".", 1)[-1], self.argument)


@dataclasses.dataclass(frozen=True)
class GinFile:
  """One file: its statements in order, included files in their places."""

  statements: tuple[Import | Binding | GinFile, ...]


@dataclasses.dataclass(frozen=True)
class Program:
  """What the command line asks for: gin files, then bindings, later ones winning."""

  files: tuple[GinFile, ...]
  bindings: GinFile

  def statements(self) -> Iterator[Import | Binding]:
    """Yields every import and binding in the order in which it takes effect."""
    for file in (*self.files, self.bindings):
      yield from _flat(file)

  def bindings_in_order(self) -> Iterator[Binding]:
    """Yields every binding in the order in which it takes effect."""
    yield from (s for s in self.statements() if isinstance(s, Binding))

  def in_force(self) -> list[Binding]:
    """The bindings that no later one replaces."""
    return list({binding.key: binding for binding in self.bindings_in_order()}.values())

  def macros_used(self) -> dict[str, Place]:
    """The macros that bindings in force use, each with the place of the first use."""
    uses = ((value, b.place) for b in self.in_force() for value in leaves(b.value))
    used: dict[str, Place] = {}
    for value, place in uses:
      if isinstance(value, Macro):
        used.setdefault(value.name, place)
    return used


def read_program(
  files: Sequence[str],
  bindings: Sequence[str],
  search_paths: Sequence[str],
  problems: Problems | None = None,
) -> Program:
  """Reads gin files, all that they include, and the command line's bindings.

  Args:
    files: gin files, each as it stands, or found in a search path or among the recipes.
    bindings: single statements.
    search_paths: folders.
    problems: takes what is wrong, and what can be read is returned; None to raise it.

  Raises:
    ConfigError: files are missing, include themselves, or are no valid gin.
  """
  found = Problems() if problems is None else problems
  way = _Way(search_paths, found)
  read = tuple(_read_file(name, way) for name in files)
  on_command_line = [s for text in bindings for s in _read_binding(text, way)]
  if problems is None:
    found.refuse()
  return Program(read, GinFile(tuple(on_command_line)))


def leaves(value: Any) -> Iterator[Any]:
  """Yields what a value holds, down through dicts, lists and tuples."""
  if isinstance(value, dict):
    value = [*value.keys(), *value.values()]
  if not isinstance(value, (list, tuple)):
    yield value
    return
  for item in value:
    yield from leaves(item)


def _flat(file: GinFile) -> Iterator[Import | Binding]:
  for statement in file.statements:
    if isinstance(statement, GinFile):
      yield from _flat(statement)
    else:
      yield statement


class _KeepNames(config_parser.ParserDelegate):
  """Leaves names as names, where gin's own delegate would look them up."""

  def configurable_reference(self, name: str, evaluate: bool) -> Reference:
    return Reference(name, evaluate)

  def macro(self, name: str) -> Macro:
    return Macro(name)


@dataclasses.dataclass(frozen=True)
class _Way:
  """How a file was come by: from which files, by which include statements, the innermost first."""

  search_paths: Sequence[str]
  problems: Problems
  files: tuple[str, ...] = ()
  includes: tuple[Place, ...] = ()

  def included(self, place: Place) -> _Way:
    return dataclasses.replace(self, includes=(place, *self.includes))


def _read_file(name: str, way: _Way) -> GinFile:
  """Reads a file as far as it can be read; what is wrong is noted."""
  statements = []
  with way.problems.noted(*(f"included from {place}" for place in way.includes)):
    path = find_gin_file(name, way.search_paths)
    if str(path.resolve()) in way.files:
      raise ConfigError("the file includes itself: remove one of the includes.")
    inner = dataclasses.replace(way, files=(*way.files, str(path.resolve())))
    for statement in _statements(path.read_text(encoding="utf-8"), name, inner):
      statements.append(statement)
  return GinFile(tuple(statements))


def _read_binding(text: str, way: _Way) -> list[Import | Binding | GinFile]:
  with way.problems.noted():
    try:
      return list(_statements(text, COMMAND_LINE, way))
    except ConfigError as error:
      name, _, value = (part.strip() for part in text.partition("="))
      if not value or value[0] in "'\"@%[({":
        raise
      raise ConfigError(
        f"{error}\n  text needs quotes that the shell leaves in place: --gin.{name}=\"'{value}'\""
      ) from error
  return []


def _statements(text: str, name: str, way: _Way) -> Iterator[Import | Binding | GinFile]:
  """Yields the statements of `text`, included files in their places."""
  for statement in _parse(text, name):
    if isinstance(statement, config_parser.BlockDeclaration):
      continue  # each line of the block is a binding of its own
    place = Place(name, statement.location.line_num, statement.location.line_content)
    if isinstance(statement, config_parser.IncludeStatement):
      yield _read_file(statement.filename, way.included(place))
    elif isinstance(statement, config_parser.ImportStatement):
      yield Import(statement, place)
    else:
      yield Binding(statement.scope, statement.selector, statement.arg_name, statement.value, place)


def _parse(text: str, name: str) -> Iterator[Any]:
  """Yields gin's own statements, its syntax errors turned into ours."""
  try:
    yield from config_parser.ConfigParser(io.StringIO(text), _KeepNames())
  except SyntaxError as error:
    place = Place(name, error.lineno or 0, error.text or "")
    is_list = place.text.strip().startswith(("from ", "import ")) and "," in place.text
    hint = "\n  gin imports one name a line" if is_list else ""
    raise ConfigError(f"this is no valid gin: {error.msg}\n  {place}{hint}") from error
  except tokenize.TokenError as error:
    message, (line, _) = error.args
    lines = text.splitlines() or [""]
    place = Place(name, line, lines[min(line, len(lines)) - 1])
    raise ConfigError(f"this is no valid gin: {message}\n  {place}") from error
