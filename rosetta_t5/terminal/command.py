"""How a command begins: with a line before anything slow is imported, and with Ctrl-C handled."""

from __future__ import annotations

import atexit
import gc
import logging
import resource
import sys

from rosetta_t5.terminal import ctrl_c, standard_streams

# The shell's command, the limit in Python's module `resource`, the bytes or threads that the shell counts
# as one, and the bytes or threads that are always enough.
_LIMITS = (
  ("ulimit -v", resource.RLIMIT_AS, 1024, sys.maxsize),  # address space
  ("ulimit -u", resource.RLIMIT_NPROC, 1, 1024),  # all threads of the user
)


def begin(name: str) -> None:
  """Prints a line, because the imports that follow take seconds, and handles Ctrl-C.

  Notes follow on limits of the shell that are so low that a library may abort.

  Args:
    name: the command, such as "rosetta-t5 train".
  """
  standard_streams.protect()
  ctrl_c.listen()
  logging.basicConfig(format="note     %(message)s", level=logging.WARNING)
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
  for command, limit, unit, sufficient in _LIMITS:
    value, _ = resource.getrlimit(limit)
    if value != resource.RLIM_INFINITY and value < sufficient:
      notes.append(
        f"note     {command} is {value // unit:,}: libraries that need more abort without an "
        f"explanation; try `{command} unlimited`, or ask your administrator"
      )
  return notes
