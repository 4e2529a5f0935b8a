"""Checks that a run has all values that it needs, and reports all missing ones at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gin.config import Configurable

from rosetta_t5.config.checks.references import Reached, reached_from
from rosetta_t5.config.language.gin_internals import is_macro_set
from rosetta_t5.config.language.names import defaults, parameters
from rosetta_t5.config.language.statements import Macro, Program, Reference, SourceLine
from rosetta_t5.user_errors import ConfigError, did_you_mean

# Example values, for messages, of the macros that T5X's recipes leave open.
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
# Macros and runs that users usually set by including a whole file, with an example of the file.
FILES = {
  "MODEL": "t5x/examples/t5/t5_1_1/small.gin",
  "OPTIMIZER": "t5x/examples/t5/t5_1_1/small.gin",
  "VOCABULARY": "t5x/examples/t5/t5_1_1/small.gin",
  "train": "t5x/configs/runs/pretrain.gin",
}


def check_required(program: Program, reported: str = "") -> None:
  """Raises ConfigError with every value that is `%gin.REQUIRED` and set nowhere.

  A value is not missing if `reported`, the problems found before, contains a line that sets it.

  Nothing is imported for this check, so a run that lacks a value fails at once.
  """
  missing = {
    binding.name: binding.source
    for binding in program.effective_bindings().values()
    if isinstance(binding.value, Macro)
    and binding.value.name in ("gin.REQUIRED", "REQUIRED")
    and f"  {binding.name} = " not in reported
  }
  _raise_if_missing(missing, program)


def check_macros(program: Program) -> None:
  """Raises ConfigError with every macro that is used and set nowhere."""
  used = program.macros_used()
  missing = {name: source for name, source in used.items() if not is_macro_set(name)}
  _raise_if_missing(missing, program)


def check_arguments(program: Program, function: Callable[..., object]) -> None:
  """Raises ConfigError with every required argument that is missing from a call that gin will make."""
  messages = []
  for reached in reached_from(function):
    is_macro = reached.configurable.module == "gin"  # `check_macros` reports those that are not set
    is_complete = is_macro or not reached.is_called
    required = [] if is_complete else _required_arguments(reached.configurable)
    missing = [name for name in required if name not in reached.bound]
    if missing:
      messages.append(_missing_arguments_text(reached, missing, program))
  if messages:
    raise ConfigError("\n".join(messages))


def missing_run_text() -> str:
  """Returns the problem of gin files that configure no run, with a file that configures one."""
  return f"the gin files configure no run\n  for a training run: {_how_to_set('train')}"


def _raise_if_missing(missing: Mapping[str, SourceLine], program: Program) -> None:
  if not missing:
    return
  used, bindings = program.macros_used(), program.effective_bindings().values()
  unused = {b.macro for b in bindings if b.macro and b.macro not in used} - set(missing)
  lines = [f"{len(missing)} value{'s are' if len(missing) > 1 else ' is'} missing:"]
  for name, source in missing.items():
    lines += [f"  {name}, needed at {source}", f"    {_how_to_set(name)}"]
    lines += [
      f"    {macro} is set but never used." for macro in unused if did_you_mean(name, [macro])
    ]
  raise ConfigError("\n".join([*lines, "In a gin file, write the same without --gin."]))


def _how_to_set(name: str) -> str:
  if name in FILES:
    return f"--gin_file={FILES[name]}, or in your gin file: include '{FILES[name]}'"
  return f'--gin.{name}="{EXAMPLES.get(name, "…")}"'


def _required_arguments(configurable: Configurable) -> list[str]:
  """Returns the arguments without a default; none if a user's decorator may provide some of them."""
  function = configurable.wrapped
  if hasattr(function, "__wrapped__") and not function.__module__.startswith("rosetta_t5."):
    return []
  return [name for name in parameters(configurable) if name not in defaults(configurable)]


def _missing_arguments_text(reached: Reached, missing: list[str], program: Program) -> str:
  """Returns which arguments are missing, where the function is called, and the lines to add."""
  configurable = reached.configurable
  scope = "/".join(s for s in reached.scopes if not is_macro_set(s))
  name = ".".join(configurable.selector.split(".")[-2:])
  lines = [f"{name} needs {', '.join(missing)}"]
  lines += [
    f"  it is called at {binding.source}"
    for value, binding in program.values()
    if isinstance(value, Reference) and (value.scope, value.last_name) == (scope, configurable.name)
  ]
  if configurable.name in FILES:
    lines.append(f"  a file that sets them: {_how_to_set(configurable.name)}")
  if configurable.name not in FILES or len(missing) <= 3:
    lines += [f"  add: {scope}{'/' if scope else ''}{name}.{argument} = …" for argument in missing]
  return "\n".join(lines)
