"""Actions that end a run: early stopping, and metrics that are not finite."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rosetta_t5.training.actions import (
  ActionMode,
  BaseAction,
  EarlyStoppingAction,
  TerminateOnNanAction,
  run_actions,
)


def stops_at(action, values, metric="loss"):
  """Returns the index of the value at which the action ends the run; None if it never does."""
  for number, value in enumerate(values):
    if action.run(None, {"task": {metric: float(value)}}):
      return number
  return None


@pytest.mark.parametrize(
  ("settings", "values", "stop"),
  [
    ({"mode": "min"}, [3, 2, 2, 2, 2], 3),
    ({"mode": "min"}, [3, 2, 2, 1, 1, 1], 5),
    ({"mode": "min", "patience": 1}, [3, 4], 1),
    ({"mode": "min", "patience": 2}, [3, 2.9, 2.8, 2.8], 3),
    ({"mode": "max"}, [0.1, 0.2, 0.1, 0.1], 3),
    ({"mode": "max", "patience": 2}, [0.1, 0.2, 0.3, 0.4], None),
    ({"mode": "max", "patience": 1}, [-3.0, -2.0, -1.0], None),
    ({"mode": "min", "atol": 0.5}, [3, 2.4, 2.0, 1.6], 3),
    ({"mode": "min", "rtol": 0.1, "patience": 2}, [10, 8.9, 8.1], 2),
    ({"mode": "max", "patience": 1}, [0.5, math.nan], 1),
  ],
)
def test_early_stopping_compares_each_of_the_last_values_with_the_one_before(
  settings, values, stop
):
  action = EarlyStoppingAction(("task", "loss"), **settings)
  assert stops_at(action, values) == stop


def test_early_stopping_rejects_an_unknown_mode():
  with pytest.raises(
    ValueError, match=r"EarlyStoppingAction.mode must be 'min' or 'max', got 'mim'"
  ):
    EarlyStoppingAction(("task", "loss"), "mim")


def test_missing_metric_is_logged_and_does_not_end_the_run(caplog):
  action = EarlyStoppingAction(("task", "loss"), "min", patience=1)
  assert stops_at(action, [1.0, 1.0], metric="accuracy") is None
  assert "task 'task' has no number as its metric 'loss'; it has {'accuracy': " in caplog.text
  assert not TerminateOnNanAction("other").run(None, {"task": {"loss": math.nan}})
  assert not TerminateOnNanAction("task").run(None, {"task": {"loss": "a text"}})
  assert "it has {'loss': 'a text'}" in caplog.text


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32("nan")])
def test_nonfinite_metric_ends_the_run(value):
  assert stops_at(TerminateOnNanAction("task"), [1.0, 2.0, value]) == 2
  assert stops_at(TerminateOnNanAction("task", "z_loss"), [0.0, value], metric="z_loss") == 1


class Remember(BaseAction):
  """Remembers what it has seen, and ends the run if `stop` is set."""

  def __init__(self, stop=False):
    self.shown, self.stop = [], stop

  def run(self, train_state, metrics_by_task):
    self.shown.append((train_state, metrics_by_task))
    return self.stop


def test_all_actions_of_the_mode_run_and_any_of_them_ends_the_run(caplog):
  first, second, other = Remember(stop=True), Remember(), Remember()
  actions = {ActionMode.TRAIN: [first, second], ActionMode.TRAIN_EVAL: [other]}
  assert run_actions(ActionMode.TRAIN, actions, "state", {"train": {"loss": 1.0}})
  assert first.shown == second.shown == [("state", {"train": {"loss": 1.0}})]
  assert not other.shown
  assert not run_actions(ActionMode.TRAIN_EVAL, actions, "state", {})
  assert not run_actions(ActionMode.INFER_EVAL, actions, "state", {})
  assert caplog.messages == [
    "the run ends here because of Remember; the same command would continue it"
  ]


def test_modes_can_be_strings_and_actions_can_be_absent():
  assert run_actions(ActionMode.TRAIN, {"TRAIN": [Remember(stop=True)]}, None, {})
  assert not run_actions(ActionMode.TRAIN, None, None, {})
