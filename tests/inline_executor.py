"""An executor that runs each job when it is submitted, and can be killed after some."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class Here(Executor):
  """Runs jobs here and now; raises KeyboardInterrupt in place of the job after `stop_after`."""

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
