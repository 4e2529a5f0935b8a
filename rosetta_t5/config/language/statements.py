"""Reads gin files as statements with their file and line. Nothing that they name is imported."""

import dataclasses
import functools
import pathlib
import sys
import tokenize
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gin import config_parser

from rosetta_t5 import terminal
from rosetta_t5.config.t5x_surface import find_gin_file
from rosetta_t5.user_errors import ConfigError, Problems

COMMAND_LINE = "the command line"
_print_once = functools.cache(terminal.print_line)  # A run reads its gin files several times.


@dataclasses.dataclass(frozen=True)
class Reference:
  """`@scope/name`, or with `evaluate` `@scope/name()`."""

  name: str
  evaluate: bool

  def __repr__(self) -> str:
    return f"@{self.name}{'()' if self.evaluate else ''}"

  @property
  def scope(self) -> str:
    """The scope; "" if there is none."""
    return self.name.rpartition("/")[0]

  @property
  def last_name(self) -> str:
    """The name of the function or class without its scope and modules."""
    return self.name.rpartition("/")[2].rpartition(".")[2]


@dataclasses.dataclass(frozen=True)
class Macro:
  """`%NAME`."""

  name: str

  def __repr__(self) -> str:
    return f"%{self.name}"


@dataclasses.dataclass(frozen=True)
class SourceLine:
  """The line of a statement: its file as the user named it, its number and its text."""

  file: str
  line: int
  text: str

  def __str__(self) -> str:
    where = self.file if self.file == COMMAND_LINE else f"{self.file}, line {self.line}"
    return f"{where}:  {self.text.strip()}"


@dataclasses.dataclass(frozen=True)
class Import:
  """`import X` or `from X import Y`, as gin's parser represents it."""

  gin_statement: config_parser.ImportStatement
  source: SourceLine


@dataclasses.dataclass(frozen=True)
class Binding:
  """`scope/selector.argument = value`. If `argument` is "", it sets the macro `scope/selector`."""

  scope: str
  selector: str
  argument: str
  value: Any
  source: SourceLine

  @property
  def macro(self) -> str | None:
    """The name of the macro that this binding sets; None if it sets an argument."""
    if not self.argument:
      return f"{self.scope}/{self.selector}" if self.scope else self.selector
    is_macro = self.selector in ("macro", "gin.macro") and self.argument == "value"
    return self.scope if is_macro else None

  @property
  def name(self) -> str:
    """The text on the left of the equals sign."""
    return self.macro or f"{self.scope}{'/' if self.scope else ''}{self.selector}.{self.argument}"

  @property
  def key(self) -> tuple[str, ...]:
    """The macro, or scope, function and argument. The function's module is left out, because each
    file may import it under another name."""
    if self.macro is not None:
      return (self.macro,)
    return (self.scope, self.selector.rpartition(".")[2], self.argument)


@dataclasses.dataclass(frozen=True)
class Program:
  """The statements of gin files and of their includes, then those of the command line. Later ones win."""

  statements: tuple[Import | Binding, ...]

  def all_bindings(self) -> list[Binding]:
    """Returns every binding in the order in which they take effect."""
    return [s for s in self.statements if isinstance(s, Binding)]

  def effective_bindings(self) -> dict[tuple[str, ...], Binding]:
    """Returns, by key, the bindings that no later one replaces."""
    return {binding.key: binding for binding in self.all_bindings()}

  def values(self) -> Iterator[tuple[Any, Binding]]:
    """Yields the leaves (see `leaves`) of all effective bindings, each with its binding."""
    for binding in self.effective_bindings().values():
      yield from ((leaf, binding) for leaf in leaves(binding.value))

  def lines_with(self, text: str) -> list[SourceLine]:
    """Returns the line that sets the longest string that a message quotes, or no line."""
    found = {v: b.source for v, b in self.values() if isinstance(v, str) and v and repr(v) in text}
    return [found[max(found, key=len)]] if found else []

  def macros_used(self) -> dict[str, SourceLine]:
    """Returns the macros that effective bindings use, each with the line of its first use."""
    used: dict[str, SourceLine] = {}
    for value, binding in self.values():
      if isinstance(value, Macro):
        used.setdefault(value.name, binding.source)
    return used


def read_program(
  files: Sequence[str],
  bindings: Sequence[str] = (),
  search_paths: Sequence[str] = (".",),
  problems: Problems | None = None,
) -> Program:
  """Reads gin files, all files that they include, and the bindings of the command line.

  Args:
    files: gin files, each a path, or found in a search path or among the recipes.
    bindings: single statements.
    search_paths: folders.
    problems: where errors are collected; the program then lacks what could not be read. None to
      raise the errors.

  Raises:
    ConfigError: files are missing, include themselves, or have invalid syntax.
  """
  found = Problems() if problems is None else problems
  context = _IncludeContext(search_paths, found)
  statements = [s for name in files for s in _read_file(name, context)]
  statements += [s for text in bindings for s in _read_binding(text, context)]
  if problems is None:
    found.raise_if_any()
  return Program(tuple(statements))


