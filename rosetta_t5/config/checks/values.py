"""Checks the type and the range of every value that gin binds to an argument."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import typing
from collections.abc import Iterator
from typing import Annotated, Any

import gin
from gin.config import Configurable, ConfigurableReference

from rosetta_t5.argument_types import NonNegativeNumber, PositiveNumber, PositiveRate, Rate
from rosetta_t5.config.checks import declared_types
from rosetta_t5.config.language import gin_internals
from rosetta_t5.config.language.names import bound_arguments, defaults
from rosetta_t5.config.language.statements import Program, leaves, map_leaves
from rosetta_t5.user_errors import ConfigError, FollowOnError, Problems, did_you_mean

# The ranges of numbers that Optax's functions take, by argument or by function and argument. Those of
# our own are declared with the arguments.
_OPTAX = {
  **dict.fromkeys(("b1", "b2", "b3", "decay", "momentum"), Rate),
  **dict.fromkeys(("learning_rate", "peak_value", "weight_decay"), NonNegativeNumber),
  **dict.fromkeys(("eps", "max_norm", "max_delta"), PositiveNumber),
  # The parameters of an evaluation are divided by it.
  **dict.fromkeys(("schedule_free.b1", "schedule_free_adamw.b1"), PositiveRate),
}


@dataclasses.dataclass(frozen=True)
class _BoundValue:
  """A value that gin binds to an argument.

  Attributes:
    argument: the argument, such as train/DatasetConfig.batch_size.
    macro: the macro that has the value; None if the argument has it directly.
    value: the value without macros.
    declared: the type that the argument is declared to have.
    is_default: whether the value is the argument's default.
  """

  argument: str
  macro: str | None
  value: Any
  declared: Any
  is_default: bool

  @property
  def is_known(self) -> bool:
    """Whether the value can be checked here, or is built for the run and so checked there."""
    has_references = any(isinstance(leaf, ConfigurableReference) for leaf in leaves(self.value))
    return self.is_default or has_references or declared_types.is_known(self.declared)

  def check(self) -> None:
    """Raises ConfigError if the argument does not accept the value."""
    if self.is_default or declared_types.accepts(self.value, self.declared):
      return
    name, value, declared = declared_types.wrong_part(
      self.value, self.declared, self.macro or self.argument
    )
    text = f"{name} must be {declared_types.describe(declared)}, got {value!r}"
    # A function of gin_utils without its parentheses has been reported already.
    is_uncalled = isinstance(value, ConfigurableReference) and not value.evaluate
    advice = f": write {value!r}()" if is_uncalled else _advice(value, declared)
    raise (FollowOnError if is_uncalled else ConfigError)(text + advice)


def check_values(program: Program, problems: Problems) -> None:
  """Collects a problem, with its line, for each bound value that its argument does not accept."""
  sources = {key: binding.source for key, binding in program.effective_bindings().items()}
  for bound in _bound_values():
    scope, _, name = bound.argument.rpartition("/")
    key = (bound.macro,) if bound.macro else (scope, *name.rsplit(".", 2)[-2:])
    source = [sources[key]] if key in sources else []
    with problems.collect(*source, *([f"read as {name}"] if bound.macro else [])):
      bound.check()
    with problems.collect(*source):
      _check_learning_rates(name, bound.value)


def _check_learning_rates(argument: str, value: Any) -> None:
  """Raises ConfigError for a learning rate of a function that `chain` calls with the trainer's."""
  for leaf in leaves(value) if argument == "chain.transformations" else ():
    is_uncalled = isinstance(leaf, ConfigurableReference) and not leaf.evaluate
    if is_uncalled and "learning_rate" in bound_arguments(leaf.configurable, leaf.scopes):
      raise ConfigError(
        f"{leaf.configurable.name}.learning_rate has no effect, because chain.transformations contains "
        f"{leaf!r} without parentheses, which gets the trainer's learning rate: write {leaf!r}(), or "
        "remove the binding and set trainer.Trainer.learning_rate_fn"
      )


def unchecked_arguments() -> list[str]:
  """Returns the arguments with bound values that cannot be checked, because no type is declared or
  nothing is known of the declared class."""
  return sorted({bound.argument for bound in _bound_values() if not bound.is_known})


def _bound_values() -> Iterator[_BoundValue]:
  """Yields all bound values, except those that are missing, which other checks report."""
  bindings = gin_internals.all_bindings()
  macros = {name: b["value"] for (name, kind), b in bindings.items() if kind == "gin.macro"}

  def resolve(leaf: Any) -> Any:
    macro = _macro(leaf)
    return leaf if macro is None else map_leaves(resolve, macros.get(macro, gin.REQUIRED))

  for (scope, selector), arguments in bindings.items():
    (configurable,) = gin_internals.find_configurables(selector)
    for argument, given in arguments.items() if configurable.module != "gin" else ():
      macro = None
      while (inner := _macro(given)) in macros:
        macro, given = inner, macros[inner]
      value, declared = map_leaves(resolve, given), _declared_type(configurable, argument)
      if declared_types.is_plain(declared):
        value = _called(value, scope)
      default = defaults(configurable).get(argument, gin.REQUIRED)
      if not any(leaf is gin.REQUIRED for leaf in leaves(value)):
        name = f"{scope}{'/' if scope else ''}{configurable.name}.{argument}"
        is_default = type(value) is type(default) and bool(value == default)
        yield _BoundValue(name, macro, value, declared, is_default)


def _macro(value: Any) -> str | None:
  """Returns the name of the macro that a gin value refers to; None for other values."""
  is_macro = isinstance(value, ConfigurableReference) and value.selector == "gin.macro"
  return "/".join(value.scopes) if is_macro else None


def _called(value: Any, scope: str) -> Any:
  """Returns what @f() returns. If it fails, the error is reported where the run is built."""
  if isinstance(value, ConfigurableReference) and value.evaluate:
    with contextlib.suppress(Exception), gin.config_scope(scope or None):
      return copy.deepcopy(value)
  return value


def _declared_type(configurable: Configurable, argument: str) -> Any:
  declared = declared_types.declared_type(configurable, argument)
  of_optax = _OPTAX.get(f"{configurable.name}.{argument}", _OPTAX.get(argument))
  if of_optax is None or not configurable.selector.startswith("optax."):
    return declared
  return Annotated[declared_types.without_arrays(declared), *typing.get_args(of_optax)[1:]]


def _advice(value: Any, declared: Any) -> str:
  """Returns a similar value that the argument accepts, or ""."""
  candidates: list[Any] = [[value]]
  match value:
    case str():
      known = declared_types.choices(declared)
      if hint := did_you_mean(value, known):
        return f".{hint}"
      with contextlib.suppress(ValueError, SyntaxError):
        candidates.insert(0, ast.literal_eval(value.strip("'\"‘’“” ").capitalize()))
    case int() | float() if not declared_types.accepts(1, declared):
      candidates.append(str(value))
    case float() if value.is_integer():
      candidates.insert(0, int(value))
    case [only]:
      candidates.insert(0, only)
  found = (c for c in candidates if declared_types.accepts(c, declared))
  return next((f": write {candidate!r}" for candidate in found), "")
