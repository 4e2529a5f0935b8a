"""Actions: users' own code that sees the metrics during training and can end the run."""

from __future__ import annotations

import abc
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from rosetta_t5.argument_types import NonNegative, NonNegativeNumber
from rosetta_t5.training.train_state import TrainState

MetricsByTask = Mapping[str, Mapping[str, Any]]


class ActionMode(enum.Enum):
  """The kind of metrics that an action sees."""

  TRAIN = 1
  TRAIN_EVAL = 2
  INFER_EVAL = 3


class BaseAction(abc.ABC):
  """A user's reaction to metrics (T5X: BaseAction)."""

  @abc.abstractmethod
  def run(self, train_state: TrainState, metrics_by_task: MetricsByTask) -> bool:
    """Sees the metrics of each task; returns True to end the run."""


class EarlyStoppingAction(BaseAction):
  """Ends the run when a metric has not improved for `patience` evaluations in a row."""

  def __init__(
    self,
    metric: tuple[str, str],
    mode: str,
    patience: NonNegative = 3,
    atol: NonNegativeNumber = 0.0,
    rtol: NonNegativeNumber = 0.0,
  ):
    """Builds the action.

    Args:
      metric: (name of the task, name of the metric).
      mode: "min" if lower values are better, else "max".
      patience: the number of evaluations without improvement that ends the run.
      atol: the absolute change that counts as an improvement.
      rtol: the change relative to the best value that counts as an improvement, added to `atol`.

    Raises:
      ValueError: `mode` is neither "min" nor "max".
    """
    if mode not in ("min", "max"):
      raise ValueError(f"EarlyStoppingAction.mode must be 'min' or 'max', got {mode!r}")
    self._task, self._metric = metric
    self._sign = 1.0 if mode == "max" else -1.0
    self._patience, self._atol, self._rtol = patience, atol, rtol
    self._best = -math.inf
    self._without_improvement = 0

  def run(self, train_state: TrainState, metrics_by_task: MetricsByTask) -> bool:
    """Returns whether there were `patience` evaluations without improvement."""
    value = _value(metrics_by_task, self._task, self._metric)
    if value is None:
      return False
    needed = self._atol if math.isinf(self._best) else self._atol + self._rtol * abs(self._best)
    if self._sign * value > self._best + needed:
      self._best, self._without_improvement = self._sign * value, 0
    else:
      self._without_improvement += 1
    return self._without_improvement >= self._patience


class TerminateOnNanAction(BaseAction):
  """Ends the run when a metric of a task is NaN or infinite."""

  def __init__(self, task: str, metric: str = "loss"):
    """Builds the action for one metric of one task."""
    self._task, self._metric = task, metric

  def run(self, train_state: TrainState, metrics_by_task: MetricsByTask) -> bool:
    """Returns whether the metric is not finite."""
    value = _value(metrics_by_task, self._task, self._metric)
    return value is not None and not math.isfinite(value)


def run_actions(
  mode: ActionMode,
  actions: Mapping[Any, Sequence[BaseAction]] | None,
  train_state: TrainState,
  metrics_by_task: MetricsByTask,
) -> bool:
  """Runs the actions of one mode; returns True if any of them ends the run.

  All processes return the result of process 0.
  """
  chosen = [*(actions or {}).get(mode, ()), *(actions or {}).get(mode.name, ())]
  # A list, so that all actions run even if one of them ends the run.
  votes = [action.run(train_state, metrics_by_task) for action in chosen]
  return bool(chosen) and bool(multihost_utils.broadcast_one_to_all(np.array(any(votes))))


def _value(metrics_by_task: MetricsByTask, task: str, metric: str) -> float | None:
  values = metrics_by_task.get(task, {})
  if metric not in values:
    logging.warning("task %r has no metric %r; it has %s", task, metric, sorted(values))
    return None
  value = values[metric]
  return float(np.asarray(getattr(value, "value", value)))
