"""T5X's functions that find the next step to save at; runs use `hooks` for that."""

from __future__ import annotations

from collections.abc import Sequence


def find_first_checkpoint_step(
  checkpoint_steps_index: int, checkpoint_steps: Sequence[int], first_step: int, host_step: int
) -> int:
  """Returns the index of the first of `checkpoint_steps` that is still to come.

  Args:
    checkpoint_steps_index: where to begin to look.
    checkpoint_steps: steps to save at, in ascending order.
    first_step: the step that the run began with.
    host_step: the step that the run is at.
  """
  done = max(first_step, host_step)
  while checkpoint_steps_index < len(checkpoint_steps):
    if checkpoint_steps[checkpoint_steps_index] > done:
      break
    checkpoint_steps_index += 1
  return checkpoint_steps_index


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
  """Returns how many steps to make next, whether a checkpoint follows, and the new index.

  Args:
    checkpoint_steps_index: which of `checkpoint_steps` comes next.
    inner_num_steps: the steps that would be made if nothing is to be saved between.
    is_checkpoint_step: whether a checkpoint follows those.
    host_step: the step that the run is at.
    checkpoint_steps: steps to save at, in ascending order.
    epoch_end_step: no stretch goes beyond it.
    checkpoint_period: save at each multiple too; None for no multiples.
    first_step: the step that the run began with.
  """
  stop = min(host_step + inner_num_steps, epoch_end_step)
  index = find_first_checkpoint_step(
    checkpoint_steps_index, checkpoint_steps, first_step, host_step
  )
  candidates = [*checkpoint_steps[index : index + 1]]
  if checkpoint_period:
    candidates.append(host_step + checkpoint_period - host_step % checkpoint_period)
  due = min([step for step in candidates if step <= stop], default=None)
  if due is None:
    return stop - host_step, is_checkpoint_step, index
  taken = index < len(checkpoint_steps) and checkpoint_steps[index] == due
  return due - host_step, True, index + int(taken)
