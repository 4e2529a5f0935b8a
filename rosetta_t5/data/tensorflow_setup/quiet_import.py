"""Keeps TensorFlow's start-up messages off the screen."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

# TensorFlow's C++ code prints these lines before it reads any setting such as TF_CPP_MIN_LOG_LEVEL.
# They report that there is no GPU driver and that log messages go to standard error.
_START_UP_MESSAGE = re.compile(rb"I0000 |WARNING: All log messages before absl::InitializeLog")


@contextlib.contextmanager
def quiet_tensorflow_import() -> Iterator[None]:
  """Buffers standard error inside the context, then prints all of it but the start-up messages."""
  sys.stderr.flush()
  screen = os.dup(2)
  with tempfile.TemporaryFile() as buffer:
    os.dup2(buffer.fileno(), 2)
    try:
      yield
    finally:
      sys.stderr.flush()
      os.dup2(screen, 2)
      os.close(screen)
      buffer.seek(0)
      for line in buffer:
        if not _START_UP_MESSAGE.match(line):
          os.write(2, line)
