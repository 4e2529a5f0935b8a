"""Writes the configuration of a run down, so that it can be run again."""

from __future__ import annotations

import os
import pathlib
from typing import Any, Protocol

import gin
import jax


class SummarizeConfigFn(Protocol):
  """Writes a run's configuration down (T5X's protocol)."""

  def __call__(self, model_dir: str, summary_writer: Any, step: int) -> None:
    """Writes it into MODEL_DIR, and with a writer as TensorBoard text of a step."""


def get_gin_config_str(show_provenance: bool = False) -> str:
  """Returns the configuration as gin (T5X: get_gin_config_str).

  It holds each binding, and the defaults of what has been called so far: parsed again, it
  configures the same run.

  Raises:
    ValueError: `show_provenance`, which T5X takes from a gin that no package index has.
  """
  if show_provenance:
    raise ValueError("gin-config 0.5.0 keeps no provenance: leave show_provenance at False.")
  values = {key: dict(bound) for key, bound in gin.config._CONFIG.items()}
  with gin.config._OPERATIVE_CONFIG_LOCK:
    for (scope, selector), in_use in gin.config._OPERATIVE_CONFIG.items():
      values.setdefault(_bound_at(scope, selector), {}).update(in_use)
  return gin.config._config_str(values)


def _bound_at(scope: str, selector: str) -> tuple[str, str]:
  """Where the values in use in a scope come from: the innermost scope that binds any.

  Gin opens a scope for each macro, and would write OPTIMIZER/adafactor.Adafactor.decay_rate; in a
  file to be run again that would silently win over adafactor.Adafactor.decay_rate.
  """
  while scope and (scope, selector) not in gin.config._CONFIG:
    scope = scope.rpartition("/")[0]
  return scope, selector


def summarize_gin_config(model_dir: str, summary_writer: Any, step: int) -> None:
  """Writes MODEL_DIR/config.gin, and TensorBoard text if there is a writer (T5X's contract).

  Process 0 alone writes. The file is replaced as a whole: a reader never sees half of it.

  Args:
    model_dir: the run's folder; created if absent.
    summary_writer: a clu MetricWriter, or None.
    step: the training step to file the text under.
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
