"""Counts output that could not be written: lines of the console, metrics, files that describe a run.

Such an error never ends a run. The run reports what was lost, and why, in its log, on the console and by
its exit status, as far as these can still be written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator

# The exit status of a command that did its work but lost output, as in <sysexits.h>.
EXIT_STATUS = os.EX_IOERR


@dataclasses.dataclass
class Lost:
  """What was lost of one kind."""

  count: int
  reason: str


_lost: dict[str, Lost] = {}
_lock = threading.Lock()


def count(kind: str, error: BaseException, number: int = 1) -> None:
  """Counts output that was lost.

  Args:
    kind: what was lost, in the plural, such as "lines of standard output".
    error: the reason.
    number: how much was lost.
  """
  reason = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
  with _lock:
    lost = _lost.setdefault(kind, Lost(0, reason))
    lost.count += number


@contextlib.contextmanager
def counted(kind: str, number: int = 1, errors: type[Exception] = OSError) -> Iterator[None]:
  """Inside the `with`, these errors are counted as lost output instead of being raised."""
  try:
    yield
  except errors as error:
    count(kind, error, number)


def all_lost() -> dict[str, Lost]:
  """Returns what was lost so far, by kind."""
  with _lock:
    return {kind: dataclasses.replace(lost) for kind, lost in _lost.items()}


def take_all() -> dict[str, Lost]:
  """Returns what was lost so far, by kind, and counts from zero again."""
  with _lock:
    lost = dict(_lost)
    _lost.clear()
  return lost


def describe(all_lost: dict[str, Lost]) -> str:
  """Returns what was lost as text, such as "lines of standard output: 3 (Broken pipe)"."""
  return ", ".join(f"{kind}: {lost.count} ({lost.reason})" for kind, lost in all_lost.items())
