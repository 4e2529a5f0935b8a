"""Ends a run early, with a saved checkpoint, when one of its processes receives a signal."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

import jax


class RunInterrupted(SystemExit):
  """A signal ended the run early; its state is saved.

  The exit status is that of a process that SIGTERM ended, so job managers restart the run.
  """

  def __init__(self, step: int) -> None:
    super().__init__(128 + signal.SIGTERM)
    self.step = step


class InterruptionListener:
  """Listens for SIGTERM and SIGUSR1 inside a `with`; Slurm and Kubernetes send them before they kill.

  With several processes, jax's coordination service passes the signal on from the process that
  received it, and all processes agree on the step after which they end.
  """

  def __init__(self) -> None:
    self._received = False
    self._previous: dict[signal.Signals, Any] = {}

  def __enter__(self) -> InterruptionListener:
    # With several processes, jax handles SIGTERM itself.
    alone = jax.process_count() == 1
    for number in (signal.SIGTERM, signal.SIGUSR1) if alone else (signal.SIGUSR1,):
      try:
        self._previous[number] = signal.signal(number, self._on_signal if alone else _send_sigterm)
      except ValueError:  # Only Python's main thread can set handlers; elsewhere none are set.
        return self
    return self

  def __exit__(self, *exception: object) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def should_stop(self, step: int) -> bool:
    """Returns whether the run must end after `step`; every process gets the same result.

    Args:
      step: optimizer steps made so far. All processes must ask at the same steps.
    """
    if jax.process_count() == 1:
      return self._received
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(step)

  def _on_signal(self, number: int, frame: FrameType | None) -> None:
    self._received = True


def _send_sigterm(number: int, frame: FrameType | None) -> None:
  os.kill(os.getpid(), signal.SIGTERM)
