"""Hooks: functions that run after certain steps, and the ranges of steps between them."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Collection, Iterator, Sequence


@dataclasses.dataclass(frozen=True)
class Hook:
  """A function that runs after certain steps.

  Attributes:
    name: the name in error messages.
    run: called as run(step).
    period: the hook is due after each multiple of this many steps; None or 0 for never.
    steps: additional steps after which the hook is due.
    at_end: whether the hook is also due after the last step.
  """

  name: str
  run: Callable[[int], object]
  period: int | None = None
  steps: Collection[int] = ()
  at_end: bool = False

  def is_due(self, step: int, last_step: int) -> bool:
    """Returns whether the hook runs after `step`."""
    if self.at_end and step == last_step:
      return True
    return step in self.steps or bool(self.period and step % self.period == 0)


def step_ranges(
  first_step: int, last_step: int, hooks: Sequence[Hook], longest: int | None = None
) -> Iterator[tuple[int, int]]:
  """Yields the (start, stop) ranges of steps between hooks, in order.

  Args:
    first_step: the number of steps completed before.
    last_step: the number of steps completed at the end.
    hooks: a range ends at each step after which one of them is due.
    longest: a range also ends at each multiple of this many steps.
  """
  start = first_step
  for step in range(first_step + 1, last_step + 1):
    is_regular_end = step == last_step or (longest and step % longest == 0)
    if is_regular_end or any(hook.is_due(step, last_step) for hook in hooks):
      yield start, step
      start = step


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
