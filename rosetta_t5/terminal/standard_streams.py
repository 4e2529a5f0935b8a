"""Standard output and standard error, which may be closed, full, or lose their terminal."""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from rosetta_t5.terminal import lost_output

_NAMES = {1: "standard output", 2: "standard error"}
_closed: set[int] = set()  # the descriptors that were closed when this process began
_output_is_optional = False


class _Stream(io.FileIO):
  """A standard stream whose errors name it, or are counted as lost output."""

  def __init__(self, descriptor: int, counts_errors: bool):
    super().__init__(descriptor, "w", closefd=False)
    self._counts_errors = counts_errors

  def write(self, data: Any) -> int:
    """Writes all of the data, or counts the lines that are lost; returns the length of the data."""
    rest = memoryview(data).cast("B")
    length = len(rest)
    try:
      while rest:
        self._check_open()
        if (written := super().write(rest)) is None:
          select.select((), (self,), ())  # A pipe that does not block is full.
        rest = rest[written or 0 :]
    except OSError as error:
      self._handle(error, bytes(rest).count(b"\n"))
    return length

  def _check_open(self) -> None:
    if self._counts_errors and self.fileno() in _closed:
      raise OSError("it is closed")

  def _handle(self, error: OSError, lines: int) -> None:
    name = _NAMES[self.fileno()]
    if self._counts_errors:
      if lines:  # Updates of a progress bar are not lines.
        lost_output.count(f"lines of {name}", error, lines)
      return
    if isinstance(error, BrokenPipeError):
      raise error
    raise OSError(error.errno, error.strerror, name)


def protect() -> None:
  """Makes the errors of standard output name it, and counts those of standard error.

  What is written to a closed stream is discarded: a file that is opened later must not receive it.
  """
  while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest that is free
    _closed.add(descriptor)
  os.close(descriptor)
  sys.stdout = _replace(sys.stdout, 1, counts_errors=False)
  sys.stderr = _replace(sys.stderr, 2, counts_errors=True)


@contextlib.contextmanager
def optional_output() -> Iterator[None]:
  """Inside the `with`, a command continues without its standard output, standard error or terminal.

  Raises:
    SystemExit: the command has done its work, but some output was lost; a printed line states what.
  """
  global _output_is_optional
  if _output_is_optional:  # The outer command reports.
    yield
    return
  if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
  stdout = sys.stdout
  with lost_output.counted("lines of standard output"):
    stdout.flush()
  sys.stdout = _replace(stdout, 1, counts_errors=True)
  _output_is_optional = True
  try:
    yield
  finally:
    _output_is_optional = False
    sys.stdout.flush()
    sys.stdout = stdout
  if lost := lost_output.take_all():
    text = f"the command has finished, but output was lost: {lost_output.describe(lost)}"
    print(f"note     {text} (exit status {lost_output.EXIT_STATUS})", file=sys.stderr, flush=True)
    sys.exit(lost_output.EXIT_STATUS)


def finish_output() -> None:
  """Flushes standard output or, if that fails, discards what is left: Python would retry at its exit."""
  try:
    sys.stdout.flush()
  except OSError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _replace(stream: Any, descriptor: int, counts_errors: bool) -> Any:
  """Returns a text stream for a descriptor, unless something else has replaced Python's own."""
  if stream is None:
    stream = open(descriptor, "w", closefd=False)  # noqa: SIM115
  try:
    is_own = isinstance(stream, io.TextIOWrapper) and stream.fileno() == descriptor
  except OSError:  # It is in memory.
    is_own = False
  if not is_own:
    return stream
  raw = io.BufferedWriter(_Stream(descriptor, counts_errors))
  # A file's name need not be text, and a terminal's encoding need not have all characters.
  return io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True)
