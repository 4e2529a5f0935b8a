"""Checks the type and the range of every value that gin binds to an argument."""

import ast
import builtins
import collections
import contextlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union

import gin
from gin.config import Configurable, ConfigurableReference

from rosetta_t5.argument_types import Condition
from rosetta_t5.config.language import gin_internals
from rosetta_t5.config.language.binding import bound_arguments, defaults, parameters
from rosetta_t5.config.language.statements import Program, leaves, map_leaves
from rosetta_t5.user_errors import ConfigError, Problems, did_you_mean

# What an argument of a plain type accepts: in words, and which of gin's values. T5X's scripts write 0
# and 1 for False and True, and an integer is accepted as a number.
_PLAIN_TYPES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
  bool: ("True or False", lambda value: isinstance(value, int) and value in (0, 1)),
  int: ("an integer", lambda value: isinstance(value, int) and not isinstance(value, bool)),
  float: ("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool)),
  str: ("a string", lambda value: isinstance(value, str)),
  bytes: ("bytes", lambda value: isinstance(value, bytes)),
  complex: ("a complex number", lambda value: False),
  None: ("None", lambda value: value is None),
  types.NoneType: ("None", lambda value: value is None),
}
_FUNCTION = "a function or class"
_FUNCTIONS = (Callable, typing.Callable, type)
_LISTS = (list, tuple, set, frozenset, Sequence, Collection, Iterable)
_DICTS = (dict, Mapping, collections.abc.MutableMapping)
# No string, number, list or dict can stand for an object of a class of these packages.
_PACKAGES_OF_OBJECTS = ("flax", "rosetta_t5", "seqio", "t5x")
# A member of a union: its type without `Annotated`, and the conditions on its values.
_Member = tuple[Any, tuple[Condition, ...]]


def check_values(program: Program, problems: Problems) -> None:
  """Collects a problem, with its line, for each bound value that its argument does not accept."""
  sources = {key: binding.source for key, binding in program.effective_bindings().items()}
  for argument, macro, value, declared in _bound_values():
    scope, _, name = argument.rpartition("/")
    # (class or function, argument), without the module
    key = (macro,) if macro else (scope, *name.rsplit(".", 2)[-2:])
    source = [sources[key]] if key in sources else []
    with problems.collect(*source, *([f"read as {name}"] if macro else [])):
      if wrong := _wrong_part(value, declared, macro or argument):
        part_name, part, part_type = wrong
        text = f"{part_name} must be {_describe(part_type)}, got {part!r}"
        raise ConfigError(text + _advice(part, part_type))
    with problems.collect(*source):
      _check_uncalled_learning_rates(name, value)


def _bound_values() -> Iterator[tuple[str, str | None, Any, Any]]:
  """Yields each value that gin binds, except those equal to the default and those that are missing.

  Other checks report the missing ones. Each item is (argument, macro, value, type): the argument, such as
  train/DatasetConfig.batch_size, the macro that has the value or None, the value without macros, and the
  type that the argument is declared to have.
  """
  bindings = gin_internals.all_bindings()
  macros = {name: b["value"] for (name, kind), b in bindings.items() if kind == gin_internals.MACRO}

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
      default = defaults(configurable).get(argument, gin.REQUIRED)
      is_default = type(value) is type(default) and bool(value == default)
      if not (is_default or any(leaf is gin.REQUIRED for leaf in leaves(value))):
        name = f"{scope}{'/' if scope else ''}{configurable.name}.{argument}"
        yield name, macro, value, declared


def _macro(value: Any) -> str | None:
  """Returns the name of the macro that a gin value refers to; None for other values."""
  is_macro = isinstance(value, ConfigurableReference) and value.selector == gin_internals.MACRO
  return "/".join(value.scopes) if is_macro else None


def _check_uncalled_learning_rates(argument: str, value: Any) -> None:
  """Checks the functions without parentheses in `chain.transformations`.

  Raises:
    ConfigError: one of them binds learning_rate, which the trainer's replaces.
  """
  for leaf in leaves(value) if argument == "chain.transformations" else ():
    is_uncalled = isinstance(leaf, ConfigurableReference) and not leaf.evaluate
    if is_uncalled and "learning_rate" in bound_arguments(leaf.configurable, leaf.scopes):
      raise ConfigError(
        f"{leaf.configurable.name}.learning_rate has no effect, because chain.transformations contains "
        f"{leaf!r} without parentheses, which gets the trainer's learning rate: write {leaf!r}(), or "
        "remove the binding and set trainer.Trainer.learning_rate_fn"
      )


def _advice(value: Any, declared: Any) -> str:
  """Returns the end of the error: ": write VALUE" with a value that is accepted, similar names, or ""."""
  candidates: list[Any] = [[value]]
  match value:
    case ConfigurableReference(evaluate=False):
      return f": write {value!r}()"
    case str():
      conditions = [c for _, conditions in _members(declared) for c in conditions]
      if hint := did_you_mean(value, [choice for c in conditions for choice in c.choices]):
        return f".{hint}"
      with contextlib.suppress(ValueError, SyntaxError):
        candidates.insert(0, ast.literal_eval(value.strip("'\"‘’“” ").capitalize()))
    case int() | float() if _wrong_part(1, declared, ""):
      candidates.append(str(value))
    case float() if value.is_integer():
      candidates.insert(0, int(value))
    case [only]:
      candidates.insert(0, only)
  found = (c for c in candidates if _wrong_part(c, declared, "") is None)
  return next((f": write {candidate!r}" for candidate in found), "")


