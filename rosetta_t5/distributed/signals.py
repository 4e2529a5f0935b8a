"""Ends a run early, with a saved checkpoint, when one of its processes receives a signal or Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType
from typing import Any

import jax

from rosetta_t5.terminal import ctrl_c


class RunInterrupted(SystemExit):
  """A signal or Ctrl-C ended the run early; its state is saved.

  The exit status is that of a process that this signal ended. Job managers restart a run with the
  status of SIGTERM, which also stands for SIGUSR1.
  """

  def __init__(self, step: int, by_ctrl_c: bool = False) -> None:
    super().__init__(ctrl_c.EXIT_STATUS if by_ctrl_c else 128 + signal.SIGTERM)
    self.step = step


class InterruptionListener:
  """Listens inside a `with` for Ctrl-C, and for SIGTERM and SIGUSR1, which job managers send.

  With several processes, jax's coordination service passes the signal on from the process that
  received it, and all processes agree on the step after which they end.

  Attributes:
    by_ctrl_c: whether this process has received Ctrl-C.
  """

  def __init__(self, finishes: str, outcome: str) -> None:
    """Builds a listener.

    Args:
      finishes: what the run finishes after the first Ctrl-C, printed then.
      outcome: what is kept if a second Ctrl-C ends the process at once.
    """
    self.by_ctrl_c = False
    self._section = ctrl_c.Section(outcome, finishes, self._on_ctrl_c, agree=self.should_stop)
    self._calls = 0
    self._stack = contextlib.ExitStack()

  def __enter__(self) -> InterruptionListener:
    # With several processes, jax handles SIGTERM itself.
    alone = jax.process_count() == 1
    self._stack.enter_context(ctrl_c.entered(self._section))
    for number in (signal.SIGTERM, signal.SIGUSR1) if alone else (signal.SIGUSR1,):
      try:
        previous: Any = signal.signal(number, self._on_signal if alone else _send_sigterm)
      except ValueError:  # Only Python's main thread can set handlers; elsewhere none are set.
        break
      self._stack.callback(signal.signal, number, previous)
    return self

  def __exit__(self, *exception: object) -> None:
    self._stack.close()

  def should_stop(self) -> bool:
    """Returns whether the run must end now, with the same result on every process.

    All processes must call it the same number of times.
    """
    if jax.process_count() == 1:
      return self._section.is_requested
    from jax.experimental import multihost_utils

    self._calls += 1
    return multihost_utils.reached_preemption_sync_point(self._calls)

  def _on_signal(self, number: int, frame: FrameType | None) -> None:
    self._section.is_requested = True

  def _on_ctrl_c(self) -> None:
    self.by_ctrl_c = True
    if jax.process_count() > 1:
      _send_sigterm(signal.SIGINT, None)


def _send_sigterm(number: int, frame: FrameType | None) -> None:
  os.kill(os.getpid(), signal.SIGTERM)
