"""Follows gin's references from a run to all that it uses, and finds bindings that nothing reads."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import gin
from gin.config import Configurable

from rosetta_t5.config.language import gin_internals
from rosetta_t5.config.language.names import bound_arguments
from rosetta_t5.config.language.statements import Binding, Program
from rosetta_t5.config.t5x.retired_arguments import RETIRED_ARGUMENTS
from rosetta_t5.user_errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Reached:
  """A function or class that a run reaches through the references of its gin files.

  Attributes:
    configurable: the function or class, as gin knows it.
    scopes: the gin scopes in which it is called.
    bound: the arguments that gin binds there.
    is_called: whether gin calls it. If not, the run receives it uncalled, and the code that calls
      it may pass more arguments.
  """

  configurable: Configurable
  scopes: Sequence[str]
  bound: dict[str, Any]
  is_called: bool


def reached_from(
  function: Callable[..., Any], with_methods: bool = False, arguments: Collection[str] | None = None
) -> Iterator[Reached]:
  """Yields `function` and all that its bindings refer to, directly or indirectly.

  Args:
    function: the run.
    with_methods: whether to follow the bindings of the methods of classes too.
    arguments: the arguments of `function` to follow; None for all.
  """
  seen: set[tuple[str, ...]] = set()

  def follow(
    configurable: Configurable, scopes: Sequence[str], is_called: bool
  ) -> Iterator[Reached]:
    key = (configurable.selector, *scopes)
    if key in seen:
      return
    seen.add(key)
    bound = bound_arguments(configurable, scopes)
    yield Reached(configurable, scopes, bound, is_called)
    if arguments is not None and len(seen) == 1:
      bound = {name: value for name, value in bound.items() if name in arguments}
    for reference in gin.config.iterate_references(bound):
      yield from follow(reference.configurable, reference.scopes or scopes, reference.evaluate)
    for method in gin_internals.registered_configurables() if with_methods else ():
      if method.is_method and method.module == configurable.selector:
        yield from follow(method, scopes, False)

  yield from follow(gin_internals.configurable_of(function), [], True)


def check_cycles(program: Program) -> None:
  """Raises ConfigError if a value needs itself, directly or through others: gin could not build it."""
  finished: set[tuple[str, ...]] = set()

  def follow(
    configurable: Configurable, scopes: Sequence[str], path: list[tuple[str, ...]]
  ) -> None:
    key = (configurable.selector, *scopes)
    if key in path:
      raise ConfigError(_cycle_text(program, [*path[path.index(key) :], key]))
    for reference in gin.config.iterate_references(bound_arguments(configurable, scopes)):
      if reference.evaluate and key not in finished:
        follow(reference.configurable, reference.scopes or scopes, [*path, key])
    finished.add(key)

  for scope, selector in gin_internals.all_bindings():
    (configurable,) = gin_internals.find_configurables(selector)
    follow(configurable, scope.split("/") if scope else [], [])


def _cycle_text(program: Program, keys: Sequence[tuple[str, ...]]) -> str:
  """Returns which value needs itself, through which others, and the lines that set these."""
  names = [  # A macro is a function in the scope of its name.
    "/".join(scopes) if selector == gin_internals.MACRO else selector.rpartition(".")[2]
    for selector, *scopes in keys
  ]
  needed = ((getattr(v, "last_name", getattr(v, "name", "")), b) for v, b in program.values())
  lines = [
    f"  {binding.source}"
    for name, binding in needed
    if name in names and (binding.macro or binding.key[1]) in names
  ]
  return "\n".join([f"{names[0]} needs itself: {' → '.join(names)}", *lines])


def unused_bindings(
  program: Program, function: Callable[..., Any], arguments: Collection[str] | None = None
) -> list[Binding]:
  """Returns the effective bindings that neither `function` nor anything built for it reads.

  Only functions that gin files refer to count as readers. Gin passes nothing to a function that
  Python code calls itself, unless the function is decorated with `gin.configurable` where it is
  defined. Bindings of decorated functions are never reported.

  Args:
    program: the statements, which have been bound.
    function: the run.
    arguments: the arguments that it uses; None for all.
  """
  read = {
    ("/".join(reached.scopes[:n]), reached.configurable.selector)
    for reached in reached_from(function, with_methods=True, arguments=arguments)
    for n in range(len(reached.scopes) + 1)
  }
  macros: Collection[str] = program.macros_used()
  if arguments is not None:
    macros = [scope for scope, selector in read if selector == gin_internals.MACRO]
    read.discard(("", gin_internals.configurable_of(function).selector))
  bound_at: dict[tuple[str, ...], tuple[str, str]] = {
    (scope, selector.rpartition(".")[2], argument): (scope, selector)
    for (scope, selector), bound in gin_internals.all_bindings().items()
    for argument in bound
  }

  def is_read(binding: Binding) -> bool:
    if binding.macro is not None:
      return binding.macro in macros
    key = bound_at.get(binding.key)
    if key is None:
      return binding.key[1:] not in RETIRED_ARGUMENTS
    return key in read or _is_decorated(key[1])

  return [binding for binding in program.effective_bindings().values() if not is_read(binding)]


def _is_decorated(selector: str) -> bool:
  """Returns whether a function's module contains gin's wrapper of it, so that every call reads bindings."""
  (configurable,) = gin_internals.find_configurables(selector)
  module = sys.modules.get(getattr(configurable.wrapped, "__module__", ""))
  name = getattr(configurable.wrapped, "__name__", "")
  return getattr(module, name, None) is configurable.wrapper
