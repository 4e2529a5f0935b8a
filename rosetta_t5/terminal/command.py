"""How a command begins: with a line before anything slow is imported, and with Ctrl-C handled."""

from __future__ import annotations

import atexit
import gc
import resource
import sys
from typing import NamedTuple

from rosetta_t5.terminal import ctrl_c, standard_streams


class Limit(NamedTuple):
  """A limit of the operating system.

  Attributes:
    command: the shell's command that prints and sets it.
    resource: its number in Python's module `resource`.
    unit: how many bytes or threads the shell counts as one.
    sufficient: the number of bytes or threads that is always enough.
  """

  command: str
  resource: int
  unit: int
  sufficient: int


_LIMITS = (
  Limit("ulimit -v", resource.RLIMIT_AS, unit=1024, sufficient=sys.maxsize),  # address space
  Limit("ulimit -u", resource.RLIMIT_NPROC, unit=1, sufficient=1024),  # all threads of the user
)


def begin(name: str) -> None:
  """Prints a line, because the imports that follow take seconds, and handles Ctrl-C.

  Notes follow on limits of the shell that are so low that a library may abort.

  Args:
    name: the command, such as "rosetta-t5 train".
  """
  standard_streams.protect()
  ctrl_c.listen()
  # Imports create a million objects that stay; at the default threshold, a third of their time is
  # spent on looking for garbage among these.
  gc.set_threshold(50_000, 20, 100)
  atexit.register(gc.freeze)  # Python would look for garbage once more before it exits.
  # With many processes, the first one prints a line for all when they have met.
  silent = ("--multiprocess_gpu", "-h", "--help")
  if not any(argument.startswith(silent) for argument in sys.argv[1:]):
    print(
      f"{name} is loading its libraries …",
      *_notes_on_limits(),
      sep="\n",
      file=sys.stderr,
      flush=True,
    )


def _notes_on_limits() -> list[str]:
  """Returns a note on each limit because of which a library may abort the process."""
  notes = []
  for limit in _LIMITS:
    value, _ = resource.getrlimit(limit.resource)
    if value != resource.RLIM_INFINITY and value < limit.sufficient:
      notes.append(
        f"note     {limit.command} is {value // limit.unit:,}: libraries that need more abort without an "
        f"explanation; try `{limit.command} unlimited`, or ask your administrator"
      )
  return notes
