"""What a run reads: its tasks, and what can be said of them without reading any example."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Collection
from typing import Any

from rosetta_t5.config.language.unimported import NotMade, is_slow
from rosetta_t5.data import import_module
from rosetta_t5.data.pipeline.providers import find_provider

Rows = list[tuple[str, str]]

# The run's arguments that are datasets, and what a run does with each.
_DATASETS = {
  "train_dataset_cfg": "trains on",
  "train_eval_dataset_cfg": "loss on",
  "infer_eval_dataset_cfg": "predicts",
  "dataset_cfg": "reads",
}


def data_rows(plan: Any) -> Rows:
  """Returns a row for each dataset of a run, and one for its vocabulary.

  Raises:
    ValueError: a module, a task or a vocabulary's file is not there.
  """
  rows = [
    (use, _dataset_text(plan[argument]))
    for argument, use in _DATASETS.items()
    if plan[argument] is not None
  ]
  for argument in _DATASETS:
    if plan[argument] is not None:
      _check_task(plan[argument], plan.resolved.read)
  _check_vocabulary_file(getattr(plan["model"], "input_vocabulary", None))
  return rows


def _dataset_text(cfg: Any) -> str:
  task = cfg.mixture_or_task_name
  made_later = isinstance(task, NotMade)
  name = f"{task.function.rsplit('.', 1)[-1]}(…)" if made_later else cfg.name
  lengths = ", ".join(f"{name} {n}" for name, n in (cfg.task_feature_lengths or {}).items())
  parts = [
    f"{name}[{cfg.split}]",
    lengths or "as long as the longest example",
    f"batches of {cfg.batch_size}",
    *(["packed"] if cfg.pack else []),
    *(["from its cache"] if cfg.use_cached else []),
  ]
  return ", ".join(parts)


def _check_task(cfg: Any, read: Collection[str]) -> None:
  """Imports the task's module if that brings no TensorFlow, and looks the task up if it is known then.

  Args:
    cfg: the dataset.
    read: modules that were read instead of imported, any of which may register the task.
  """
  if cfg.module and is_slow(cfg.module):
    _check_exists(cfg.module)
    return
  if cfg.module:
    import_module(cfg.module)
  is_made = not isinstance(cfg.mixture_or_task_name, NotMade)
  if is_made and "seqio" in sys.modules and not set(read) - {"seqio"}:
    find_provider(cfg)


def _check_exists(module: str) -> None:
  top = module.split(".")[0]
  if importlib.util.find_spec(top) is None:
    import_module(module)


def _check_vocabulary_file(vocabulary: Any) -> None:
  """Raises ValueError if a SentencePiece model on this machine's disk is not there."""
  made = (
    vocabulary.arguments if isinstance(vocabulary, NotMade) else getattr(vocabulary, "__dict__", {})
  )
  path = made.get("sentencepiece_model_file", made.get("_sentencepiece_model_file"))
  if not isinstance(path, str) or "://" in path or os.path.isfile(path):
    return
  raise ValueError(
    f"there is no SentencePiece model {path!r} (looked at {os.path.abspath(path)}): set "
    "seqio.SentencePieceVocabulary.sentencepiece_model_file"
  )
