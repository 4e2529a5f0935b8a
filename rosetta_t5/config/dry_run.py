"""Resolves a configuration without running it: reports all problems, or what would run."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import gin

from rosetta_t5.config.checks.completeness import check_required
from rosetta_t5.config.checks.references import unused_bindings
from rosetta_t5.config.command_line import CommandLine
from rosetta_t5.config.configuration import check_bound
from rosetta_t5.config.language.binding import bind
from rosetta_t5.config.language.gin_internals import all_bindings, configurable_of
from rosetta_t5.config.language.names import bound_arguments, defaults
from rosetta_t5.config.language.statements import Binding, Program, SourceLine
from rosetta_t5.telemetry.user_errors import ConfigError, Problems, strip_gin_notes

Rows = list[tuple[str, str]]


@dataclasses.dataclass
class ResolvedRun:
  """A run that is configured but not started.

  Attributes:
    run: the name of the function that would be called; "" if there is none.
    program: the gin files and the bindings of the command line.
    problems: all that is wrong. Later checks add to it.
    unused: the bindings that nothing reads.
    devices: the number of devices that the run will have, if the command line specifies it.
    arguments: the arguments of the run that could be built.
    settings: for each argument that is a function or class to be called later, the arguments that gin
      will pass to it, including defaults.
  """

  run: str
  program: Program
  problems: Problems
  unused: list[Binding]
  devices: int | None = None
  arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
  settings: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

  def source_of(self, argument: str) -> SourceLine | None:
    """Returns the line that sets an argument of the run, or a macro."""
    bindings = self.program.effective_bindings()
    found = bindings.get((argument,)) or bindings.get(("", self.run, argument))
    return found.source if found else None


def dry_run(
  command: CommandLine,
  function: Callable[..., Any] | None,
  describe: Callable[[ResolvedRun], Rows] | None = None,
) -> str:
  """Returns a description of what a command line would run.

  Args:
    command: the command line.
    function: the run function; None if the gin files bind none.
    describe: returns a description of the resolved run, and adds to its problems.

  Raises:
    ConfigError: lists all that is wrong.
  """
  try:
    resolved = resolve(command, function)
    rows = describe(resolved) if describe else []
  finally:
    gin.clear_config()  # a run in this process starts afresh
  unused = _unused_text(resolved.unused)
  if resolved.problems.messages:
    raise ConfigError(_paragraphs(str(resolved.problems), unused))
  width = max((len(name) for name, _ in rows), default=0)
  table = "\n".join(f"{name:{width}}  {text}" for name, text in rows)
  return _paragraphs(table, unused, "Nothing is wrong.")


def resolve(command: CommandLine, function: Callable[..., Any] | None) -> ResolvedRun:
  """Reads, binds and builds all that a command line asks for. Errors are collected, not raised."""
  problems = Problems()
  program = command.read_program(problems)
  is_complete = not problems.messages
  with problems.collect():
    check_required(program)
  binding_problems = bind(program, function)
  if is_complete:
    check_bound(program, None if problems.messages else function, binding_problems)
  problems.messages += binding_problems.messages
  resolved = ResolvedRun(
    run=function.__name__ if function else "",
    program=program,
    problems=problems,
    unused=unused_bindings(program, function) if function and not problems.messages else [],
    devices=command.devices,
  )
  if not binding_problems.messages:
    _build(resolved, function)
  return resolved


def _build(resolved: ResolvedRun, function: Callable[..., Any] | None) -> None:
  """Builds the arguments of the run one by one; without a run, only the model."""
  if function is None:
    model = all_bindings().get(("MODEL", "gin.macro"))
    values = {"model": model["value"]} if model else {}
  else:
    configurable = configurable_of(function)
    values = bound_arguments(configurable)
    resolved.arguments = defaults(configurable)
  # If a value is missing, which has been reported, the arguments that need it cannot be built.
  had_problems = bool(resolved.problems.messages)
  for name, value in values.items():
    try:
      resolved.arguments[name] = copy.deepcopy(value)  # gin calls @f() when it is copied
      if isinstance(value, gin.config.ConfigurableReference) and not value.evaluate:
        resolved.settings[name] = _settings(value)
    except Exception as error:
      resolved.arguments.pop(name, None)
      if not had_problems:
        message = _build_error_text(name, error, resolved.source_of(name))
        resolved.problems.messages.append(message)


def _settings(reference: gin.config.ConfigurableReference) -> dict[str, Any]:
  """Returns what gin will pass to a function that is passed on uncalled."""
  configurable = reference.configurable
  with gin.config_scope(reference.scopes or None):
    return {**defaults(configurable), **gin.get_bindings(configurable.selector)}


def _build_error_text(name: str, error: Exception, source: SourceLine | None) -> str:
  kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
  where = f"\n  {source}" if source else ""
  return f"{name} cannot be built: {kind}{strip_gin_notes(str(error))}{where}"


def _unused_text(unused: list[Binding]) -> str:
  if not unused:
    return ""
  head = f"{len(unused)} binding{'s are' if len(unused) > 1 else ' is'} never used:"
  return "\n".join([head, *(f"  {binding.source}" for binding in unused)])


def _paragraphs(*texts: str) -> str:
  return "\n\n".join(text for text in texts if text)
