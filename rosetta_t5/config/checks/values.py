"""Checks that the values of gin files have the right type."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from rosetta_t5.config.errors import ConfigError, FollowOnError
from rosetta_t5.config.language.gin_internals import configurable_of
from rosetta_t5.config.language.names import bound_arguments, parameters
from rosetta_t5.config.language.statements import Program, Reference

# Functions of gin_utils that only gin calls, for their value.
_CALCULATIONS = ("bool_fn", "steps_of", "string_split_fn", "sum_fn")
_INTEGER_ANNOTATIONS = ("int", "int | None")


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
  """Raises ConfigError for arguments of a run, such as total_steps, that must be integers."""
  configurable = configurable_of(function)
  bound = bound_arguments(configurable)
  lines = []
  for name, parameter in parameters(configurable).items():
    if name not in bound or parameter.annotation not in _INTEGER_ANNOTATIONS:
      continue
    try:
      value = copy.deepcopy(bound[name])  # gin calls @f() when it is copied
    except Exception:  # the run itself will report it
      continue
    if not isinstance(value, int | None):
      is_whole = isinstance(value, float) and value.is_integer()
      advice = f": write {int(value)}" if is_whole else ""
      lines.append(f"{function.__name__}.{name} must be an integer, got {value!r}{advice}")
  if lines:
    # It may be a consequence: a function without its parentheses has been reported already.
    raise FollowOnError("\n".join(lines))
