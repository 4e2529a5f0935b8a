"""Ends a run early, with a saved checkpoint, when one of its processes receives a signal or Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import jax

T = TypeVar("T")

# Signals belong to the process, so at most one listener is entered at a time.
_entered: list[InterruptionListener] = []


class RunInterrupted(SystemExit):
  """A signal or Ctrl-C ended the run early; its state is saved.

  The exit status is that of a process that this signal ended. Job managers restart a run with the
  status of SIGTERM, which also stands for SIGUSR1.
  """

  def __init__(self, step: int, by_ctrl_c: bool = False) -> None:
    super().__init__(128 + (signal.SIGINT if by_ctrl_c else signal.SIGTERM))
    self.step = step


class EvaluationInterrupted(SystemExit):
  """A signal or Ctrl-C ended an evaluation early, because the run that it belongs to must end."""


class InterruptionListener(contextlib.ExitStack):
  """Listens inside a `with` for Ctrl-C, and for SIGTERM and SIGUSR1, which job managers send.

  With several processes, jax's coordination service passes the signal on from the process that
  received it, and all processes agree on the step after which they end. A second Ctrl-C ends the process
  at once. Outside Python's main thread, where no handlers can be set, nothing is listened for.

  Attributes:
    by_ctrl_c: whether this process has received Ctrl-C.
  """

  def __init__(self) -> None:
    super().__init__()
    self.by_ctrl_c = False
    self._is_requested = False
    self._calls = 0

  def __enter__(self) -> InterruptionListener:
    _entered.append(self)
    self.callback(_entered.remove, self)
    if threading.current_thread() is not threading.main_thread():
      return self
    alone = jax.process_count() == 1
    # With several processes, jax handles SIGTERM itself.
    for number in (signal.SIGTERM, signal.SIGUSR1) if alone else (signal.SIGUSR1,):
      self._handle(number, self._request if alone else _send_sigterm)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in a background job
      self._handle(signal.SIGINT, lambda number, frame: None)
      self._listen_for_ctrl_c()
    return self

  def should_stop(self) -> bool:
    """Returns whether the run must end now, with the same result on every process.

    All processes must call it the same number of times.
    """
    if jax.process_count() == 1:
      return self._is_requested
    from jax.experimental import multihost_utils

    self._calls += 1
    return multihost_utils.reached_preemption_sync_point(self._calls)

  def _handle(self, number: int, handler: Any) -> None:
    self.callback(signal.signal, number, signal.signal(number, handler))

  def _listen_for_ctrl_c(self) -> None:
    """Starts a thread that acts on Ctrl-C, also while the main thread compiles or waits in a collective."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    self.callback(os.close, write_end)
    self.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(write_end))

    def act_on_signals() -> None:
      while number := os.read(read_end, 1):
        if number[0] == signal.SIGINT:
          self._on_ctrl_c()
      os.close(read_end)

    threading.Thread(target=act_on_signals, name="ctrl-c", daemon=True).start()

  def _on_ctrl_c(self) -> None:
    if self.by_ctrl_c:
      os._exit(128 + signal.SIGINT)
    self.by_ctrl_c = True
    text = "Ctrl-C: the run finishes this step and saves its state. Press it again to end at once."
    print(text, file=sys.stderr, flush=True)
    if jax.process_count() > 1:
      _send_sigterm()
    self._request()

  def _request(self, *signal_and_frame: object) -> None:
    self._is_requested = True


def until_interrupted(items: Iterable[T]) -> Iterator[T]:
  """Yields the items of an evaluation, until a signal or Ctrl-C ends the run that it belongs to.

  All processes of a run must have the same number of items.

  Raises:
    EvaluationInterrupted: the run must end.
  """
  for item in items:
    if _entered and _entered[-1].should_stop():
      raise EvaluationInterrupted
    yield item


def _send_sigterm(*signal_and_frame: object) -> None:
  os.kill(os.getpid(), signal.SIGTERM)
