"""The error that ends a run whose loss, gradients or metrics became NaN or infinite."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from rosetta_t5.telemetry.run_metrics import SKIPPED_STEPS, WEIGHT_NORM

PyTree = Any


class NonFiniteError(ArithmeticError):
  """A loss, gradient or metric is NaN or infinite; the run stops before it saves a bad checkpoint.

  Attributes:
    step: the step in which it was found.
    first_bad: "loss", the first parameter whose gradient was not finite, or a metric.
  """

  def __init__(self, step: int, first_bad: str, last_good: Any = None):
    """Builds the error.

    Args:
      step: the step in which it was found.
      first_bad: "loss", or "gradients " and the name of a parameter, or "metric " and its name.
      last_good: the path of the last checkpoint before it; None if there is none.
    """
    self.step = step
    self.first_bad = first_bad
    checkpoint = (
      f"The last good checkpoint is {os.fspath(last_good)}; a run with other settings in the same "
      "MODEL_DIR continues from there"
      if last_good
      else "There is no checkpoint from before it"
    )
    super().__init__(
      f"training is not finite (NaN or infinity) at step {step}: first in {first_bad}. "
      f"{checkpoint}. To try: a lower learning rate or more warm-up steps; clip the gradients "
      "(optax.clip_by_global_norm in optimizers.chain); network.T5Config.dtype = 'float32' if it "
      "is bfloat16; z_loss = 0.0001."
    )


def raise_if_nonfinite(
  record: Any, train_state: Any, manager: Any, metrics: Mapping[str, float], step: int
) -> None:
  """Raises NonFiniteError if a step of `record` was not finite, or if a metric is not.

  It does not raise if `optax.apply_if_finite` has skipped all such steps, so that the parameters are
  still finite.

  Args:
    record: the `training.step.FirstNonFinite` of the last steps; None if there is none.
    train_state: the state after them; its parameters give the names.
    manager: the checkpoint manager, whose pending save is awaited; None if there is none.
    metrics: the values that the last steps measured, and the `RunMetrics` after them.
    step: the number of completed steps.
  """
  first_bad = None if record is None else first_bad_name(record.bad, train_state.params)
  if first_bad is not None:
    step = int(record.step) + 1
  elif names := nonfinite_metrics(metrics):
    first_bad = f"metric {names[0]}"
  were_skipped = SKIPPED_STEPS in metrics and math.isfinite(metrics[WEIGHT_NORM])
  if first_bad is None or were_skipped:
    return
  last_good = None
  if manager is not None:
    manager.wait_until_finished()
    steps = [saved for saved in manager.all_steps() if saved < step]
    last_good = manager.directory / f"checkpoint_{steps[-1]}" if steps else None
  raise NonFiniteError(step, first_bad, last_good)


def nonfinite_metrics(metrics: Mapping[str, float]) -> list[str]:
  """Returns the names of metrics that are NaN or infinite, except durations and speeds."""
  return [
    name
    for name, value in metrics.items()
    if not name.startswith("timing/") and not math.isfinite(value)
  ]


def first_bad_name(bad: Any, params: PyTree) -> str | None:
  """Returns "loss" or "gradients PARAMETER" for the first True in `bad`; None if all are False.

  Args:
    bad: [1 + number of parameters] booleans, for the loss and the gradient of each parameter.
    params: the parameters, which give the names.
  """
  leaves = jax.tree_util.tree_leaves_with_path(params)
  names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
  names = ["loss", *(f"gradients {name}" for name in names)]
  return next((name for name, is_bad in zip(names, np.asarray(bad), strict=True) if is_bad), None)
