"""Finds the bindings that a run never reads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rosetta_t5.config.checks.references import reached_from
from rosetta_t5.config.language.gin_internals import ScopeAndName, all_bindings, find_configurables
from rosetta_t5.config.language.statements import Binding, Program
from rosetta_t5.config.t5x.retired_arguments import is_retired


def unused_bindings(program: Program, function: Callable[..., Any]) -> list[Binding]:
  """Returns the effective bindings that neither `function` nor anything built for it reads.

  Only functions that gin files refer to count as called. Gin passes nothing to a function that
  Python code calls itself, unless the function is decorated as configurable where it is defined.
  Bindings of decorated functions are never reported.
  """
  read = {
    ("/".join(reached.scopes[:n]), reached.configurable.selector)
    for reached in reached_from(function, with_methods=True)
    for n in range(len(reached.scopes) + 1)
  }
  macros = program.macros_used()
  bound_at: dict[tuple[str, ...], ScopeAndName] = {
    (scope, selector.rpartition(".")[2], argument): (scope, selector)
    for (scope, selector), bound in all_bindings().items()
    for argument in bound
  }

  def is_read(binding: Binding) -> bool:
    if binding.macro is not None:
      return binding.macro in macros
    key = bound_at.get(binding.key)
    if key is None:
      return not is_retired(*binding.key[1:])
    return key in read or _is_decorated(key[1])

  return [binding for binding in program.effective_bindings().values() if not is_read(binding)]


def _is_decorated(selector: str) -> bool:
  """Returns whether the function in its module is gin's wrapper, so that every call reads bindings."""
  (configurable,) = find_configurables(selector)
  module = sys.modules.get(getattr(configurable.wrapped, "__module__", ""))
  name = getattr(configurable.wrapped, "__name__", "")
  return getattr(module, name, None) is configurable.wrapper
