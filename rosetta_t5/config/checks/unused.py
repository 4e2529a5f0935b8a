"""Which bindings a run never reads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import gin

from rosetta_t5.config.language.statements import Binding, Program
from rosetta_t5.config.t5x.retired_arguments import is_retired

_Key = tuple[str, str]


def unused_bindings(program: Program, function: Callable[..., Any]) -> list[Binding]:
  """Returns the bindings in force that `function`, and all that is built for it, never read.

  Only what gin files refer to counts as read: gin gives nothing to a function that Python code calls
  by itself, unless it was made configurable where it is defined; of those nothing can be told.
  """
  read: set[_Key] = set()
  _follow(gin.config._INVERSE_REGISTRY[function], [], read)
  macros = program.macros_used()
  selectors: dict[tuple[str, ...], _Key] = {
    (scope, selector.rsplit(".", 1)[-1], argument): (scope, selector)
    for (scope, selector), bound in gin.config._CONFIG.items()
    for argument in bound
  }

  def is_read(binding: Binding) -> bool:
    if binding.macro is not None:
      return binding.macro in macros
    key = selectors.get(binding.key)
    if key is None:
      return not is_retired(*binding.key[1:])
    return key in read or _calls_itself(key[1])

  return [binding for binding in program.in_force() if not is_read(binding)]


def _follow(configurable: Any, scopes: list[str], read: set[_Key], seen: Any = None) -> None:
  """Adds what calling `configurable` in these scopes reads: its bindings, and those of references."""
  seen = set() if seen is None else seen
  if (configurable.selector, *scopes) in seen:
    return
  seen.add((configurable.selector, *scopes))
  read |= {("/".join(scopes[:n]), configurable.selector) for n in range(len(scopes) + 1)}
  bound = gin.config._get_bindings(configurable.selector, scope_components=scopes)
  for reference in gin.config.iterate_references(bound):
    _follow(reference.configurable, reference.scopes or scopes, read, seen)
  for _, method in gin.config._REGISTRY.items():
    if method.is_method and method.module == configurable.selector:
      _follow(method, scopes, read, seen)


def _calls_itself(selector: str) -> bool:
  """Whether the name in its module is gin's wrapper: then any caller reads its bindings."""
  configurable = gin.config._REGISTRY[selector]
  module = sys.modules.get(getattr(configurable.wrapped, "__module__", ""))
  name = getattr(configurable.wrapped, "__name__", "")
  return getattr(module, name, None) is configurable.wrapper
