"""Whether what gin files give is of the kind that is meant."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import gin

from rosetta_t5.config.errors import ConfigError, FollowOnError
from rosetta_t5.config.language.names import parameters
from rosetta_t5.config.language.statements import Place, Program, Reference, leaves

# Functions of gin_utils that nobody calls but gin.
_CALCULATING = ("bool_fn", "steps_of", "string_split_fn", "sum_fn")
_WHOLE = ("int", "int | None")


def check_calls(program: Program) -> None:
  """Raises ConfigError for functions that only calculate, where `()` is missing after their name."""
  lines = [
    f"@{name} is the function itself: write @{name}() for what it returns\n  {place}"
    for name, place in _uncalled(program)
  ]
  if lines:
    raise ConfigError("\n".join(lines))


def _uncalled(program: Program) -> Iterator[tuple[str, Place]]:
  for binding in program.in_force():
    for value in leaves(binding.value):
      if not isinstance(value, Reference) or value.evaluate:
        continue
      if value.name.rsplit(".", 1)[-1] in _CALCULATING:
        yield value.name, binding.place


def check_whole_numbers(function: Callable[..., Any]) -> None:
  """Raises ConfigError for arguments of a run, such as total_steps, that are to be whole and are not."""
  configurable = gin.config._INVERSE_REGISTRY[function]
  bound = gin.config._get_bindings(configurable.selector)
  lines = []
  for name, parameter in parameters(configurable).items():
    if name not in bound or parameter.annotation not in _WHOLE:
      continue
    try:
      value = copy.deepcopy(bound[name])  # gin calls @f() when it is copied
    except Exception:  # The run will tell.
      continue
    if not isinstance(value, int | None):
      whole = isinstance(value, float) and value.is_integer()
      advice = f": write {int(value)}" if whole else ""
      lines.append(f"{function.__name__}.{name} = {value!r} is no whole number{advice}")
  if lines:
    raise FollowOnError("\n".join(lines))  # of a function that is not called, perhaps
