"""Reads, binds and checks a whole configuration, and returns the function that it configures."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import gin

from rosetta_t5.config import binding_checks
from rosetta_t5.config.command_line import CommandLine
from rosetta_t5.config.language import statements
from rosetta_t5.config.language.binding import bind, bound_arguments, defaults
from rosetta_t5.config.language.gin_internals import all_bindings, configurable_of
from rosetta_t5.config.language.statements import COMMAND_LINE, Binding, Program, SourceLine
from rosetta_t5.config.t5x_surface import is_recipe
from rosetta_t5.config.value_checks import check_values
from rosetta_t5.user_errors import ConfigError, Problems, strip_gin_notes, with_lines


def parse_gin_flags(
  gin_search_paths: Sequence[str],
  gin_files: Sequence[str],
  gin_bindings: Sequence[str],
  skip_unknown: bool | Sequence[str] = False,
  finalize_config: bool = True,
) -> None:
  """Parses gin files, then bindings; later ones win (T5X: gin_utils.parse_gin_flags).

  Args:
    gin_search_paths: folders that are searched for files and includes, before the recipes.
    gin_files: gin files, each absolute or found through the search paths.
    gin_bindings: single statements such as "BATCH_SIZE = 8".
    skip_unknown: skip imports and bindings of names that do not exist: all, or only these names.
    finalize_config: check that nothing required is missing, and lock the configuration.

  Raises:
    ConfigError: something is missing, misspelled or invalid. The text names the file and the line.
  """
  program = statements.read_program(gin_files, gin_bindings, gin_search_paths)
  if finalize_config:
    binding_checks.check_required(program)
    _bind_and_check(program, None, skip_unknown)
  else:
    bind(program, skip_unknown=skip_unknown).raise_if_any()


def configure(program: Program, function: Callable[..., Any]) -> Callable[..., Any]:
  """Binds a whole program, checks it, and returns `function` as gin configures it.

  Args:
    program: the statements.
    function: the function that will run.

  Raises:
    ConfigError: lists all that is wrong.
  """
  _bind_and_check(program, function)
  return gin.get_configurable(function)


def _bind_and_check(
  program: Program, function: Callable[..., Any] | None, skip_unknown: bool | Sequence[str] = False
) -> None:
  problems = bind(program, function, skip_unknown)
  check_bound(program, function, problems)
  problems.raise_if_any()
  gin.finalize()


def check_bound(program: Program, function: Callable[..., Any] | None, problems: Problems) -> None:
  """Collects what is misspelled, missing, or has a wrong type or range in a program that has been bound.

  Args:
    program: the statements.
    function: the function that will run, if known.
    problems: those of binding; those that are found here are added.

  Raises:
    ConfigError: a value needs itself, so nothing else can be checked.
  """
  all_bound = not problems.messages
  binding_checks.check_cycles(program)
  for check in (binding_checks.check_spelling, binding_checks.check_macros):
    with problems.collect():
      check(program)
  check_values(program, problems)
  # Arguments that could not be bound are not reported as missing too.
  if function is not None and all_bound:
    with problems.collect():
      binding_checks.check_arguments(program, function)


Rows = list[tuple[str, str]]


@dataclasses.dataclass
class ResolvedRun:
  """A run that is configured but not started.

  Attributes:
    function_name: the name of the function that would be called; "" if there is none.
    program: the gin files and the bindings of the command line.
    problems: all that is wrong. Later checks add to it.
    unused: the bindings of the user's own files and flags that nothing reads.
    unchecked: what could not be checked. Other checks add to it.
    devices: the number of devices that the run will have, if the command line specifies it.
    arguments: the arguments of the run that could be built.
    settings: for each argument that is a function or class to be called later, the arguments that gin
      will pass to it, including defaults.
  """

  function_name: str
  program: Program
  problems: Problems
  unused: list[Binding] = dataclasses.field(default_factory=list)
  unchecked: list[str] = dataclasses.field(default_factory=list)
  devices: int | None = None
  arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
  settings: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

  def source_of(self, argument: str) -> SourceLine | None:
    """Returns the line that sets an argument of the run, or a macro."""
    bindings = self.program.effective_bindings()
    found = bindings.get((argument,)) or bindings.get(("", self.function_name, argument))
    return found.source if found else None

  def require_run(self) -> None:
    """Adds a problem if there is no run, unless other problems may be the reason."""
    if not (self.function_name or self.problems.messages):
      self.problems.messages.append(binding_checks.missing_run_text())


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
  unused = _listing("binding", "never used", [str(binding.source) for binding in resolved.unused])
  if resolved.problems.messages:
    raise ConfigError(_paragraphs(str(resolved.problems), unused))
  width = max((len(name) for name, _ in rows), default=0)
  table = "\n".join(f"{name:{width}}  {text}" for name, text in rows)
  extent = " as far as it was checked" if resolved.unchecked else ""
  verdict = f"The configuration is valid{extent}."
  return _paragraphs(table, unused, _listing("value", "not checked", resolved.unchecked), verdict)


def resolve(command: CommandLine, function: Callable[..., Any] | None) -> ResolvedRun:
  """Reads, binds and builds all that a command line asks for. Errors are collected, not raised."""
  problems = Problems()
  program = command.read_program(problems)
  is_complete = not problems.messages
  with problems.collect():
    binding_checks.check_required(program)
  binding_problems = bind(program, function)
  if is_complete:
    check_bound(program, None if problems.messages else function, binding_problems)
  problems.messages += binding_problems.messages
  resolved = ResolvedRun(
    function_name=function.__name__ if function else "",
    program=program,
    problems=problems,
    devices=command.devices,
  )
  if function and not problems.messages:
    unused = binding_checks.unused_bindings(program, function)
    # A recipe also binds what another recipe replaces, such as the arguments of its optimizer.
    resolved.unused = [binding for binding in unused if not is_recipe(binding.source.file)]
  if all(binding.source.file == COMMAND_LINE for binding in program.all_bindings()):
    resolved.require_run()  # Files with bindings may be a part of a run, such as an optimizer.
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
        passed = bound_arguments(value.configurable, value.scopes, resolve_references=True)
        resolved.settings[name] = {**defaults(value.configurable), **passed}
    except Exception as error:
      resolved.arguments.pop(name, None)
      text = strip_gin_notes(str(error))
      if had_problems or text in str(resolved.problems):
        continue
      kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
      lines = resolved.program.lines_with(text) or filter(None, [resolved.source_of(name)])
      message = with_lines(f"{name} cannot be built: {kind}{text}", lines)
      resolved.problems.messages.append(message)


def _listing(noun: str, state: str, items: Sequence[str]) -> str:
  """Returns "2 bindings are never used:" and a line for each of them; "" if there are none."""
  lines = list(dict.fromkeys(items))
  if not lines:
    return ""
  head = f"{len(lines)} {noun}{'s are' if len(lines) > 1 else ' is'} {state}:"
  return "\n".join([head, *(f"  {line}" for line in lines)])


def _paragraphs(*texts: str) -> str:
  return "\n\n".join(text for text in texts if text)
