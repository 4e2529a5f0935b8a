"""Reads, binds and checks a whole configuration, and returns the function that it configures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import gin

from rosetta_t5.config.checks.completeness import check_arguments, check_macros, check_required
from rosetta_t5.config.checks.mistakes import check_calls, check_spelling
from rosetta_t5.config.checks.references import check_cycles
from rosetta_t5.config.checks.values import check_values
from rosetta_t5.config.language.binding import bind
from rosetta_t5.config.language.statements import Program, read_program
from rosetta_t5.user_errors import Problems


def parse_gin_flags(
  gin_search_paths: Sequence[str],
  gin_files: Sequence[str],
  gin_bindings: Sequence[str],
  skip_unknown: bool | Sequence[str] = False,
  finalize_config: bool = True,
) -> None:
  """Parses gin files, then bindings; later ones win (T5X: gin_utils.parse_gin_flags).

  Args:
    gin_search_paths: folders that are searched for files and includes, before the recipes.
    gin_files: gin files, each absolute or found through the search paths.
    gin_bindings: single statements such as "BATCH_SIZE = 8".
    skip_unknown: skip imports and bindings of names that do not exist: all, or only these names.
    finalize_config: check that nothing required is missing, and lock the configuration.

  Raises:
    ConfigError: something is missing, misspelt or invalid. The text names the file and the line.
  """
  program = read_program(gin_files, gin_bindings, gin_search_paths)
  if finalize_config:
    check_required(program)
  problems = bind(program, skip_unknown=skip_unknown)
  if finalize_config:
    check_bound(program, None, problems)
  problems.raise_if_any()
  if finalize_config:
    gin.finalize()
  for line in gin.config_str().splitlines():
    logging.getLogger(__name__).info("%s", line)


def configure(program: Program, function: Callable[..., Any]) -> Callable[..., Any]:
  """Binds a whole program, checks it, and returns `function` as gin configures it.

  Args:
    program: the statements.
    function: the function that will run.

  Raises:
    ConfigError: lists all that is wrong.
  """
  problems = bind(program, function)
  check_bound(program, function, problems)
  problems.raise_if_any()
  gin.finalize()
  return gin.get_configurable(function)


def check_bound(program: Program, function: Callable[..., Any] | None, problems: Problems) -> None:
  """Collects what is misspelt, missing, or has a wrong type or range in a program that has been bound.

  Args:
    program: the statements.
    function: the function that will run, if known.
    problems: those of binding; those that are found here are added.

  Raises:
    ConfigError: a value needs itself, so nothing else can be checked.
  """
  all_bound = not problems.messages
  check_cycles(program)
  for check in (check_spelling, check_macros, check_calls):
    with problems.collect():
      check(program)
  check_values(program, problems)
  # Arguments that could not be bound are not reported as missing too.
  if function is not None and all_bound:
    with problems.collect():
      check_arguments(program, function)
