"""Refuses what the command line sets and nothing uses, where something like it is used."""

from __future__ import annotations

from collections.abc import Collection

from rosetta_t5.config.errors import ConfigError, near
from rosetta_t5.config.language.statements import COMMAND_LINE, Binding, Program, Reference, leaves

# How alike two names are when one is surely a slip of the other: TRAIN_STEP, TRAIN_STEPS.
_ALIKE = 0.85


def check_spelling(program: Program) -> None:
  """Raises ConfigError for a misspelt macro or scope on the command line.

  To gin `--gin.TRAIN_STEP=5` is a new macro and `--gin.trian/…` a new scope; it sets them, and
  the run goes on without.
  """
  macros, scopes = program.macros_used(), _scopes_used(program)
  for binding in program.bindings_in_order():
    if binding.place.file == COMMAND_LINE:
      kind, name, known = _what_it_names(binding, macros, scopes)
      hint = near(name, known, cutoff=_ALIKE) if name and name not in known else ""
      if hint:
        raise ConfigError(f"the {kind} {name!r} is used nowhere.{hint}\n  {binding.place}")


def _what_it_names(
  binding: Binding, macros: Collection[str], scopes: Collection[str]
) -> tuple[str, str, Collection[str]]:
  if binding.macro is not None:
    return "macro", binding.macro, macros
  return "scope", binding.scope, scopes


def _scopes_used(program: Program) -> set[str]:
  values = (v for binding in program.bindings_in_order() for v in leaves(binding.value))
  return {v.name.rpartition("/")[0] for v in values if isinstance(v, Reference)} - {""}
