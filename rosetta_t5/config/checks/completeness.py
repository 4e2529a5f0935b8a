"""Whether everything that a run needs has been given; all that is missing is told at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gin

from rosetta_t5.config.errors import ConfigError, near
from rosetta_t5.config.language.names import parameters
from rosetta_t5.config.language.statements import Macro, Place, Program, Reference, leaves

# What to write for the macros that T5X's recipes leave open.
EXAMPLES = {
  "CHECKPOINT_PATH": "'/path/to/checkpoint_1000000'",
  "DROPOUT_RATE": "0.0",
  "EVAL_OUTPUT_DIR": "'/path/for/results'",
  "FILES": "['rows.jsonl']",
  "INFER_OUTPUT_DIR": "'/path/for/results'",
  "INPUTS": "'text'",
  "INITIAL_CHECKPOINT_PATH": "'/path/to/checkpoint_1000000'",
  "MIXTURE_OR_TASK_NAME": "'name_of_a_seqio_task'",
  "MODEL_DIR": "'/path/for/this/run'",
  "TASK_FEATURE_LENGTHS": "{'inputs': 512, 'targets': 128}",
  "TARGETS": "'label'",
  "TRAIN_STEPS": "10000",
}
# What a file of its own usually sets.
FILES = {
  "MODEL": "t5x/examples/t5/t5_1_1/small.gin",
  "OPTIMIZER": "t5x/examples/t5/t5_1_1/small.gin",
  "VOCABULARY": "t5x/examples/t5/t5_1_1/small.gin",
  "train": "t5x/configs/runs/pretrain.gin",
}


def check_required(program: Program) -> None:
  """Raises ConfigError with every value that is `%gin.REQUIRED` and nowhere given.

  It imports nothing, so a run that lacks something says so at once.
  """
  missing = {
    binding.name: binding.place
    for binding in program.in_force()
    if isinstance(binding.value, Macro) and binding.value.name in ("gin.REQUIRED", "REQUIRED")
  }
  _refuse_if_missing(missing, program)


def check_macros(program: Program) -> None:
  """Raises ConfigError with every macro that is used and set nowhere."""
  used = program.macros_used()
  _refuse_if_missing({name: used[name] for name in used if not _is_set(name)}, program)


def check_arguments(program: Program, function: Callable[..., Any]) -> None:
  """Raises ConfigError for arguments left open, of what will be called and all that is built for it."""
  found = _unbound(gin.config._INVERSE_REGISTRY[function], [], set())
  told = [_tell_unbound(*what, program) for what in found]
  if told:
    raise ConfigError("\n".join(told))


def _is_set(macro: str) -> bool:
  is_constant = bool(gin.config._CONSTANTS.matching_selectors(macro))
  return is_constant or (macro, "gin.macro") in gin.config._CONFIG


def _refuse_if_missing(missing: Mapping[str, Place], program: Program) -> None:
  if not missing:
    return
  used = program.macros_used()
  unused = {b.macro for b in program.in_force() if b.macro and b.macro not in used} - set(missing)
  lines = [f"{len(missing)} value{'s are' if len(missing) > 1 else ' is'} missing:"]
  for name, place in missing.items():
    lines += [f"  {name}, needed at {place}", f"    {_how_to_give(name)}"]
    lines += [f"    {other} is set, and used nowhere." for other in unused if near(name, [other])]
  raise ConfigError("\n".join([*lines, "In a gin file the same stands without --gin."]))


def _how_to_give(name: str) -> str:
  if name in FILES:
    return f"--gin_file={FILES[name]}, or in your gin file: include '{FILES[name]}'"
  return f'--gin.{name}="{EXAMPLES.get(name, "…")}"'


_Unbound = tuple[gin.config.Configurable, list[str], list[str]]


def _unbound(
  configurable: gin.config.Configurable, scopes: list[str], seen: set[Any], called: bool = True
) -> Iterator[_Unbound]:
  """Yields what will be called without an argument it needs: the function, scopes, arguments.

  Follows references as gin will: `@f()` is called with nothing but its bindings; `@f` is handed
  on, and whoever calls it may give the rest.
  """
  if (configurable.selector, *scopes) in seen:
    return
  seen.add((configurable.selector, *scopes))
  bound = gin.config._get_bindings(configurable.selector, scope_components=scopes)
  needed = [n for n in _needed(configurable) if n not in bound] if called else []
  if needed:
    yield configurable, scopes, needed
  for reference in gin.config.iterate_references(bound):
    inner = reference.scopes or scopes
    yield from _unbound(reference.configurable, inner, seen, called=reference.evaluate)


def _needed(configurable: gin.config.Configurable) -> list[str]:
  """The arguments without a default; none if a decorator may give some of them."""
  if hasattr(configurable.wrapped, "__wrapped__"):
    return []
  no_default = (inspect.Parameter.empty, gin.REQUIRED)
  return [name for name, p in parameters(configurable).items() if p.default in no_default]


def _tell_unbound(
  configurable: gin.config.Configurable, scopes: list[str], needed: list[str], program: Program
) -> str:
  """Says what lacks an argument, where it is called, and the lines to add."""
  scope = "/".join(s for s in scopes if (s, "gin.macro") not in gin.config._CONFIG)
  name = ".".join(configurable.selector.split(".")[-2:])
  lines = [f"{name} needs {', '.join(needed)}"]
  lines += [f"  it is called at {place}" for place in _calls(scope, configurable.name, program)]
  if configurable.name in FILES:
    lines.append(f"  what it usually needs: {_how_to_give(configurable.name)}")
  if configurable.name not in FILES or len(needed) <= 3:
    lines += [f"  add: {scope}{'/' if scope else ''}{name}.{argument} = …" for argument in needed]
  return "\n".join(lines)


def _calls(scope: str, name: str, program: Program) -> list[Place]:
  """Where `@scope/….name()` stands."""
  return [
    binding.place
    for binding in program.in_force()
    for value in leaves(binding.value)
    if isinstance(value, Reference)
    and value.name.rsplit(".", 1)[-1] == name
    and value.name.rpartition("/")[0] == scope
  ]
