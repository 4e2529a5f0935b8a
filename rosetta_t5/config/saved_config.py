"""The configuration that a run writes into MODEL_DIR, and how a later one in the same folder differs."""

import os
import pathlib
from typing import Any

import gin
import jax

from rosetta_t5 import terminal
from rosetta_t5.config.language import gin_internals, statements
from rosetta_t5.config.language.gin_internals import all_bindings
from rosetta_t5.config.model_file import write_model_file
from rosetta_t5.files import write_atomically
from rosetta_t5.user_errors import ConfigError


def get_gin_config_str(show_provenance: bool = False) -> str:
  """Returns the configuration as gin (T5X: get_gin_config_str).

  It contains every binding, and the defaults of the functions called so far. Parsed again, it
  configures the same run.

  Raises:
    ValueError: `show_provenance` is set. It needs an unpublished version of gin that T5X used.
  """
  if show_provenance:
    raise ValueError("gin-config records no provenance: leave show_provenance at False.")
  return gin_internals.format_bindings(_arguments())


def bindings_of(function: Any) -> dict[str, Any]:
  """Returns the arguments that gin binds for calls of a function; {} if it has none."""
  try:
    return gin.get_bindings(function, resolve_references=False)
  except ValueError:  # gin does not know the function
    return {}


def _arguments() -> dict[gin_internals.ScopeAndName, dict[str, Any]]:
  """Returns every binding, and the defaults of the functions called so far."""
  bound = gin_internals.all_bindings()
  values = {key: dict(arguments) for key, arguments in bound.items()}
  for (scope, selector), arguments in gin_internals.arguments_in_use().items():
    # Gin opens a scope for each macro and would write OPTIMIZER/adafactor.Adafactor.decay_rate. In a file that
    # repeats the run, that would silently win over adafactor.Adafactor.decay_rate. The innermost enclosing
    # scope in which the function has bindings is used, else the outermost.
    while scope and (scope, selector) not in bound:
      scope = scope.rpartition("/")[0]
    values.setdefault((scope, selector), {}).update(arguments)
  return values


def summarize_gin_config(model_dir: str, summary_writer: Any, step: int) -> None:
  """Writes MODEL_DIR/config.gin, and TensorBoard's text if there is a writer (T5X).

  A training run also gets model.json (see `model_file`). Only process 0 writes. A file is replaced as a
  whole, so no reader sees half of it.

  Args:
    model_dir: the run's folder; created if absent.
    summary_writer: a clu MetricWriter, or None.
    step: the training step of the text in TensorBoard.
  """
  if jax.process_index() != 0:
    return
  text = get_gin_config_str()
  folder = pathlib.Path(model_dir)
  with terminal.optional_output("config.gin or model.json"):
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "config.gin", text)
    write_model_file(folder)
  if summary_writer is not None:
    summary_writer.write_texts(step, {"config": gin.markdown(text)})
    summary_writer.flush()


def changes_since(
  folder: str | os.PathLike[str], program: statements.Program | None = None
) -> list[str]:
  """Returns a line for each value that this run and FOLDER/config.gin set differently.

  The list is empty if there is no such file, and if this run does not use gin.

  Args:
    folder: MODEL_DIR, where the previous run wrote its configuration.
    program: the gin files of this run; None for the bindings that gin holds.
  """
  file = pathlib.Path(folder) / "config.gin"
  if not file.is_file() or not (program or all_bindings()):
    return []
  try:
    before = statements.read_program([str(file)]).effective_bindings()
    now = (program or statements.read_program([], [get_gin_config_str()])).effective_bindings()
  except ConfigError as error:
    return [f"{file} cannot be compared: {str(error).splitlines()[0]}"]
  values = {
    now[key].name: (without_modules(before[key].value), without_modules(now[key].value))
    for key in before
    if key in now
  }
  return [f"{name}: {old!r} → {new!r}" for name, (old, new) in values.items() if old != new]


def without_modules(value: Any) -> Any:
  """Returns a value whose references have no modules, because each file has its own aliases."""

  def without_module(leaf: Any) -> Any:
    if not isinstance(leaf, statements.Reference):
      return leaf
    scope = f"{leaf.scope}/" if leaf.scope else ""
    return statements.Reference(scope + leaf.last_name, leaf.evaluate)

  return statements.map_leaves(without_module, value)
