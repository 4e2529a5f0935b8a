"""Digests of a user's code, by which a restart notices that a preprocessor was edited."""

from __future__ import annotations

import functools
import inspect
import json
import pathlib
import sysconfig
import types
from collections.abc import Iterator, Sequence
from typing import Any

import rosetta_t5
from rosetta_t5.data.reading.file_facts import digest_of

_CONSTANTS = str | int | float | None | tuple | list | dict | set | frozenset
_INSTALLED = (
  "site-packages",
  "dist-packages",
  sysconfig.get_path("stdlib"),
  str(pathlib.Path(rosetta_t5.__file__).parent),
)


def code_digests(functions: Sequence[Any]) -> dict[str, str]:
  """Returns digests of functions by name; those of installed packages are left out.

  They cover the source code of a function, and the functions and constants that it refers to, also
  in other modules.
  """
  digests = {}
  for function in functions:
    while isinstance(function, functools.partial):
      function = function.func
    if not hasattr(function, "__name__"):
      function = type(function)  # an object that can be called
    if parts := list(_definition(function, set(), set())):
      digests[function.__name__] = digest_of(part.encode() for part in parts)
  return digests


def _definition(value: Any, names: set[str], seen: set[Any]) -> Iterator[str]:
  """Yields texts that define a value; nothing if it is of an installed package, or not known.

  Args:
    names: the names in the code that refers to the value, among them the attributes that it uses.
    seen: the functions, classes and attributes of modules that are described already.
  """
  while isinstance(value, functools.partial):
    value = value.func
  if isinstance(value, _CONSTANTS):
    try:
      yield json.dumps(value, sort_keys=True, default=_sorted_set)
    except (TypeError, ValueError):  # contains other objects
      return
  elif inspect.ismodule(value):
    for name in sorted(names & vars(value).keys() if _is_users(value) else ()):
      if (value, name) not in seen:
        seen.add((value, name))
        yield from _definition(getattr(value, name), names, seen)
  elif inspect.isfunction(value) or inspect.isclass(value):
    value = inspect.unwrap(value)
    if value in seen or not _is_users(value):
      return
    seen.add(value)
    try:
      yield inspect.getsource(value)
    except (OSError, TypeError):  # code that was typed into a terminal
      return
    if inspect.isfunction(value):
      names = _names(value.__code__)
      variables = {**value.__globals__, **inspect.getclosurevars(value).nonlocals}
      for name in sorted(names & variables.keys()):
        yield from _definition(variables[name], names, seen)


def _sorted_set(value: Any) -> list[Any]:
  if not isinstance(value, set | frozenset):
    raise TypeError
  return sorted(value)


def _names(code: types.CodeType) -> set[str]:
  """Returns the global names and attributes that code uses, also in the functions that it defines."""
  nested = (const for const in code.co_consts if isinstance(const, types.CodeType))
  return {*code.co_names, *code.co_freevars}.union(*map(_names, nested))


def _is_users(value: Any) -> bool:
  """Returns whether a module, function or class was written by a user of this project."""
  try:
    file = inspect.getfile(value)
  except TypeError:  # built into Python
    return False
  return not any(folder in file for folder in _INSTALLED)
