"""A stand-in for Python whose processes are forked from one that has imported jax and rosetta_t5.

A new process takes seconds of a processor to import them. Tests start `python()` if they are about what a program
does, and `sys.executable` if they are about imports, installed files, the start of Python, or process ids: the
process that a test starts only stands for the one that runs the program. Whoever kills it kills the other one a
moment later, which has ended when its output has.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator

_HERE = pathlib.Path(__file__).parent
# The path of the stand-in that serves all tests.
VARIABLE = "FORKED_PYTHON"
# What Python, jax and XLA read when they start; each command has its own. PYTHONPATH stays: it may say which copy of this
# package is tested.
_READ_AT_START = re.compile("JAX_|PYTHON(?!PATH)|XLA_FLAGS")


def python() -> str:
  """Returns the path of the stand-in for Python."""
  return os.environ[VARIABLE]


@contextlib.contextmanager
def serving(with_seqio: bool = False) -> Iterator[str]:
  """Yields the path of a stand-in for Python, in a folder with one for `rosetta-t5`.

  Nothing is imported before the first use.

  Args:
    with_seqio: whether the processes have imported TensorFlow and SeqIO too, as runs do.
  """
  environment = {n: x for n, x in os.environ.items() if not _READ_AT_START.match(n)}
  with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
    listener.bind(f"{folder}/socket")
    listener.listen()
    for name in ("python", "rosetta-t5"):
      stand_in = pathlib.Path(folder, name)
      command = f'exec {sys.executable} -SE {_HERE}/client.py {folder}/socket {name} "$@"'
      stand_in.write_text(f"#!/bin/sh\n{command}\n")
      stand_in.chmod(0o755)
    with subprocess.Popen(
      [sys.executable, _HERE / "server.py", str(listener.fileno()), *["seqio"] * with_seqio],
      stdin=subprocess.PIPE,  # Its end is the server's.
      pass_fds=[listener.fileno()],
      env=environment,
      start_new_session=True,
    ):
      yield f"{folder}/python"
