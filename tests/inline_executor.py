"""An executor without processes or threads, which a test can interrupt after some jobs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class InlineExecutor(Executor):
  """Runs each job in `submit`; raises KeyboardInterrupt instead after `stop_after` jobs.

  Attributes:
    ran: the number of jobs that have run.
  """

  def __init__(self, stop_after: int | None = None):
    self._stop_after = stop_after
    self.ran = 0

  def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
    if self.ran == self._stop_after:
      raise KeyboardInterrupt
    self.ran += 1
    future: Future[Any] = Future()
    try:
      future.set_result(fn(*args, **kwargs))
    except ValueError as error:
      future.set_exception(error)
    return future
