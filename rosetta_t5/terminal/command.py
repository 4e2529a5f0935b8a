"""How a command begins: with a line before anything slow is imported, and with Ctrl-C handled."""

from __future__ import annotations

import atexit
import gc
import sys

from rosetta_t5.terminal import ctrl_c, standard_streams


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
    print(f"{name} is loading its libraries …", file=sys.stderr, flush=True)
