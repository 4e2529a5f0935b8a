"""A process in which a benchmark runs one implementation, apart from the threads and memory of others."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any


class Worker:
  """Runs a function in a process of its own and times it."""

  def __init__(self, name: str, make_run: Callable[..., Callable[[], Any]], arguments: tuple):
    """Starts the process and runs the function twice; the first run compiles.

    Args:
      name: the name of the implementation, for error messages.
      make_run: returns the function to be timed; it is called in the process.
      arguments: the arguments of `make_run`.
    """
    context = multiprocessing.get_context("spawn")
    self._name = name
    self._pipe, child_pipe = context.Pipe()
    self._process = context.Process(
      target=_serve, args=(make_run, arguments, child_pipe), daemon=True
    )
    self._process.start()
    # Only the child holds its end now, so the pipe ends when the child does.
    child_pipe.close()
    for _ in range(2):
      self.time_run()

  def time_run(self) -> float:
    """Returns the seconds that one run takes.

    Raises:
      SystemExit: the process has died; it has printed its traceback, if there is one.
    """
    return self._request("run")

  def last_result(self) -> Any:
    """Returns the result of the last run."""
    return self._request("result")

  def close(self) -> None:
    """Ends the process."""
    self._pipe.send(None)
    self._process.join()

  def _request(self, request: str) -> Any:
    try:
      self._pipe.send(request)
      return self._pipe.recv()
    except (EOFError, OSError):
      self._process.join()
      raise SystemExit(
        f"error: the process of {self._name!r} died with exit status {self._process.exitcode}"
      ) from None


def _serve(make_run: Callable[..., Callable[[], Any]], arguments: tuple, pipe: Any) -> None:
  run = make_run(*arguments)
  result = None
  while request := pipe.recv():
    if request == "result":
      pipe.send(result)
      continue
    started = time.perf_counter()
    result = run()
    pipe.send(time.perf_counter() - started)