def _declared_type(configurable: Configurable, argument: str) -> Any:
  """Returns the type of an argument; Any if it has none, or if its annotation is not a type."""
  parameter = parameters(configurable).get(argument)
  if parameter is None or parameter.annotation is parameter.empty:
    return Any
  annotation, function = parameter.annotation, configurable.wrapped
  if isinstance(annotation, str):
    spaces = [getattr(inspect.unwrap(function), "__globals__", {})]
    if isinstance(function, type):
      spaces = [vars(sys.modules[base.__module__]) for base in function.__mro__]
    try:
      # Names that are imported for type checkers only, such as seqio, are found by their modules.
      names = collections.ChainMap(*spaces, sys.modules, vars(builtins))
      annotation = eval(annotation, {}, names)
    except Exception:  # whatever a user's annotation raises
      return Any
  return annotation if isinstance(annotation, Hashable) else Any


def _members(declared: Any, conditions: tuple[Condition, ...] = ()) -> Iterator[_Member]:
  """Yields the members of a union; of other types, the type itself."""
  if typing.get_origin(declared) is Annotated:
    more = (c for c in declared.__metadata__ if isinstance(c, Condition))
    yield from _members(declared.__origin__, (*conditions, *more))
  elif typing.get_origin(declared) in (Union, types.UnionType):
    for member in typing.get_args(declared):
      yield from _members(member, conditions)
  else:
    yield declared, conditions


def _relevant_members(declared: Any) -> list[_Member]:
  """Returns the members of a union that can be compared with gin's values.

  The others, such as classes of arrays, are kept if the union contains Any or object, or if nothing but
  None would remain.
  """
  members = list(_members(declared))
  known = [(base, conditions) for base, conditions in members if conditions or _kind(base)]
  is_anything = any(base in (Any, object) and not conditions for base, conditions in members)
  return members if is_anything or {m[0] for m in known} <= {None, types.NoneType} else known


def _kind(base: Any) -> str:
  """Returns what gin's values of a type are; "" for a type that these cannot be compared with."""
  arguments, origin = typing.get_args(base), typing.get_origin(base) or base
  if base in _PLAIN_TYPES:
    return _PLAIN_TYPES[base][0]
  if origin is Literal:
    return f"one of {', '.join(map(repr, arguments))}"
  if origin is tuple and arguments[-1:] not in ((), (...,)):
    return f"a list of {len(arguments)} values"
  if origin in (*_LISTS, *_DICTS):
    return "a dict" if origin in _DICTS else "a list"
  is_protocol = getattr(base, "_is_protocol", False)
  is_function = "__call__" in vars(base) if is_protocol else origin in _FUNCTIONS
  if is_function:
    return _FUNCTION
  is_object = isinstance(base, type) and base.__module__.split(".")[0] in _PACKAGES_OF_OBJECTS
  return f"an object of the class {base.__name__}" if is_object else ""


def _wrong_part(value: Any, declared: Any, name: str) -> tuple[str, Any, Any] | None:
  """Returns (name, value, type) of the innermost part of a value that its type does not accept.

  The result is None for a value that is accepted.
  """
  members = _relevant_members(declared)
  if any(_accepts(value, *member) for member in members):
    return None
  for base, _ in members:
    for suffix, part, part_type in _parts(value, base) or ():
      if wrong := _wrong_part(part, part_type, f"{name}{suffix}"):
        return wrong
  return name, value, declared


def _accepts(value: Any, base: Any, conditions: tuple[Condition, ...]) -> bool:
  if isinstance(value, ConfigurableReference):
    return value.evaluate or _kind(base) in (_FUNCTION, "")
  try:
    return _has_type(value, base) and all(c.holds(value) for c in conditions)
  except TypeError:  # A range of numbers does not hold for a list.
    return False


def _has_type(value: Any, base: Any) -> bool:
  parts = _parts(value, base)
  if parts is not None:
    return all(_wrong_part(part, part_type, "") is None for _, part, part_type in parts)
  if base in _PLAIN_TYPES:
    return _PLAIN_TYPES[base][1](value)
  if typing.get_origin(base) is Literal:
    return any(value == known and type(value) is type(known) for known in typing.get_args(base))
  if _kind(base) == _FUNCTION:
    return callable(value)
  return not _kind(base) or (isinstance(base, type) and isinstance(value, base))


def _parts(value: Any, base: Any) -> list[tuple[str, Any, Any]] | None:
  """Returns the parts of a list or dict as (suffix of the name, part, its type); None for others."""
  origin, arguments = typing.get_origin(base) or base, typing.get_args(base)
  if isinstance(value, dict) and origin in _DICTS:
    key_type, value_type = arguments or (Any, Any)
    keys = [("", key, key_type) for key in value]
    return keys + [(f"[{key!r}]", item, value_type) for key, item in value.items()]
  if not (isinstance(value, list | tuple) and origin in _LISTS):
    return None
  item_types = [arguments[0] if arguments else Any] * len(value)
  if origin is tuple and arguments and arguments[-1] is not ...:
    if len(arguments) != len(value):
      return None
    item_types = list(arguments)
  return [(f"[{n}]", *pair) for n, pair in enumerate(zip(value, item_types, strict=True))]


def _describe(declared: Any) -> str:
  """Returns what a type accepts: "an integer of at least 1 or None"."""
  members = _relevant_members(declared)
  if any(base is float for base, _ in members):
    # Optax's numbers are unions of all types of numbers.
    members = [m for m in members if m[0] not in (bool, int, complex)]
  return " or ".join(dict.fromkeys(_describe_member(*member) for member in members))


def _describe_member(base: Any, conditions: tuple[Condition, ...]) -> str:
  has_choices = base is Any or any(condition.choices for condition in conditions)
  text = "" if has_choices else _kind(base) or f"an object of the class {base.__name__}"
  return " ".join([text, *(c.text for c in conditions)]).strip()
