"""T5's metrics: functions of targets and predictions that return {name: number}."""

from rosetta_t5.data.metrics.answers import (
  lambada,
  next_word,
  normalize_answer,
  squad,
  word_perplexity,
)
from rosetta_t5.data.metrics.classification import (
  accuracy,
  f1_score_with_invalid,
  matthews_corrcoef,
  pearson_corrcoef,
  sequence_accuracy,
  spearman_corrcoef,
)
from rosetta_t5.data.metrics.generation import bleu, rouge

__all__ = [
  "accuracy",
  "bleu",
  "f1_score_with_invalid",
  "lambada",
  "matthews_corrcoef",
  "next_word",
  "normalize_answer",
  "pearson_corrcoef",
  "rouge",
  "sequence_accuracy",
  "spearman_corrcoef",
  "squad",
  "word_perplexity",
]
