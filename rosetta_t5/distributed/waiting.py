"""Says, while processes wait for each other at the start, for whom and how long; ends what waits in vain."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

EXIT_STATUS = 70
_EVERY_S = 30.0


class Waiting:
  """Prints a line from time to time inside a `with`, and ends the process when the time is over.

  jax waits in a call that cannot be left, and ends in a crash.
  """

  def __init__(self, address: str, index: int, count: int, limit: float, every: float = _EVERY_S):
    """Says what is waited for.

    Args:
      address: HOST:PORT of process 0.
      index: this process.
      count: how many there are.
      limit: seconds until the wait ends.
      every: seconds between lines.
    """
    self._address, self._index, self._count = address, index, count
    self._limit, self._every = limit, every
    # Returns the indices of which none is here; process 0 alone knows.
    self.missing: Callable[[], Sequence[int]] = list
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._speak, name="rendezvous", daemon=True)

  def __enter__(self) -> Waiting:
    self._started = time.monotonic()
    self._thread.start()
    return self

  def __exit__(
    self,
    exception_type: type[BaseException] | None,
    exception: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    self._ended.set()
    self._thread.join()

  def _speak(self) -> None:
    while not self._ended.wait(min(self._every, max(self._limit - self._waited(), 0.01))):
      who = f"process {self._index} of {self._count}"
      if self._waited() >= self._limit:
        self._say(
          f"error: {who} has waited {self._limit:.0f} s, and still it is {self._what()}. Do all processes "
          "run, each with a --process_index of its own, and can they reach that address? "
          "--initialization_timeout sets how long to wait."
        )
        os._exit(EXIT_STATUS)
      self._say(f"{who}: {self._what()}, for {self._waited():.0f} s of at most {self._limit:.0f}")

  def _waited(self) -> float:
    return time.monotonic() - self._started

  def _say(self, text: str) -> None:
    print(text, file=sys.stderr, flush=True)

  def _what(self) -> str:
    if self._index == 0:
      missing = self.missing()
      who = f"process{'es' * (len(missing) > 1)} {ranges_text(missing)}"
      return f"waiting at {self._address} for {who if missing else 'the other processes'}"
    if answers(self._address):
      return f"waiting for others than process 0, which answers at {self._address}"
    return f"waiting for process 0, and nothing answers at {self._address}"


def answers(address: str, seconds: float = 3.0) -> bool:
  """Whether something listens at HOST:PORT."""
  host, _, port = address.rpartition(":")
  try:
    with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds):
      return True
  except (OSError, ValueError):
    return False


def ranges_text(numbers: Sequence[int]) -> str:
  """Returns numbers in order as people write them: 0-7, 12."""
  runs: list[list[int]] = []
  for number in numbers:
    if runs and number == runs[-1][-1] + 1:
      runs[-1].append(number)
    else:
      runs.append([number])
  return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
