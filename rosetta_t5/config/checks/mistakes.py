"""Likely mistakes in bindings: misspelt names, a missing `()`."""

from __future__ import annotations

from rosetta_t5.config.language.statements import COMMAND_LINE, Program, Reference, leaves
from rosetta_t5.user_errors import ConfigError, did_you_mean

# The similarity above which a name is taken for a misspelling, such as TRAIN_STEP of TRAIN_STEPS.
_SAME_NAME_SIMILARITY = 0.85
# Functions of gin_utils. They exist for the values that they return.
_CALCULATIONS = ("bool_fn", "steps_of", "string_split_fn", "sum_fn")


def check_spelling(program: Program) -> None:
  """Raises ConfigError for a misspelt macro or scope on the command line.

  Gin would accept `--gin.TRAIN_STEP=5` as a new macro and `--gin.trian/…` as a new scope, and the run
  would ignore both.
  """
  values = (value for binding in program.all_bindings() for value in leaves(binding.value))
  scopes = {value.scope for value in values if isinstance(value, Reference)} - {""}
  macros = program.macros_used()
  for binding in program.all_bindings():
    if binding.source.file != COMMAND_LINE:
      continue
    if binding.macro is not None:
      kind, name, known = "macro", binding.macro, set(macros)
    else:
      kind, name, known = "scope", binding.scope, scopes
    is_unused = name and name not in known
    hint = did_you_mean(name, known, cutoff=_SAME_NAME_SIMILARITY) if is_unused else ""
    if hint:
      raise ConfigError(f"the {kind} {name!r} is never used.{hint}\n  {binding.source}")


def check_calls(program: Program) -> None:
  """Raises ConfigError if `()` is missing after a function of gin_utils that calculates a value."""
  lines = [
    f"{value} is the function itself: write {value}() for the value that it returns\n"
    f"  {binding.source}"
    for value, binding in program.values()
    if isinstance(value, Reference) and not value.evaluate and value.last_name in _CALCULATIONS
  ]
  if lines:
    raise ConfigError("\n".join(lines))
