"""Follows the references of a bound configuration from the run to all that gin builds for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gin
from gin.config import Configurable

from rosetta_t5.config.language.gin_internals import configurable_of, registered_configurables
from rosetta_t5.config.language.names import bound_arguments


@dataclasses.dataclass(frozen=True)
class Reached:
  """A function or class that a run reaches through the references of its gin files.

  Attributes:
    configurable: the function or class, as gin knows it.
    scopes: the gin scopes in which it is called.
    bound: the arguments that gin binds there.
    is_called: whether gin calls it. If not, it is passed on uncalled, and its caller may give more
      arguments.
  """

  configurable: Configurable
  scopes: Sequence[str]
  bound: dict[str, Any]
  is_called: bool


def reached_from(function: Callable[..., Any], with_methods: bool = False) -> Iterator[Reached]:
  """Yields `function` and all that its bindings refer to, directly or not.

  Args:
    function: the run.
    with_methods: whether to follow the bindings of the methods of classes too.
  """
  yield from _follow(configurable_of(function), [], True, set(), with_methods)


def _follow(
  configurable: Configurable,
  scopes: Sequence[str],
  is_called: bool,
  seen: set[tuple[str, ...]],
  with_methods: bool,
) -> Iterator[Reached]:
  key = (configurable.selector, *scopes)
  if key in seen:
    return
  seen.add(key)
  bound = bound_arguments(configurable, scopes)
  yield Reached(configurable, scopes, bound, is_called)
  for reference in gin.config.iterate_references(bound):
    inner = reference.scopes or scopes
    yield from _follow(reference.configurable, inner, reference.evaluate, seen, with_methods)
  for method in registered_configurables() if with_methods else ():
    if method.is_method and method.module == configurable.selector:
      yield from _follow(method, scopes, False, seen, with_methods)
