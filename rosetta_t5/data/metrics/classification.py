"""GLUE's metrics in percent: accuracy, F1, Matthews' correlation and two correlation coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def accuracy(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
  """Returns {"accuracy"}: the share of predictions that equal their targets."""
  return {"accuracy": _percent_equal(targets, predictions)}


def sequence_accuracy(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
  """Returns {"sequence_accuracy"}: the share of texts that equal their targets."""
  return {"sequence_accuracy": _percent_equal(targets, predictions)}


def f1_score_with_invalid(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
  """Returns {"f1"} of class 1. A prediction other than 0 and 1 counts as the wrong class."""
  wanted, given = np.asarray(targets), np.array(predictions)
  invalid = (given != 0) & (given != 1)
  given[invalid] = 1 - wanted[invalid]
  true_positives = np.sum((given == 1) & (wanted == 1))
  positives = np.sum(given == 1) + np.sum(wanted == 1)
  return {"f1": 100 * float(2 * true_positives / positives) if positives else 0.0}


def matthews_corrcoef(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
  """Returns {"matthews_corrcoef"} for any number of classes (Gorodkin 2004), or 0 if undefined."""
  wanted, given = np.asarray(targets), np.asarray(predictions)
  classes = np.union1d(wanted, given)
  truth = np.array([np.sum(wanted == c) for c in classes], np.float64)
  guess = np.array([np.sum(given == c) for c in classes], np.float64)
  total, correct = float(len(wanted)), float(np.sum(wanted == given))
  scale = np.sqrt((total**2 - guess @ guess) * (total**2 - truth @ truth))
  coefficient = (correct * total - truth @ guess) / scale if scale else 0.0
  return {"matthews_corrcoef": float(100 * coefficient)}


def pearson_corrcoef(targets: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
  """Returns {"pearson_corrcoef"}, or NaN if either side is constant."""
  return {"pearson_corrcoef": _correlation(targets, predictions)}


def spearman_corrcoef(targets: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
  """Returns {"spearman_corrcoef"}, the correlation of the ranks, or NaN if either side is constant."""
  from scipy import stats

  return {"spearman_corrcoef": _correlation(stats.rankdata(targets), stats.rankdata(predictions))}


def _percent_equal(targets: Sequence[Any], predictions: Sequence[Any]) -> float:
  equal = [bool(t == p) for t, p in zip(targets, predictions, strict=True)]
  return 100 * sum(equal) / len(equal)


def _correlation(targets: Any, predictions: Any) -> float:
  """Returns Pearson's coefficient in percent, without SciPy's warning for constant values."""
  a, b = np.asarray(targets, np.float64), np.asarray(predictions, np.float64)
  a, b = a - a.mean(), b - b.mean()
  scale = np.sqrt((a @ a) * (b @ b))
  return float(100 * (a @ b) / scale) if scale else float("nan")
