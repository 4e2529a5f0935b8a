"""Actions, which users write: they see metrics and can end a run."""

from __future__ import annotations

import abc
import collections
import enum
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging
from clu import values as clu_values
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
  """Ends the run when none of a metric's last `patience` values improves on the one before (as T5X)."""

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
      patience: the number of values in a row that are compared, each with the one before it; less than
        2 counts as 2.
      atol: the absolute change that a value must exceed to be an improvement.
      rtol: the change relative to the previous value that is added to `atol`.

    Raises:
      ValueError: `mode` is neither "min" nor "max".
    """
    if mode not in ("min", "max"):
      raise ValueError(f"EarlyStoppingAction.mode must be 'min' or 'max', got {mode!r}")
    self._task, self._metric = metric
    self._sign = 1.0 if mode == "max" else -1.0
    self._atol, self._rtol = atol, rtol
    self._last_values: collections.deque[float] = collections.deque(maxlen=max(patience, 2))

  def run(self, train_state: TrainState, metrics_by_task: MetricsByTask) -> bool:
    """Returns whether there are `patience` values, and none of them improves on the one before."""
    value = _value(metrics_by_task, self._task, self._metric)
    if value is None:
      return False
    self._last_values.append(value)
    if len(self._last_values) < (self._last_values.maxlen or 0):
      return False
    return not any(
      self._sign * (after - before) > self._atol + self._rtol * abs(before)
      for before, after in itertools.pairwise(self._last_values)
    )


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
  ending = [type(action).__name__ for action, vote in zip(chosen, votes, strict=True) if vote]
  if ending:
    names = " and ".join(ending)
    logging.warning("the run ends here because of %s; the same command would continue it", names)
  return bool(chosen) and bool(multihost_utils.broadcast_one_to_all(np.array(bool(ending))))


def _value(metrics_by_task: MetricsByTask, task: str, metric: str) -> float | None:
  values = metrics_by_task.get(task, {})
  value = values.get(metric)
  if isinstance(value, clu_values.Scalar):
    return float(np.asarray(value.value))
  if isinstance(value, (float, np.floating)):
    return float(value)
  logging.warning("task %r has no number as its metric %r; it has %s", task, metric, dict(values))
  return None
