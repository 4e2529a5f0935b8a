"""What a run does from time to time: hooks with a period, and the stretches of steps between them."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Collection, Iterator, Sequence


@dataclasses.dataclass(frozen=True)
class Hook:
  """Something to do after certain steps.

  Attributes:
    name: what it is, for error messages.
    run: called as run(step).
    period: it is due at the multiples of this many steps; None or 0 for never.
    steps: further steps at which it is due.
    at_end: whether it is due after the last step too.
  """

  name: str
  run: Callable[[int], object]
  period: int | None = None
  steps: Collection[int] = ()
  at_end: bool = False

  def is_due(self, step: int, last_step: int) -> bool:
    """Whether the hook runs after `step`."""
    if self.at_end and step == last_step:
      return True
    return step in self.steps or bool(self.period and step % self.period == 0)

  def next_due(self, step: int, last_step: int) -> int:
    """Returns the first step after `step` at which the hook is due, at most `last_step`."""
    candidates = [due for due in self.steps if due > step]
    if self.period:
      candidates.append(step + self.period - step % self.period)
    return min([*candidates, last_step])


def stretches(
  first_step: int, last_step: int, hooks: Sequence[Hook], longest: int | None = None
) -> Iterator[tuple[int, int]]:
  """Yields (start, stop) of the stretches of steps between hooks, in order.

  Args:
    first_step: updates already made.
    last_step: updates to have been made at the end.
    hooks: a stretch ends wherever one of them is due.
    longest: a stretch also ends at each multiple of this many steps.
  """
  start = first_step
  while start < last_step:
    stop = min([last_step, *(hook.next_due(start, last_step) for hook in hooks)])
    if longest:
      stop = min(stop, start + longest - start % longest)
    yield start, stop
    start = stop


def run_due(hooks: Sequence[Hook], step: int, last_step: int) -> None:
  """Runs the hooks that are due after `step`, in their order."""
  for hook in hooks:
    if hook.is_due(step, last_step):
      hook.run(step)


@contextlib.contextmanager
def automatic_garbage_collection(on: bool) -> Iterator[None]:
  """Off, where collections at different times on different hosts would make all of them wait."""
  if not on:
    gc.disable()
  try:
    yield
  finally:
    gc.enable()
