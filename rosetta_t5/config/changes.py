"""What a run's configuration has otherwise than the run before it in the same folder."""

from __future__ import annotations

import inspect
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import gin

from rosetta_t5.config.errors import ConfigError
from rosetta_t5.config.language.names import parameters
from rosetta_t5.config.language.statements import Binding, Macro, Program, Reference, read_program
from rosetta_t5.config.summary import get_gin_config_str

_Key = tuple[str, ...]
_ABSENT = object()


def changes_since(folder: str | os.PathLike[str], program: Program | None = None) -> list[str]:
  """Returns a line for each value that differs from FOLDER/config.gin; none where there is no such file.

  Args:
    folder: MODEL_DIR, where the last run wrote its configuration.
    program: what this run was given; None takes what gin holds now (nothing in a run without gin).
  """
  file = pathlib.Path(folder) / "config.gin"
  if not file.is_file() or not (program or gin.config._CONFIG):
    return []
  try:
    before = read_program([str(file)], [], ["."])
    now = program or read_program([], [get_gin_config_str()], ["."])
  except ConfigError as error:
    return [f"{file} cannot be compared: {str(error).splitlines()[0]}"]
  return _differences(_by_key(before), _by_key(now))


def _by_key(program: Program) -> dict[_Key, Binding]:
  return {binding.key: binding for binding in program.in_force()}


def _differences(before: Mapping[_Key, Binding], now: Mapping[_Key, Binding]) -> list[str]:
  lines = []
  for key in {**before, **now}:
    old, new = _value(key, before), _value(key, now)
    if old is _ABSENT or new is _ABSENT:
      default = _default(key, before, now)
      old, new = (default if value is _ABSENT else value for value in (old, new))
    if old is not _ABSENT and new is not _ABSENT and not _same(old, new, before, now):
      name = (now.get(key) or before[key]).name
      lines.append(f"{name}: {_text(old)} → {_text(new)}")
  return lines


def _value(key: _Key, bindings: Mapping[_Key, Binding]) -> Any:
  return bindings[key].value if key in bindings else _ABSENT


def _default(key: _Key, before: Mapping[_Key, Binding], now: Mapping[_Key, Binding]) -> Any:
  """What an argument is where no binding sets it: another scope's value, or the function's own."""
  if len(key) == 1:
    return _ABSENT
  scope, name, argument = key
  while scope:
    scope = scope.rpartition("/")[0]
    for bindings in (now, before):
      if (scope, name, argument) in bindings:
        return bindings[scope, name, argument].value
  known = gin.config._REGISTRY.matching_selectors(name)
  if len(known) != 1:
    return _ABSENT  # neither run may call it
  found = parameters(gin.config._REGISTRY[known[0]]).get(argument)
  given = inspect.Parameter.empty if found is None else found.default
  is_plain = isinstance(given, (str, int, float, bool, tuple, list, dict, type(None)))
  return given if is_plain else _ABSENT


def _same(old: Any, new: Any, before: Mapping[_Key, Binding], now: Mapping[_Key, Binding]) -> bool:
  return _text(old) == _text(new) or _text(_resolved(old, before)) == _text(_resolved(new, now))


def _resolved(value: Any, bindings: Mapping[_Key, Binding]) -> Any:
  """A value with its macros' values in their places."""
  match value:
    case Macro(name=name) if (name,) in bindings:
      return _resolved(bindings[name,].value, bindings)
    case dict():
      return {k: _resolved(v, bindings) for k, v in value.items()}
    case list() | tuple():
      return type(value)(_resolved(item, bindings) for item in value)
    case _:
      return value


def _text(value: Any) -> str:
  """A value as gin has it, references without their modules, which may be called anything."""
  match value:
    case Reference(name=name, evaluate=evaluate):
      scope, _, selector = name.rpartition("/")
      last = selector.rsplit(".", 1)[-1]
      return f"@{scope}{'/' if scope else ''}{last}{'()' if evaluate else ''}"
    case Macro(name=name):
      return f"%{name}"
    case dict():
      return "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in value.items()) + "}"
    case list() | tuple():
      inner = ", ".join(map(_text, value))
      return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    case _:
      return repr(value)
