"""Hooks: functions that run after certain steps, and the steps at which training stops for them."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Collection, Iterator, Sequence


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
    if self.at_end and step == last_step:
      return True
    return step in self.steps or bool(self.period and step % self.period == 0)


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
