"""Ctrl-C ends a command at once, or after its current step where there is something to save.

Python calls a signal handler between two statements of the main thread, which may be compiling for
minutes, and KeyboardInterrupt may be raised anywhere, even in a callback whose caller swallows it. So a
thread receives Ctrl-C here: it either ends the process or records the request, which the main thread
reads where it can stop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from rosetta_t5.terminal.processes import index_and_count

EXIT_STATUS = 128 + signal.SIGINT


class Interrupted(SystemExit):
  """Ctrl-C ended the command at a place where nothing is left half-done."""

  def __init__(self) -> None:
    super().__init__(EXIT_STATUS)


@dataclasses.dataclass(eq=False)
class Section:
  """A part of a command, and what Ctrl-C does in it.

  Attributes:
    outcome: what is kept, printed when Ctrl-C ends the process at once; a function is called then.
    finishes: what the command finishes after the first Ctrl-C; None if it ends at once.
    on_request: called after the first Ctrl-C of a section that finishes something.
    is_requested: whether there was a first Ctrl-C.
    agree: returns whether all processes end now; each must call it the same number of times. None if
      the section has one process.
  """

  outcome: str | Callable[[], str]
  finishes: str | None = None
  on_request: Callable[[], None] | None = None
  is_requested: bool = False
  agree: Callable[[], bool] | None = None


_sections = [Section("there was nothing to save")]
_is_listening = False
_stderr = 2  # While TensorFlow is imported, 2 is a buffer.


def listen() -> Callable[[], None]:
  """Acts on Ctrl-C from now on, and returns a function that ends this.

  Does nothing outside the main thread, where no handler can be set, and in a process that was started
  to ignore Ctrl-C, such as a background job.
  """
  global _is_listening, _stderr
  in_main_thread = threading.current_thread() is threading.main_thread()
  if _is_listening or not in_main_thread or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    return lambda: None
  read_end, write_end = os.pipe()
  os.set_blocking(write_end, False)
  handler = signal.signal(signal.SIGINT, lambda number, frame: None)
  wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
  threading.Thread(target=_act_on_signals, args=(read_end,), name="ctrl-c", daemon=True).start()
  _is_listening, _stderr = True, os.dup(2)

  def end() -> None:
    global _is_listening, _stderr
    signal.signal(signal.SIGINT, handler)
    signal.set_wakeup_fd(wakeup)
    os.close(write_end)
    os.close(_stderr)
    _is_listening, _stderr = False, 2

  return end


def removing(folder: str | os.PathLike[str], outcome: str) -> Section:
  """Returns a section that Ctrl-C ends at once, after a folder with unfinished files is removed."""

  def remove() -> str:
    shutil.rmtree(folder, ignore_errors=True)
    return outcome

  return Section(remove)


@contextlib.contextmanager
def entered(section: Section) -> Iterator[Section]:
  """Inside the `with`, Ctrl-C does what the section says."""
  end_listening = listen() if section.finishes else lambda: None
  _sections.append(section)
  try:
    yield section
  finally:
    _sections.remove(section)
    end_listening()


def check(together: bool = False) -> None:
  """Raises Interrupted after a first Ctrl-C that did not end the command at once.

  Args:
    together: whether all processes of a run call this the same number of times, so that they can end
      together. Otherwise it does nothing in a run of several, because the others would wait for it.
  """
  if index_and_count()[1] == 1:
    must_end = any(section.is_requested for section in _sections)
  else:
    must_end = together and any(section.agree() for section in _sections if section.agree)
  if must_end:
    raise Interrupted


def _act_on_signals(read_end: int) -> None:
  """Reads the numbers of signals, which Python's handler in C writes as soon as they arrive."""
  while number := os.read(read_end, 1):
    if number[0] == signal.SIGINT:
      _act_on_ctrl_c(_sections[-1])
  os.close(read_end)


def _act_on_ctrl_c(section: Section) -> None:
  if section.finishes is not None and not section.is_requested:
    section.is_requested = True
    print(
      f"Ctrl-C: {section.finishes}. Press it again to end at once.", file=sys.stderr, flush=True
    )
    if section.on_request is not None:
      section.on_request()
    return
  outcome = section.outcome if isinstance(section.outcome, str) else section.outcome()
  # Nothing here may wait for the main thread, which may hold any lock of Python's streams.
  with contextlib.suppress(OSError):  # The terminal may be closed.
    for terminal in filter(os.isatty, (1, _stderr)):
      os.write(terminal, b"\x1b[?25h")  # Shows the cursor, which a bar has hidden.
    os.write(_stderr, f"{os.linesep * os.isatty(_stderr)}stopped: {outcome}\n".encode())
  os._exit(EXIT_STATUS)
