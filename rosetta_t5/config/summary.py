"""Writes the configuration of a run as a gin file that repeats the run."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Container
from typing import Any, Protocol

import gin
import jax

from rosetta_t5.config.language import gin_internals


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
  bound = gin_internals.all_bindings()
  values = {key: dict(arguments) for key, arguments in bound.items()}
  for (scope, selector), arguments in gin_internals.arguments_in_use().items():
    values.setdefault(_binding_scope(scope, selector, bound), {}).update(arguments)
  return gin_internals.format_bindings(values)


def _binding_scope(scope: str, selector: str, bound: Container[tuple[str, str]]) -> tuple[str, str]:
  """Returns the innermost enclosing scope in which a function has bindings, else the outermost.

  Gin opens a scope for each macro and would write OPTIMIZER/adafactor.Adafactor.decay_rate. In a
  file that repeats the run, that would silently win over adafactor.Adafactor.decay_rate.
  """
  while scope and (scope, selector) not in bound:
    scope = scope.rpartition("/")[0]
  return scope, selector


def summarize_gin_config(model_dir: str, summary_writer: Any, step: int) -> None:
  """Writes MODEL_DIR/config.gin, and TensorBoard text if there is a writer (T5X's contract).

  Only process 0 writes. The file is replaced as a whole, so no reader sees half of it.

  Args:
    model_dir: the run's folder; created if absent.
    summary_writer: a clu MetricWriter, or None.
    step: the training step of the text in TensorBoard.
  """
  if jax.process_index() != 0:
    return
  text = get_gin_config_str()
  folder = pathlib.Path(model_dir)
  folder.mkdir(parents=True, exist_ok=True)
  draft = folder / f".config.gin.{os.getpid()}"
  draft.write_text(text, encoding="utf-8")
  draft.replace(folder / "config.gin")
  if summary_writer is not None:
    summary_writer.write_texts(step, {"config": gin.markdown(text)})
    summary_writer.flush()
