"""Lists how a run's configuration differs from that of the previous run in the same folder."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from rosetta_t5.config.language import statements
from rosetta_t5.config.language.gin_internals import all_bindings, find_configurables
from rosetta_t5.config.language.names import defaults
from rosetta_t5.config.summary import get_gin_config_str
from rosetta_t5.user_errors import ConfigError

_Bindings = Mapping[tuple[str, ...], statements.Binding]
_ABSENT = object()


def changes_since(
  folder: str | os.PathLike[str], program: statements.Program | None = None
) -> list[str]:
  """Returns a line for each value that differs from the one in FOLDER/config.gin.

  The list is empty if there is no such file, and if this run does not use gin.

  Args:
    folder: MODEL_DIR, where the previous run wrote its configuration.
    program: the gin files of this run; None for the bindings that gin holds.
  """
  file = pathlib.Path(folder) / "config.gin"
  if not file.is_file() or not (program or all_bindings()):
    return []
  try:
    before = statements.read_program([str(file)]).effective_bindings()
    now = (program or statements.read_program([], [get_gin_config_str()])).effective_bindings()
  except ConfigError as error:
    return [f"{file} cannot be compared: {str(error).splitlines()[0]}"]
  both = {**before, **now}
  lines = []
  for key, binding in both.items():
    old, new = (
      bindings[key].value if key in bindings else _value_if_unbound(key, both)
      for bindings in (before, now)
    )
    if old is _ABSENT or new is _ABSENT or text_of(old) == text_of(new):
      continue
    if text_of(_expand(old, before)) != text_of(_expand(new, now)):
      lines.append(f"{binding.name}: {text_of(old)} → {text_of(new)}")
  return lines


def _value_if_unbound(key: tuple[str, ...], bindings: _Bindings) -> Any:
  """Returns an argument's value without its binding: that of an outer scope, or else the default."""
  if len(key) == 1:  # a macro
    return _ABSENT
  scope, name, argument = key
  while scope:
    scope = scope.rpartition("/")[0]
    if (scope, name, argument) in bindings:
      return bindings[scope, name, argument].value
  known = find_configurables(name)
  default = defaults(known[0]).get(argument, _ABSENT) if len(known) == 1 else _ABSENT
  # Other defaults, such as functions, have no text that could be compared with a gin file's.
  is_plain = isinstance(default, (str, int, float, bool, tuple, list, dict, type(None)))
  return default if is_plain else _ABSENT


def _expand(value: Any, bindings: _Bindings) -> Any:
  """Returns a value with each macro replaced by its value."""

  def expand_leaf(leaf: Any) -> Any:
    is_known = isinstance(leaf, statements.Macro) and (leaf.name,) in bindings
    return _expand(bindings[leaf.name,].value, bindings) if is_known else leaf

  return statements.map_leaves(expand_leaf, value)


def text_of(value: Any) -> str:
  """Returns a value as gin code. References have no modules, because each file has its own aliases."""

  def without_module(leaf: Any) -> Any:
    if not isinstance(leaf, statements.Reference):
      return leaf
    scope = f"{leaf.scope}/" if leaf.scope else ""
    return statements.Reference(scope + leaf.last_name, leaf.evaluate)

  return repr(statements.map_leaves(without_module, value))
