"""Metrics of GLUE: accuracy, F1, Matthews' and the two correlation coefficients, all in percent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def accuracy(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
  """Returns {"accuracy"}: how many predictions equal their targets."""
  return {"accuracy": _percent_equal(targets, predictions)}


def sequence_accuracy(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
  """Returns {"sequence_accuracy"}: how many texts equal their targets."""
  return {"sequence_accuracy": _percent_equal(targets, predictions)}


def f1_score_with_invalid(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
  """Returns {"f1"} of class 1; a prediction that is neither 0 nor 1 counts as the wrong one."""
  wanted, given = np.asarray(targets), np.array(predictions)
  invalid = (given != 0) & (given != 1)
  given[invalid] = 1 - wanted[invalid]
  hits = np.sum((given == 1) & (wanted == 1))
  named = np.sum(given == 1) + np.sum(wanted == 1)
  return {"f1": 100 * float(2 * hits / named) if named else 0.0}


def matthews_corrcoef(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
  """Returns {"matthews_corrcoef"}, for any number of classes (Gorodkin 2004); 0 if undefined."""
  wanted, given = np.asarray(targets), np.asarray(predictions)
  classes = np.union1d(wanted, given)
  truth = np.array([np.sum(wanted == c) for c in classes], np.float64)
  guess = np.array([np.sum(given == c) for c in classes], np.float64)
  total, right = float(len(wanted)), float(np.sum(wanted == given))
  scale = np.sqrt((total**2 - guess @ guess) * (total**2 - truth @ truth))
  return {
    "matthews_corrcoef": float(100 * (right * total - truth @ guess) / scale) if scale else 0.0
  }


def pearson_corrcoef(targets: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
  """Returns {"pearson_corrcoef"}; NaN if either side is constant."""
  return {"pearson_corrcoef": _correlation(np.asarray(targets), np.asarray(predictions))}


def spearman_corrcoef(targets: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
  """Returns {"spearman_corrcoef"}: Pearson's, of the ranks."""
  return {"spearman_corrcoef": _correlation(_ranks(targets), _ranks(predictions))}


def _percent_equal(targets: Sequence[Any], predictions: Sequence[Any]) -> float:
  equal = [bool(t == p) for t, p in zip(targets, predictions, strict=True)]
  return 100 * sum(equal) / len(equal)


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
  a, b = a - a.mean(dtype=np.float64), b - b.mean(dtype=np.float64)
  scale = np.sqrt((a @ a) * (b @ b))
  return float(100 * (a @ b) / scale) if scale else float("nan")


def _ranks(values: Sequence[float]) -> np.ndarray:
  """Ranks from 1; equal values share the mean of theirs."""
  _, inverse, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
  last = np.cumsum(counts)
  return ((2 * last - counts + 1) / 2)[inverse]
