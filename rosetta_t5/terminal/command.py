"""How a command begins: with a line before anything slow is imported, and with Ctrl-C handled."""

from __future__ import annotations

import atexit
import gc
import resource
import sys

from rosetta_t5.terminal import ctrl_c, standard_streams

# Limits of the address space in KiB, and of the threads of all processes of a user: the unit in bytes or
# threads, and the limit that is enough in any case.
_LIMITS = (
  ("ulimit -v", resource.RLIMIT_AS, 1024, sys.maxsize),
  ("ulimit -u", resource.RLIMIT_NPROC, 1, 1024),
)


def begin(name: str) -> None:
  """Prints a line, because the imports that follow take seconds, and handles Ctrl-C.

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
  for name, number, unit, enough in _LIMITS:
    limit, _ = resource.getrlimit(number)
    if limit != resource.RLIM_INFINITY and limit < enough:
      notes.append(
        f"note     {name} is {limit // unit:,}: libraries that need more abort without an explanation; "
        f"`{name} unlimited` prevents this"
      )
  return notes