def leaves(value: Any) -> Iterator[Any]:
  """Yields the leaves of nested dicts, lists and tuples, including the keys of dicts."""
  if isinstance(value, dict):
    value = [*value.keys(), *value.values()]
  if not isinstance(value, (list, tuple)):
    yield value
    return
  for item in value:
    yield from leaves(item)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
  """Returns nested dicts, lists and tuples with `function` applied to each leaf and key."""
  if isinstance(value, dict):
    return {map_leaves(function, k): map_leaves(function, v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return type(value)(map_leaves(function, item) for item in value)
  return function(value)


class _KeepNames(config_parser.ParserDelegate):
  """Makes gin's parser keep names as text. Its usual delegate would look them up."""

  def configurable_reference(self, name: str, evaluate: bool) -> Reference:
    return Reference(name, evaluate)

  def macro(self, name: str) -> Macro:
    return Macro(name)


@dataclasses.dataclass(frozen=True)
class _IncludeContext:
  """How to read a file, and the files that include it.

  Attributes:
    search_paths: folders.
    problems: where errors are collected.
    files: the files being read, outermost first.
    includes: their include statements, innermost first.
  """

  search_paths: Sequence[str]
  problems: Problems
  files: tuple[pathlib.Path, ...] = ()
  includes: tuple[SourceLine, ...] = ()


def _read_file(name: str, context: _IncludeContext) -> Iterator[Import | Binding]:
  """Yields the statements of a file up to its first invalid one. Errors are collected."""
  with context.problems.collect(*(f"included from {line}" for line in context.includes)):
    path = find_gin_file(name, context.search_paths)
    if path.resolve() in context.files:
      raise ConfigError("the file includes itself: remove one of the includes.")
    try:
      text = _read_folder(path) if path.is_dir() else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
      raise ConfigError(f"{path} cannot be read as a gin file: {error}") from error
    text = text.removeprefix("\ufeff")  # a byte-order mark
    inner = dataclasses.replace(context, files=(*context.files, path.resolve()))
    yield from _parse_statements(text, name, inner)


def _read_folder(path: pathlib.Path) -> str:
  """Returns the gin file of a Hugging Face folder, and prints what it does not follow."""
  from rosetta_t5.config.hugging_face_recipe import hugging_face_recipe  # imports SentencePiece

  try:
    text, notes = hugging_face_recipe(path.absolute())
  except ValueError as error:
    raise ConfigError(str(error)) from error
  for note in notes:
    _print_once(f"note: {path.name}: {note}", sys.stderr)
  return text


def _read_binding(text: str, context: _IncludeContext) -> list[Import | Binding]:
  with context.problems.collect():
    try:
      return list(_parse_statements(text, COMMAND_LINE, context))
    except ConfigError as error:
      name, _, value = (part.strip() for part in text.partition("="))
      bare = value.strip("‘’“”'\"")
      if not bare or value[0] in "@%[({" or {*"'\""} & {*bare}:
        raise
      constant = bare.capitalize()
      hint = f"a string needs quotes that the shell keeps: --gin.{name}=\"'{bare}'\""
      if constant in ("True", "False", "None"):
        hint = f"write --gin.{name}={constant}"
      raise ConfigError(f"{error}\n  {hint}") from error
  return []


def _parse_statements(text: str, name: str, context: _IncludeContext) -> Iterator[Import | Binding]:
  for parsed in _parse(text, name):
    if isinstance(parsed, config_parser.BlockDeclaration):
      continue  # each line of the block is a binding of its own
    source = SourceLine(name, parsed.location.line_num, parsed.location.line_content)
    if isinstance(parsed, config_parser.IncludeStatement):
      includes = (source, *context.includes)
      yield from _read_file(parsed.filename, dataclasses.replace(context, includes=includes))
    elif isinstance(parsed, config_parser.ImportStatement):
      yield Import(parsed, source)
    else:
      yield Binding(parsed.scope, parsed.selector, parsed.arg_name, parsed.value, source)


def _parse(text: str, name: str) -> Iterator[Any]:
  """Yields the statements of gin's own parser. Its syntax errors become ConfigErrors."""
  try:
    yield from config_parser.ConfigParser(text, _KeepNames())
  except RecursionError as error:
    raise ConfigError(f"{name} has a value that is nested too deeply: {error}") from error
  except (SyntaxError, tokenize.TokenError) as error:
    # Gin adds the token to Python's message, "malformed node or string: <ast.Name object at 0x…>".
    message = str(error.args[0]).splitlines()[-1].strip()
    number = error.lineno if isinstance(error, SyntaxError) else error.args[1][0]
    lines = text.splitlines() or [""]
    source = SourceLine(name, number or 0, lines[min(number or 1, len(lines)) - 1])
    is_list = source.text.strip().startswith(("from ", "import ")) and "," in source.text
    hint = "\n  gin imports one name per line" if is_list else ""
    raise ConfigError(f"invalid gin syntax: {message}\n  {source}{hint}") from error
