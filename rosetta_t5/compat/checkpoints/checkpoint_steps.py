"""T5X's functions that find the next step to save a checkpoint; runs use `training.hooks`."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def find_first_checkpoint_step(
  checkpoint_steps_index: int, checkpoint_steps: Sequence[int], first_step: int, host_step: int
) -> int:
  """Returns the index of the first of `checkpoint_steps` after the current step.

  Args:
    checkpoint_steps_index: the index at which the search starts.
    checkpoint_steps: the steps at which checkpoints are saved, in ascending order.
    first_step: the first step of the run.
    host_step: the current step.
  """
  current_step = max(first_step, host_step)
  return max(checkpoint_steps_index, bisect.bisect_right(checkpoint_steps, current_step))


def find_next_checkpoint_step(
  checkpoint_steps_index: int,
  inner_num_steps: int,
  is_checkpoint_step: bool,
  host_step: int,
  checkpoint_steps: Sequence[int],
  epoch_end_step: int,
  checkpoint_period: int | None,
  first_step: int,
) -> tuple[int, bool, int]:
  """Returns the number of steps until the next save, whether to save then, and the new index.

  Args:
    checkpoint_steps_index: the index of the next of `checkpoint_steps`.
    inner_num_steps: the number of steps if no checkpoint is due before.
    is_checkpoint_step: whether a checkpoint is due after those steps.
    host_step: the current step.
    checkpoint_steps: the steps at which checkpoints are saved, in ascending order.
    epoch_end_step: the last step of the epoch, which limits the number of steps.
    checkpoint_period: a checkpoint is also due at each multiple of it; None for never.
    first_step: the first step of the run.
  """
  stop = min(host_step + inner_num_steps, epoch_end_step)
  index = find_first_checkpoint_step(
    checkpoint_steps_index, checkpoint_steps, first_step, host_step
  )
  candidates = list(checkpoint_steps[index : index + 1])
  if checkpoint_period:
    candidates.append(host_step + checkpoint_period - host_step % checkpoint_period)
  due = min((step for step in candidates if step <= stop), default=None)
  if due is None:
    return stop - host_step, is_checkpoint_step, index
  return due - host_step, True, index + int(due in checkpoint_steps[index : index + 1])
