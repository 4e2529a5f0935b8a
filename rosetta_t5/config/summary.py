"""Writes the configuration of a run as a gin file that repeats the run."""

from __future__ import annotations

import pathlib
from collections.abc import Container, Iterator, Mapping
from typing import Any, Protocol

import gin
import jax

from rosetta_t5 import terminal
from rosetta_t5.config.language import gin_internals
from rosetta_t5.config.model_file import write_model_file
from rosetta_t5.files import write_atomically


class SummarizeConfigFn(Protocol):
  """Writes the configuration of a run (T5X's protocol)."""

  def __call__(self, model_dir: str, summary_writer: Any, step: int) -> None:
    """Writes it into MODEL_DIR and, if there is a writer, to TensorBoard at this step."""


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
    values.setdefault(_binding_scope(scope, selector, bound), {}).update(arguments)
  return values


def _binding_scope(scope: str, selector: str, bound: Container[tuple[str, str]]) -> tuple[str, str]:
  """Returns the innermost enclosing scope in which a function has bindings, else the outermost.

  Gin opens a scope for each macro and would write OPTIMIZER/adafactor.Adafactor.decay_rate. In a
  file that repeats the run, that would silently win over adafactor.Adafactor.decay_rate.
  """
  while scope and (scope, selector) not in bound:
    scope = scope.rpartition("/")[0]
  return scope, selector


def get_hyperparameters() -> dict[str, bool | int | float | str]:
  """Returns the numbers, strings and truth values of the configuration, by their names in gin.

  Those in dictionaries have the key at the end of the name: `TASK_FEATURE_LENGTHS.inputs`. A value
  that refers to a macro is left out, because the macro itself is there.
  """
  values: dict[str, bool | int | float | str] = {}
  for (scope, selector), arguments in _arguments().items():
    if selector == gin_internals.MACRO:
      values |= _flatten(scope, arguments["value"])
      continue
    name = gin_internals.shortest_name(selector)
    values |= _flatten(f"{scope}/{name}" if scope else name, arguments)
  return values


def _flatten(name: str, value: Any) -> Iterator[tuple[str, bool | int | float | str]]:
  if isinstance(value, bool | int | float | str):
    yield name, value
  elif isinstance(value, Mapping):
    for key, item in value.items():
      yield from _flatten(f"{name}.{key}", item)


def summarize_gin_config(model_dir: str, summary_writer: Any, step: int) -> None:
  """Writes MODEL_DIR/config.gin, and TensorBoard's text and HParams if there is a writer (T5X).

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
    summary_writer.write_hparams(get_hyperparameters())
    summary_writer.flush()
