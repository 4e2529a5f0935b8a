"""Writes the configuration of a run down, so that it can be run again."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import gin
import jax


def get_gin_config_str(show_provenance: bool = False) -> str:
  """Returns the configuration as gin (T5X: get_gin_config_str).

  It holds each binding, and the defaults of what has been called so far: parsed again, it
  configures the same run.

  Raises:
    ValueError: `show_provenance`, which T5X takes from a gin that no package index has.
  """
  if show_provenance:
    raise ValueError("gin-config 0.5.0 keeps no provenance: leave show_provenance at False.")
  with gin.config._OPERATIVE_CONFIG_LOCK:
    in_use = dict(gin.config._OPERATIVE_CONFIG)
    keys = [*gin.config._CONFIG, *(key for key in in_use if key not in gin.config._CONFIG)]
    merged = {key: gin.config._CONFIG.get(key, {}) | in_use.get(key, {}) for key in keys}
    return gin.config._config_str(merged)


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
