"""Whether the run has been told to end early, by a signal to any of its processes."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any

import jax

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Interrupted(SystemExit):
  """The run ended early because it was told to; what it had is saved.

  The exit status is that of a process ended by SIGTERM, so that whoever restarts jobs that failed
  restarts this one.
  """

  def __init__(self, step: int) -> None:
    super().__init__(128 + signal.SIGTERM)
    self.step = step


class Interruption:
  """Listens for SIGTERM and SIGUSR1 inside a `with`; Slurm and Kubernetes send them before they kill.

  With several processes, one that is told to end tells the others (through jax's coordination
  service, which listens for SIGTERM), and all agree on the step to end after.
  """

  def __init__(self) -> None:
    self._told = False
    self._before: dict[signal.Signals, Any] = {}

  def __enter__(self) -> Interruption:
    alone = jax.process_count() == 1
    for number in _SIGNALS if alone else (signal.SIGUSR1,):
      try:
        self._before[number] = signal.signal(number, self._on_signal if alone else _pass_on)
      except ValueError:  # Only Python's main thread may: elsewhere the caller's handlers stay.
        return self
    return self

  def __exit__(
    self,
    exception_type: type[BaseException] | None,
    exception: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def is_due(self, step: int) -> bool:
    """Whether the run is to end after `step`; with several processes, the same answer on all.

    Args:
      step: updates made so far. All processes must ask at the same steps.
    """
    if jax.process_count() == 1:
      return self._told
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(step)

  def _on_signal(self, number: int, frame: FrameType | None) -> None:
    self._told = True


def _pass_on(number: int, frame: FrameType | None) -> None:
  os.kill(os.getpid(), signal.SIGTERM)
