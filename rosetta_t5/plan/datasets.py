"""Describes and checks a run's datasets and vocabulary without reading any example."""

from __future__ import annotations

import os
from typing import Any

from rosetta_t5.config.dry_run import Rows
from rosetta_t5.data.pipeline.task_lookup import find_task_or_mixture

# The arguments of runs that are datasets, and what a run does with each.
_DATASETS = {
  "train_dataset_cfg": "trains on",
  "train_eval_dataset_cfg": "loss on",
  "infer_eval_dataset_cfg": "predicts",
  "dataset_cfg": "reads",
}


def data_rows(plan: Any) -> Rows:
  """Returns a row for each dataset of a run.

  Raises:
    ValueError: a module, a task or a vocabulary's file does not exist.
  """
  datasets = {use: plan[argument] for argument, use in _DATASETS.items() if plan[argument]}
  rows = [(use, _dataset_text(cfg)) for use, cfg in datasets.items()]
  for cfg in datasets.values():
    find_task_or_mixture(cfg)
  _check_vocabulary_file(getattr(plan["model"], "input_vocabulary", None))
  return rows


def _dataset_text(cfg: Any) -> str:
  lengths = ", ".join(f"{name} {n}" for name, n in (cfg.task_feature_lengths or {}).items())
  parts = [
    f"{cfg.name}[{cfg.split}]",
    lengths or "as long as the longest example",
    f"batches of {cfg.batch_size}",
    *(["packed"] if cfg.pack else []),
    *(["from its cache"] if cfg.use_cached else []),
  ]
  return ", ".join(parts)


def _check_vocabulary_file(vocabulary: Any) -> None:
  """Raises ValueError if the path of a SentencePiece model is local and there is no such file."""
  if type(vocabulary).__name__ != "SentencePieceVocabulary":
    return  # a subclass may create its file when it is first used
  path = vocabulary.sentencepiece_model_file
  if "://" in path or os.path.isfile(path):
    return
  raise ValueError(
    f"there is no SentencePiece model {path!r} (looked at {os.path.abspath(path)}): set "
    "seqio.SentencePieceVocabulary.sentencepiece_model_file"
  )
