"""Keeps what TensorFlow says of itself at its start off the screen."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

# Said from C++ before any setting (TF_CPP_MIN_LOG_LEVEL) is read: that there is no GPU driver, and
# that messages like this one appear on standard error.
_NOTE = re.compile(rb"I0000 |WARNING: All log messages before absl::InitializeLog")


@contextlib.contextmanager
def without_start_notes() -> Iterator[None]:
  """Inside, what is written to standard error is held back; afterwards all but the notes appears."""
  sys.stderr.flush()
  screen = os.dup(2)
  with tempfile.TemporaryFile() as held_back:
    os.dup2(held_back.fileno(), 2)
    try:
      yield
    finally:
      sys.stderr.flush()
      os.dup2(screen, 2)
      os.close(screen)
      held_back.seek(0)
      for line in held_back:
        if not _NOTE.match(line):
          os.write(2, line)
