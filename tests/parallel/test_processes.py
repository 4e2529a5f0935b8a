"""Processes find each other, or say what is missing."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys

import jax
import pytest

from rosetta_t5.parallel.processes import join_processes

PROGRAM = """
import sys
import jax
from rosetta_t5.parallel.processes import join_processes
join_processes(True, sys.argv[1], 2, int(sys.argv[2]), 60)
print(jax.process_index(), jax.process_count(), len(jax.devices()))
"""
# Process 1 has another jax than process 0.
UNLIKE = (
  """
import dataclasses, sys
import jax
from rosetta_t5.parallel import preflight
real = preflight.own_facts
def facts():
  own = real()
  return dataclasses.replace(own, versions=own.versions | {"jax": f"0.10.{sys.argv[2]}"})
preflight.own_facts = facts
"""
  + PROGRAM
)
ALONE = PROGRAM.replace(", 60)", ", 3)").replace(
  "import sys",
  "import sys; from rosetta_t5.parallel import rendezvous as r; r.Waiting.__init__.__defaults__ = (0.5,)",
)


def test_one_process_alone_joins_nothing():
  join_processes(False)


@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    ((False, None, 2), "--process_count: has no effect without --multiprocess_gpu"),
    (
      (True, "host:1", 2),
      "--process_index is not given, and nothing known has started this process",
    ),
    ((True, "host:1", 2, 2), "--process_index=2 does not exist among --process_count=2"),
    ((True, "host:1", 2, -1), "processes count from 0 to 1"),
  ],
)
def test_flags_that_do_not_fit_together_are_refused(arguments, text):
  with pytest.raises(ValueError, match=text):
    join_processes(*arguments)


def run(program: str, count: int) -> list[tuple[int, str, str]]:
  """Returns what processes 0 to count - 1 of the program, told to be two, end in, print and complain."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  commands = [[sys.executable, "-c", program, address, str(index)] for index in range(count)]
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
  processes = [subprocess.Popen(command, **pipes) for command in commands]
  said = [process.communicate(timeout=120) for process in processes]
  return [(process.returncode, *each) for process, each in zip(processes, said, strict=True)]


def test_two_processes_meet_and_say_who_they_are():
  (_, first, _), (_, second, _) = run(PROGRAM, 2)
  host = socket.gethostname()
  lines = [line for line in first.splitlines() if "[Gloo]" not in line]
  assert lines[0] == "2 processes on 1 host with 2 devices:"
  assert lines[1] == f"  {host}  processes 0-1: 2 cpu"
  assert f"jax {jax.__version__}, jaxlib " in lines[2]
  assert re.fullmatch(
    r"all-reduce of 1 MiB over 2 devices: \S+ ms, \S+ GB/s sent by each", lines[3]
  )
  assert (lines[4:], second.splitlines()[-1:]) == (["0 2 2"], ["1 2 2"])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ompi_info") is None, reason="Open MPI is not installed")
def test_processes_of_open_mpi_find_each_other_without_being_told():
  program = PROGRAM.replace(
    "join_processes(True, sys.argv[1], 2, int(sys.argv[2]), 60)", "join_processes(True)"
  )
  command = ["mpiexec", "--oversubscribe", "-n", "2", sys.executable, "-c", program]
  root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
  done = subprocess.run(
    command, env=os.environ | root, capture_output=True, text=True, check=False, timeout=300
  )
  assert done.returncode == 0, done.stderr
  assert {"0 2 2", "1 2 2"} <= set(done.stdout.splitlines())


@pytest.mark.slow
def test_processes_of_different_versions_are_refused_by_all():
  host = socket.gethostname()
  for status, _, complaint in run(UNLIKE, 2):
    assert status != 0
    assert "the processes of this run are not alike" in complaint
    assert f"process 1 on {host} has jax 0.10.1, but process 0 on {host} has 0.10.0" in complaint


@pytest.mark.slow
def test_a_process_that_waits_in_vain_says_for_whom_and_how_long():
  ((status, _, complaint),) = run(ALONE, 1)
  assert status == 70
  assert "process 0 of 2: waiting at 127.0.0.1:" in complaint
  assert re.search(r"for the other processes, for \d s of at most 3", complaint)
  assert "error: process 0 of 2 has waited 3 s, and still it is waiting at 127.0.0.1:" in complaint


@pytest.mark.slow
def test_a_process_says_that_process_0_is_not_there():
  ((status, _, complaint),) = run(ALONE.replace("int(sys.argv[2])", "1"), 1)
  assert status == 70
  assert (
    "error: process 1 of 2 has waited 3 s, and still it is waiting for process 0, and nothing"
    in complaint
  )
