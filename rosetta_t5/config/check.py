"""Resolves a configuration without running it: all that is wrong, and what would be run."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import gin

from rosetta_t5.config.checks.completeness import check_required
from rosetta_t5.config.checks.unused import unused_bindings
from rosetta_t5.config.command_line import CommandLine
from rosetta_t5.config.errors import ConfigError, Problems, gin_notes_cut
from rosetta_t5.config.language.binding import How, bind, check_bound
from rosetta_t5.config.language.names import forgotten_afterwards, parameters
from rosetta_t5.config.language.statements import Binding, Import, Place, Program, read_program
from rosetta_t5.config.language.unimported import NeedsImport, is_slow, is_stand_in

Rows = list[tuple[str, str]]


@dataclasses.dataclass
class Resolved:
  """A run as it is configured, and not begun.

  Attributes:
    run: the name of what would be called; "" if nothing would.
    arguments: what it would be called with, as far as that could be built.
    settings: for an argument that is a function or class to be called later, the arguments that gin
      will give it, defaults among them.
    program: the gin files.
    problems: what is wrong; whoever looks further adds to it.
    unused: bindings that nothing reads.
    read: modules that were read instead of imported, because they would import TensorFlow.
    devices: how many devices the run will have, if that was said.
  """

  run: str
  arguments: dict[str, Any]
  settings: dict[str, dict[str, Any]]
  program: Program
  problems: Problems
  unused: list[Binding]
  read: list[str]
  devices: int | None = None

  def place(self, argument: str) -> Place | None:
    """Where an argument of the run, or a macro, is set."""
    for binding in self.program.in_force():
      if binding.macro == argument or binding.key == ("", self.run, argument):
        return binding.place
    return None


def check(
  command: CommandLine,
  function: Callable[..., Any] | None,
  describe: Callable[[Resolved], Rows] | None = None,
) -> str:
  """Returns what a command line would run, in words.

  Modules that would import TensorFlow are read instead of imported, unless what they make is needed.

  Args:
    command: the command line.
    function: the run; None if the gin files name none.
    describe: tells what a resolved run is, and adds to its problems.

  Raises:
    ConfigError: with all that is wrong.
  """
  try:
    return _check(command, function, describe, read_slow=True)
  except NeedsImport:
    return _check(command, function, describe, read_slow=False)


def _check(
  command: CommandLine,
  function: Callable[..., Any] | None,
  describe: Callable[[Resolved], Rows] | None,
  read_slow: bool,
) -> str:
  try:
    # Nothing is left behind, so that a run in this process starts anew.
    with forgotten_afterwards(is_stand_in):
      resolved = resolve(command, function, read_slow)
      rows = describe(resolved) if describe else []
  finally:
    gin.clear_config()
  if resolved.problems.texts:
    raise ConfigError(_problems_text(resolved))
  return _text(resolved, rows)


def resolve(
  command: CommandLine, function: Callable[..., Any] | None, read_slow: bool = False
) -> Resolved:
  """Reads, binds and builds all that a command line asks for; what is wrong is noted, not raised."""
  problems = Problems()
  program = read_program(command.gin_file, command.gin_bindings, command.gin_search_paths, problems)
  all_read = not problems.texts
  with problems.noted():
    check_required(program)
  bound = Problems()
  slow = [m for m in _modules(program) if is_slow(m)] if read_slow else []
  bind(program, How(problems=bound, read_slow=read_slow), function)
  if all_read:
    check_bound(program, function if not problems.texts else None, bound)
  problems.texts += bound.texts
  resolved = Resolved(
    run=function.__name__ if function else "",
    arguments={},
    settings={},
    program=program,
    problems=problems,
    unused=unused_bindings(program, function) if function and not problems.texts else [],
    read=slow,
    devices=command.devices,
  )
  if not bound.texts:
    _build(resolved, function)
  return resolved


def _modules(program: Program) -> list[str]:
  return [s.statement.module for s in program.statements() if isinstance(s, Import)]


def _build(resolved: Resolved, function: Callable[..., Any] | None) -> None:
  """Builds the run's arguments one by one; or, without a run, the model."""
  if function is None:
    model = gin.config._CONFIG.get(("MODEL", "gin.macro"))
    values = {"model": model["value"]} if model else {}
  else:
    configurable = gin.config._INVERSE_REGISTRY[function]
    values = gin.config._get_bindings(configurable.selector)
    given = parameters(configurable)
    resolved.arguments = {
      name: p.default for name, p in given.items() if p.default not in (p.empty, gin.REQUIRED)
    }
  told = bool(resolved.problems.texts)
  for name, value in values.items():
    try:
      resolved.arguments[name] = copy.deepcopy(value)  # gin calls @f() when it is copied
      if isinstance(value, gin.config.ConfigurableReference) and not value.evaluate:
        resolved.settings[name] = _settings(value)
    except NeedsImport:
      raise
    except Exception as error:
      resolved.arguments.pop(name, None)
      # What is missing, and has been told, is in the way.
      if not told:
        resolved.problems.texts.append(_building_failed(name, error, resolved.place(name)))


def _settings(reference: Any) -> dict[str, Any]:
  """What gin will give a function that is handed on uncalled."""
  given = parameters(reference.configurable)
  defaults = {name: p.default for name, p in given.items() if p.default is not p.empty}
  scopes = reference.scopes or []
  with gin.config_scope(scopes or None):
    bound = gin.config._get_bindings(reference.configurable.selector, scope_components=scopes)
    return {**defaults, **copy.deepcopy(bound)}


def _building_failed(name: str, error: Exception, place: Place | None) -> str:
  kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
  where = f"\n  {place}" if place else ""
  return f"{name} cannot be made: {kind}{gin_notes_cut(str(error))}{where}"


def _problems_text(resolved: Resolved) -> str:
  texts = resolved.problems.texts
  head = texts[0] if len(texts) == 1 else f"{len(texts)} problems\n\n{resolved.problems}"
  return "\n\n".join([head, *_unused_text(resolved)])


def _unused_text(resolved: Resolved) -> list[str]:
  if not resolved.unused:
    return []
  count = len(resolved.unused)
  head = f"{count} binding{'s are' if count > 1 else ' is'} used by nothing:"
  return ["\n".join([head, *(f"  {binding.place}" for binding in resolved.unused)])]


def _text(resolved: Resolved, rows: Rows) -> str:
  width = max((len(name) for name, _ in rows), default=0)
  table = "\n".join(f"{name:{width}}  {text}" for name, text in rows)
  return "\n\n".join([*([table] if table else []), *_unused_text(resolved), "Nothing is wrong."])
