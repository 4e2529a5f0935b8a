"""The types that arguments are declared to have, and whether values that gin binds have them."""

from __future__ import annotations

import builtins
import collections
import inspect
import sys
import types
import typing
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union

from gin.config import Configurable, ConfigurableReference

from rosetta_t5.argument_types import Condition
from rosetta_t5.config.language.names import parameters
from rosetta_t5.user_errors import OWN_PACKAGES

# What an argument of a plain type accepts: in words, and which of gin's values. T5X's scripts write 0
# and 1 for False and True, and a whole number is a number.
_PLAIN: dict[Any, tuple[str, Callable[[Any], bool]]] = {
  bool: ("True or False", lambda value: isinstance(value, int) and value in (0, 1)),
  int: ("an integer", lambda value: isinstance(value, int) and not isinstance(value, bool)),
  float: ("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool)),
  str: ("a string", lambda value: isinstance(value, str)),
  bytes: ("bytes", lambda value: isinstance(value, bytes)),
  complex: ("a complex number", lambda value: False),
  None: ("None", lambda value: value is None),
  types.NoneType: ("None", lambda value: value is None),
}
_LISTS = (list, tuple, set, frozenset, Sequence, Collection, Iterable)
_DICTS = (dict, Mapping, collections.abc.MutableMapping)
# No string, number, list or dict can stand for an object of a class of these packages.
_PACKAGES_OF_OBJECTS = ("flax", "rosetta_t5", "seqio", "t5x")


def declared_type(configurable: Configurable, argument: str) -> Any:
  """Returns the type of an argument; Any if it has none, or if its annotation is not a type."""
  parameter = parameters(configurable).get(argument)
  if parameter is None or parameter.annotation is parameter.empty:
    return Any
  annotation = parameter.annotation
  if isinstance(annotation, str):
    try:
      # Names that are imported for type checkers only, such as seqio, are found by their modules.
      names = collections.ChainMap(*_namespaces(configurable.wrapped), sys.modules, vars(builtins))
      annotation = eval(annotation, {}, names)
    except Exception:  # whatever a user's annotation raises
      return Any
  return annotation if isinstance(annotation, Hashable) else Any


def _namespaces(function: Any) -> list[dict[str, Any]]:
  """Returns the global names of a function, or of a class and its base classes."""
  if isinstance(function, type):
    return [vars(sys.modules[base.__module__]) for base in function.__mro__]
  return [getattr(inspect.unwrap(function), "__globals__", {})]


def is_known(declared: Any) -> bool:
  """Returns whether a type determines which of gin's strings, numbers, lists and dicts it accepts."""
  return not any(map(_is_unknown, _relevant_members(declared)))


def is_plain(declared: Any) -> bool:
  """Returns whether a type is a string, a number, a truth value, None, or a union of these."""
  return all(_without_conditions(m) in _PLAIN for m in _members(declared))


def accepts(value: Any, declared: Any) -> bool:
  """Returns whether an argument of this type accepts a value, whose macros have been resolved."""
  if isinstance(value, ConfigurableReference):
    return any(_accepts_reference(value, member) for member in _members(declared))
  return any(_accepts_value(value, member) for member in _relevant_members(declared))


def wrong_part(value: Any, declared: Any, name: str) -> tuple[str, Any, Any]:
  """Returns (name, value, type) of the innermost part of a wrong value that its type does not accept."""
  for member in _members(declared):
    for suffix, part, part_type in _parts(value, _without_conditions(member)) or ():
      if not accepts(part, part_type):
        return wrong_part(part, part_type, f"{name}{suffix}")
  return name, value, declared


def describe(declared: Any) -> str:
  """Returns what a type accepts: "an integer of at least 1 or None"."""
  members = _relevant_members(declared)
  if any(_without_conditions(member) is float for member in members):
    # Optax's numbers are unions of all types of numbers.
    members = [m for m in members if _without_conditions(m) not in (bool, int, complex)]
  return " or ".join(dict.fromkeys(_describe_member(member) for member in members))


def without_arrays(declared: Any) -> Any:
  """Returns a type without the classes of arrays in its union, which gin files cannot write."""
  members = list(_members(declared))
  kept = [m for m in members if not getattr(m, "__module__", "").startswith(("jax", "numpy"))]
  return Union[tuple(kept or members)]  # noqa: UP007


def choices(declared: Any) -> list[str]:
  """Returns the strings among which a type chooses."""
  return [choice for m in _members(declared) for c in _conditions(m) for choice in c.choices]


def _members(declared: Any) -> Iterator[Any]:
  """Yields the members of a union; of other types, the type itself. Conditions are kept."""
  base, conditions = _without_conditions(declared), _conditions(declared)
  if typing.get_origin(base) not in (Union, types.UnionType):
    yield declared
    return
  for member in typing.get_args(base):
    yield from (Annotated[m, *conditions] if conditions else m for m in _members(member))


def _relevant_members(declared: Any) -> list[Any]:
  """Returns the members of a union that can be compared with gin's values.

  The others, such as classes of arrays, are kept if the union contains Any or object, or if nothing but
  None would remain.
  """
  members = list(_members(declared))
  known = [member for member in members if not _is_unknown(member)]
  is_anything = any(_without_conditions(m) in (Any, object) for m in set(members) - set(known))
  return members if is_anything or set(known) <= {None, types.NoneType} else known


def _conditions(declared: Any) -> tuple[Condition, ...]:
  return tuple(c for c in getattr(declared, "__metadata__", ()) if isinstance(c, Condition))


def _without_conditions(declared: Any) -> Any:
  return declared.__origin__ if hasattr(declared, "__metadata__") else declared


def _is_unknown(member: Any) -> bool:
  base = _without_conditions(member)
  if _conditions(member) or base in _PLAIN or typing.get_origin(base) is Literal:
    return False
  return base in (Any, object) or not (
    _is_container(base) or _is_function(base) or _is_class_of_objects(base)
  )


def _accepts_value(value: Any, member: Any) -> bool:
  base = _without_conditions(member)
  try:
    return _has_type(value, base) and all(c.holds(value) for c in _conditions(member))
  except TypeError:  # A range of numbers, such as that of Optax's rates, does not hold for a list.
    return False


def _has_type(value: Any, base: Any) -> bool:
  parts = _parts(value, base)
  if parts is not None:
    return all(accepts(part, part_type) for _, part, part_type in parts)
  if base in _PLAIN:
    return _PLAIN[base][1](value)
  if typing.get_origin(base) is Literal:
    return any(value == known and type(value) is type(known) for known in typing.get_args(base))
  if _is_function(base):
    return callable(value)
  return _is_unknown(base) or (isinstance(base, type) and isinstance(value, base))


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


def _accepts_reference(reference: ConfigurableReference, member: Any) -> bool:
  """Returns whether an argument accepts @f or @f().

  The classes of objects are compared only if this package defines both: a user's class may be used
  like one of ours without being derived from it.
  """
  base = _without_conditions(member)
  if not reference.evaluate:
    is_value = base in _PLAIN or _is_container(base) or typing.get_origin(base) is Literal
    return not (is_value or (_is_class_of_objects(base) and not _is_function(base)))
  built = reference.configurable.wrapped
  if not isinstance(built, type):
    return True
  both = (built, base)
  if all(isinstance(c, type) and c.__module__.startswith(OWN_PACKAGES) for c in both):
    return issubclass(built, base)
  is_called = any("__call__" in vars(each) for each in built.__mro__)
  return base not in _PLAIN and (is_called or not _is_function(base))


def _is_container(base: Any) -> bool:
  return (typing.get_origin(base) or base) in (*_LISTS, *_DICTS)


def _is_function(base: Any) -> bool:
  if getattr(base, "_is_protocol", False):
    return "__call__" in vars(base)
  return (typing.get_origin(base) or base) in (Callable, typing.Callable, type)


def _is_class_of_objects(base: Any) -> bool:
  return isinstance(base, type) and base.__module__.partition(".")[0] in _PACKAGES_OF_OBJECTS


def _describe_member(member: Any) -> str:
  base, conditions = _without_conditions(member), _conditions(member)
  if any(condition.choices for condition in conditions):
    text = ""
  elif base in _PLAIN:
    text = _PLAIN[base][0]
  elif typing.get_origin(base) is Literal:
    text = f"one of {', '.join(map(repr, typing.get_args(base)))}"
  elif typing.get_origin(base) is tuple and typing.get_args(base)[-1:] != (...,):
    text = f"a list of {len(typing.get_args(base))} values"
  elif _is_container(base):
    text = "a dict" if (typing.get_origin(base) or base) in _DICTS else "a list"
  elif _is_function(base):
    text = "a function or class"
  else:
    text = "" if base is Any else f"an object of the class {base.__name__}"
  return " ".join([text, *(c.text for c in conditions)]).strip()
