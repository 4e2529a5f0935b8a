"""Checks of bindings: missing values, misspelled names, bindings that nothing reads, and cycles."""

import dataclasses
import graphlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import gin
from gin.config import Configurable

from rosetta_t5.config.language import gin_internals, statements
from rosetta_t5.config.language.binding import bound_arguments, defaults, parameters
from rosetta_t5.config.language.gin_internals import is_macro_set
from rosetta_t5.config.language.statements import COMMAND_LINE, Binding, Macro, Program, Reference
from rosetta_t5.config.t5x_surface import RETIRED_ARGUMENTS
from rosetta_t5.user_errors import OWN_PACKAGES, ConfigError, did_you_mean

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

_FOR_THE_REPORT = ("NOTES", "TAGS")  # macros that `rosetta-t5 report` shows


def check_required(program: Program) -> None:
  """Raises ConfigError with every value that is `%gin.REQUIRED` and set nowhere.

  Nothing is imported for this check, so a run that lacks a value fails at once.
  """
  required = ("gin.REQUIRED", "REQUIRED")
  bindings = program.effective_bindings().values()
  given = [b for b in bindings if isinstance(b.value, Macro) and b.value.name in required]
  _raise_if_missing({binding.name: binding.source for binding in given}, program)


def check_macros(program: Program) -> None:
  """Raises ConfigError with every macro that is used and set nowhere."""
  used = program.macros_used()
  missing = {name: source for name, source in used.items() if not is_macro_set(name)}
  _raise_if_missing(missing, program)


def _raise_if_missing(missing: Mapping[str, statements.SourceLine], program: Program) -> None:
  if not missing:
    return
  used, bindings = program.macros_used(), program.effective_bindings().values()
  unused = {b.macro for b in bindings if b.macro and b.macro not in used} - set(missing)
  lines = [f"{len(missing)} value{'s are' if len(missing) > 1 else ' is'} missing:"]
  for name, source in missing.items():
    lines += [f"  {name}, needed at {source}", f"    {_how_to_set(name)}"]
    lines += [f"    {each} is set but never used." for each in unused if did_you_mean(name, [each])]
  raise ConfigError("\n".join([*lines, "In a gin file, write the same without --gin."]))


def _how_to_set(name: str) -> str:
  if name in FILES:
    return f"--gin_file={FILES[name]}, or in your gin file: include '{FILES[name]}'"
  return f'--gin.{name}="{EXAMPLES.get(name, "…")}"'


def missing_run_text() -> str:
  """Returns the problem of gin files that configure no run, with a file that configures one."""
  return f"the gin files configure no run\n  for a training run: {_how_to_set('train')}"


def check_arguments(program: Program, function: Callable[..., object]) -> None:
  """Raises ConfigError with every required argument that is missing from a call that gin will make."""
  messages = []
  for reached in reached_from(function):
    configurable, target = reached.configurable, reached.configurable.wrapped
    is_macro = configurable.module == "gin"  # `check_macros` reports those that are not set
    # A user's decorator may provide some of the arguments.
    is_decorated = hasattr(target, "__wrapped__") and not target.__module__.startswith(OWN_PACKAGES)
    if is_macro or is_decorated or not reached.is_called:
      continue
    known = {*defaults(configurable), *reached.bound}
    missing = [name for name in parameters(configurable) if name not in known]
    if missing:
      messages.append(_missing_arguments_text(reached, missing, program))
  if messages:
    raise ConfigError("\n".join(messages))


def _missing_arguments_text(reached: "Reached", missing: list[str], program: Program) -> str:
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
  function: Callable[..., Any], arguments: Collection[str] | None = None
) -> Iterator[Reached]:
  """Yields `function` and all that its bindings, and those of the methods of classes, refer to.

  Args:
    function: the run.
    arguments: the arguments of `function` to follow; None for all.
  """
  seen: set[tuple[str, ...]] = set()
  methods = [each for each in gin_internals.registered_configurables() if each.is_method]

  def follow(configurable: Configurable, scopes: Sequence[str], called: bool) -> Iterator[Reached]:
    key = (configurable.selector, *scopes)
    if key in seen:
      return
    seen.add(key)
    bound = bound_arguments(configurable, scopes)
    yield Reached(configurable, scopes, bound, called)
    if arguments is not None and len(seen) == 1:
      bound = {name: value for name, value in bound.items() if name in arguments}
    for reference in gin.config.iterate_references(bound):
      yield from follow(reference.configurable, reference.scopes or scopes, reference.evaluate)
    for method in methods:
      if method.module == configurable.selector:
        yield from follow(method, scopes, False)

  yield from follow(gin_internals.configurable_of(function), [], True)


def check_cycles(program: Program) -> None:
  """Raises ConfigError if a macro needs itself, directly or through others: gin could not resolve it."""
  macros = {binding.macro: binding for binding in program.effective_bindings().values()}
  needed = {
    name: [leaf.name for leaf in statements.leaves(binding.value) if isinstance(leaf, Macro)]
    for name, binding in macros.items()
    if name is not None
  }
  try:
    graphlib.TopologicalSorter(needed).prepare()
  except graphlib.CycleError as error:
    names = error.args[1][::-1]
    lines = [f"  {macros[name].source}" for name in names[:-1]]
    text = f"{names[0]} needs itself: {' → '.join(names)}"
    raise ConfigError("\n".join([text, *lines])) from None


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
    for reached in reached_from(function, arguments)
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
      return binding.macro in macros or binding.macro in _FOR_THE_REPORT
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


# The similarity above which a name is taken for a misspelling, such as TRAIN_STEP of TRAIN_STEPS.
_SAME_NAME_SIMILARITY = 0.85


def check_spelling(program: Program) -> None:
  """Raises ConfigError for a misspelled macro or scope on the command line.

  Gin would accept `--gin.TRAIN_STEP=5` as a new macro and `--gin.trian/…` as a new scope, and the run
  would ignore both.
  """
  values = (value for b in program.all_bindings() for value in statements.leaves(b.value))
  scopes = {value.scope for value in values if isinstance(value, Reference)} - {""}
  macros = set(program.macros_used())
  for binding in program.all_bindings():
    is_macro = binding.macro is not None
    name, known = (binding.macro, macros) if is_macro else (binding.scope, scopes)
    if binding.source.file != COMMAND_LINE or not name or name in known:
      continue
    if hint := did_you_mean(name, known, cutoff=_SAME_NAME_SIMILARITY):
      kind = "macro" if is_macro else "scope"
      raise ConfigError(f"the {kind} {name!r} is never used.{hint}\n  {binding.source}")
