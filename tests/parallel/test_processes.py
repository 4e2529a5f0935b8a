"""Processes find each other, or say what is missing."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from rosetta_t5.parallel.processes import join_processes

PROGRAM = """
import sys
import jax
from rosetta_t5.parallel.processes import join_processes
join_processes(True, sys.argv[1], 2, int(sys.argv[2]), 60)
print(jax.process_index(), jax.process_count(), len(jax.devices()))
"""


def test_one_process_alone_joins_nothing():
  join_processes(False)


@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    ((False, None, 2), "--process_count: has no effect without --multiprocess_gpu"),
    ((True, "host:1", 2), "--process_index is not given"),
    ((True, "host:1", 2, 2), "--process_index=2 does not exist among --process_count=2"),
    ((True, "host:1", 2, -1), "processes count from 0 to 1"),
  ],
)
def test_flags_that_do_not_fit_together_are_refused(arguments, text):
  with pytest.raises(ValueError, match=text):
    join_processes(*arguments)


def test_two_processes_meet():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  commands = [[sys.executable, "-c", PROGRAM, address, str(index)] for index in range(2)]
  processes = [subprocess.Popen(c, stdout=subprocess.PIPE, text=True) for c in commands]
  printed = [process.communicate(timeout=120)[0].split() for process in processes]
  assert printed == [["0", "2", "2"], ["1", "2", "2"]]
