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

  def next_due(self, step: int, last_step: int) -> int:
    """Returns the first step after `step` at which the hook is due, at most `last_step`."""
    candidates = [due for due in self.steps if due > step]
    if self.period:
      candidates.append(step + self.period - step % self.period)
    return min([*candidates, last_step])


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
  while start < last_step:
    stop = min([last_step, *(hook.next_due(start, last_step) for hook in hooks)])
    if longest:
      stop = min(stop, start + longest - start % longest)
    yield start, stop
    start = stop


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
