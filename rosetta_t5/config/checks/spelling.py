"""Refuses a macro or scope of the command line that nothing uses, if a similar one is used."""

from __future__ import annotations

from collections.abc import Collection

from rosetta_t5.config.errors import ConfigError, did_you_mean
from rosetta_t5.config.language.statements import COMMAND_LINE, Binding, Program, Reference, leaves

# The similarity above which one name is surely a misspelling of the other: TRAIN_STEP, TRAIN_STEPS.
_SAME_NAME_SIMILARITY = 0.85


def check_spelling(program: Program) -> None:
  """Raises ConfigError for a misspelt macro or scope on the command line.

  For gin, `--gin.TRAIN_STEP=5` is a new macro and `--gin.trian/…` a new scope: it would set them,
  and the run would ignore them.
  """
  macros, scopes = program.macros_used(), _scopes_used(program)
  for binding in program.all_bindings():
    if binding.source.file == COMMAND_LINE:
      kind, name, known = _macro_or_scope(binding, macros, scopes)
      is_unused = name and name not in known
      hint = did_you_mean(name, known, cutoff=_SAME_NAME_SIMILARITY) if is_unused else ""
      if hint:
        raise ConfigError(f"the {kind} {name!r} is never used.{hint}\n  {binding.source}")


def _macro_or_scope(
  binding: Binding, macros: Collection[str], scopes: Collection[str]
) -> tuple[str, str, Collection[str]]:
  if binding.macro is not None:
    return "macro", binding.macro, macros
  return "scope", binding.scope, scopes


def _scopes_used(program: Program) -> set[str]:
  values = (value for binding in program.all_bindings() for value in leaves(binding.value))
  return {value.scope for value in values if isinstance(value, Reference)} - {""}
