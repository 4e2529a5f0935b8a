"""Hooks, which run after certain steps, and actions, which users write: they see metrics and can end a run."""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import enum
import gc
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
  return bool(chosen) and bool(multihost_utils.broadcast_one_to_all(np.array(any(votes))))


def _value(metrics_by_task: MetricsByTask, task: str, metric: str) -> float | None:
  values = metrics_by_task.get(task, {})
  value = values.get(metric)
  if isinstance(value, clu_values.Scalar):
    return float(np.asarray(value.value))
  if isinstance(value, (float, np.floating)):
    return float(value)
  logging.warning("task %r has no number as its metric %r; it has %s", task, metric, dict(values))
  return None


@dataclasses.dataclass(frozen=True)
class Hook:
  """A function that runs after certain steps.

  Attributes:
    run: called as run(step).
    period: the hook is due after each multiple of this many steps; None or 0 for never.
    steps: additional steps after which the hook is due.
    at_end: whether the hook is also due after the last step.
  """

  run: Callable[[int], object]
  period: int | None = None
  steps: Collection[int] = ()
  at_end: bool = False

  def is_due(self, step: int, last_step: int) -> bool:
    """Returns whether the hook runs after `step`."""
    is_end = self.at_end and step == last_step
    return is_end or step in self.steps or bool(self.period and step % self.period == 0)


def stopping_steps(
  first_step: int, last_step: int, hooks: Sequence[Hook], period: int | None = None
) -> Iterator[int]:
  """Yields the steps after which training stops to run hooks or to report metrics, in order.

  Args:
    first_step: the number of steps completed before.
    last_step: the number of steps completed at the end; always the last of the yielded steps.
    hooks: training stops after each step after which one of them is due.
    period: training also stops after each multiple of this many steps.
  """
  for step in range(first_step + 1, last_step + 1):
    is_regular_stop = step == last_step or (period and step % period == 0)
    if is_regular_stop or any(hook.is_due(step, last_step) for hook in hooks):
      yield step


def run_due_hooks(hooks: Sequence[Hook], step: int, last_step: int) -> None:
  """Runs the hooks that are due after `step`, in their order."""
  for hook in hooks:
    if hook.is_due(step, last_step):
      hook.run(step)


@contextlib.contextmanager
def automatic_garbage_collection(enabled: bool) -> Iterator[None]:
  """Inside a `with`, disables Python's garbage collection unless `enabled`.

  Collections at different times on different hosts would make all hosts wait for each of them.
  """
  if not enabled:
    gc.disable()
  try:
    yield
  finally:
    gc.enable()
