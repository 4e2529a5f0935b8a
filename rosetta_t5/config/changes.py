"""Lists how a run's configuration differs from that of the previous run in the same folder."""

from __future__ import annotations

import inspect
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from rosetta_t5.config.errors import ConfigError
from rosetta_t5.config.language.gin_internals import all_bindings, find_configurables
from rosetta_t5.config.language.names import parameters
from rosetta_t5.config.language.statements import (
  Binding,
  Macro,
  Program,
  Reference,
  map_leaves,
  read_program,
)
from rosetta_t5.config.summary import get_gin_config_str

_Key = tuple[str, ...]
_ABSENT = object()


def changes_since(folder: str | os.PathLike[str], program: Program | None = None) -> list[str]:
  """Returns a line for each value that differs from FOLDER/config.gin; none without such a file.

  Args:
    folder: MODEL_DIR, where the last run wrote its configuration.
    program: the gin files of this run; None for what gin has bound (nothing in a run without gin).
  """
  file = pathlib.Path(folder) / "config.gin"
  if not file.is_file() or not (program or all_bindings()):
    return []
  try:
    before = read_program([str(file)], [], ["."])
    now = program or read_program([], [get_gin_config_str()], ["."])
  except ConfigError as error:
    return [f"{file} cannot be compared: {str(error).splitlines()[0]}"]
  return _differences(before.effective_bindings(), now.effective_bindings())


def _differences(before: Mapping[_Key, Binding], now: Mapping[_Key, Binding]) -> list[str]:
  lines = []
  for key in {**before, **now}:
    old, new = _value(key, before), _value(key, now)
    if old is _ABSENT or new is _ABSENT:
      default = _default(key, before, now)
      old, new = (default if value is _ABSENT else value for value in (old, new))
    if old is not _ABSENT and new is not _ABSENT and not _is_same(old, new, before, now):
      name = (now.get(key) or before[key]).name
      lines.append(f"{name}: {_text(old)} → {_text(new)}")
  return lines


def _value(key: _Key, bindings: Mapping[_Key, Binding]) -> Any:
  return bindings[key].value if key in bindings else _ABSENT


def _default(key: _Key, before: Mapping[_Key, Binding], now: Mapping[_Key, Binding]) -> Any:
  """Returns an argument's value without a binding: that of an outer scope, else the default."""
  if len(key) == 1:
    return _ABSENT
  scope, name, argument = key
  while scope:
    scope = scope.rpartition("/")[0]
    for bindings in (now, before):
      if (scope, name, argument) in bindings:
        return bindings[scope, name, argument].value
  known = find_configurables(name)
  found = parameters(known[0]).get(argument) if len(known) == 1 else None
  default = inspect.Parameter.empty if found is None else found.default
  is_plain = isinstance(default, (str, int, float, bool, tuple, list, dict, type(None)))
  return default if is_plain else _ABSENT


def _is_same(
  old: Any, new: Any, before: Mapping[_Key, Binding], now: Mapping[_Key, Binding]
) -> bool:
  return _text(old) == _text(new) or _text(_expand(old, before)) == _text(_expand(new, now))


def _expand(value: Any, bindings: Mapping[_Key, Binding]) -> Any:
  """Returns a value with each macro replaced by its value."""

  def expand_leaf(leaf: Any) -> Any:
    is_known = isinstance(leaf, Macro) and (leaf.name,) in bindings
    return _expand(bindings[leaf.name,].value, bindings) if is_known else leaf

  return map_leaves(expand_leaf, value)


def _text(value: Any) -> str:
  """Returns a value as gin code, without the modules of references: each file may name them freely."""

  def without_module(leaf: Any) -> Any:
    if not isinstance(leaf, Reference):
      return leaf
    scope = f"{leaf.scope}/" if leaf.scope else ""
    return Reference(scope + leaf.last_name, leaf.evaluate)

  return repr(map_leaves(without_module, value))
