"""Likely mistakes in bindings: misspelt names, a missing `()`, numbers that must be integers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from rosetta_t5.config.language.gin_internals import configurable_of
from rosetta_t5.config.language.names import bound_arguments, parameters
from rosetta_t5.config.language.statements import COMMAND_LINE, Program, Reference, leaves
from rosetta_t5.telemetry.user_errors import ConfigError, FollowOnError, did_you_mean

# The similarity above which a name is taken for a misspelling, such as TRAIN_STEP of TRAIN_STEPS.
_SAME_NAME_SIMILARITY = 0.85
# Functions of gin_utils. They exist for the values that they return.
_CALCULATIONS = ("bool_fn", "steps_of", "string_split_fn", "sum_fn")
_INTEGER_ANNOTATIONS = ("int", "int | None")


def check_spelling(program: Program) -> None:
  """Raises ConfigError for a misspelt macro or scope on the command line.

  Gin would accept `--gin.TRAIN_STEP=5` as a new macro and `--gin.trian/…` as a new scope, and the run
  would ignore both.
  """
  values = (value for binding in program.all_bindings() for value in leaves(binding.value))
  scopes = {value.scope for value in values if isinstance(value, Reference)} - {""}
  macros = program.macros_used()
  for binding in program.all_bindings():
    if binding.source.file != COMMAND_LINE:
      continue
    if binding.macro is not None:
      kind, name, known = "macro", binding.macro, set(macros)
    else:
      kind, name, known = "scope", binding.scope, scopes
    is_unused = name and name not in known
    hint = did_you_mean(name, known, cutoff=_SAME_NAME_SIMILARITY) if is_unused else ""
    if hint:
      raise ConfigError(f"the {kind} {name!r} is never used.{hint}\n  {binding.source}")


def check_calls(program: Program) -> None:
  """Raises ConfigError if `()` is missing after a function of gin_utils that calculates a value."""
  lines = [
    f"{value} is the function itself: write {value}() for the value that it returns\n"
    f"  {binding.source}"
    for value, binding in program.values()
    if isinstance(value, Reference) and not value.evaluate and value.last_name in _CALCULATIONS
  ]
  if lines:
    raise ConfigError("\n".join(lines))


def check_integers(function: Callable[..., Any]) -> None:
  """Raises ConfigError if an argument of a run, such as total_steps, must be an integer but is not."""
  configurable = configurable_of(function)
  bound = bound_arguments(configurable)
  lines = []
  for name, parameter in parameters(configurable).items():
    if name not in bound or parameter.annotation not in _INTEGER_ANNOTATIONS:
      continue
    try:
      value = copy.deepcopy(bound[name])  # gin calls @f() when it is copied
    except Exception:  # building the argument for the run will report it
      continue
    if not isinstance(value, int | None):
      is_whole = isinstance(value, float) and value.is_integer()
      advice = f": write {int(value)}" if is_whole else ""
      lines.append(f"{function.__name__}.{name} must be an integer, got {value!r}{advice}")
  if lines:
    # A function without its parentheses is not an integer either, and has been reported already.
    raise FollowOnError("\n".join(lines))
