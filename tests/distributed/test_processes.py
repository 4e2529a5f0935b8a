"""Processes find each other, or say what is missing."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from rosetta_t5.distributed.join import join_processes
from rosetta_t5.distributed.roll_call import Roll, answer_to

PROGRAM = """
import sys
import jax
from rosetta_t5.distributed.join import join_processes
join_processes(True, sys.argv[1], int(sys.argv[3]), int(sys.argv[2]), 60)
print(jax.process_index(), jax.process_count(), len(jax.devices()))
"""
# Process 1 has another jax than process 0.
UNLIKE = (
  """
import dataclasses, sys
import jax
from rosetta_t5.distributed import preflight
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
  "import sys; from rosetta_t5.distributed import waiting as r; r.Waiting.__init__.__defaults__ = (0.5,)",
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


def free_address() -> str:
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{free.getsockname()[1]}"


def launch(program: str, address: str, index: int, count: int = 2) -> subprocess.Popen:
  """Starts a process of the program that is told to be this one of so many."""
  command = [sys.executable, "-c", program, address, str(index), str(count)]
  return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(program: str, *places: tuple[int, int]) -> list[tuple[int, str, str]]:
  """Returns what processes, each told (index, count), end in, print and complain."""
  address = free_address()
  processes = [launch(program, address, *place) for place in places]
  said = [process.communicate(timeout=120) for process in processes]
  return [(process.returncode, *each) for process, each in zip(processes, said, strict=True)]


def test_two_processes_meet_and_say_who_they_are():
  (_, first, _), (_, second, _) = run(PROGRAM, (0, 2), (1, 2))
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
    "join_processes(True, sys.argv[1], int(sys.argv[3]), int(sys.argv[2]), 60)",
    "join_processes(True)",
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
  for status, _, complaint in run(UNLIKE, (0, 2), (1, 2)):
    assert status != 0
    assert "the processes of this run are not alike" in complaint
    assert f"process 1 on {host} has jax 0.10.1, but process 0 on {host} has 0.10.0" in complaint


@pytest.mark.slow
def test_a_process_that_waits_in_vain_says_for_whom_and_how_long():
  ((status, _, complaint),) = run(ALONE, (0, 2))
  assert status == 70
  assert "process 0 of 2: waiting at 127.0.0.1:" in complaint
  assert re.search(r"waiting at 127.0.0.1:\d+ for process 1, for \d s of at most 3", complaint)
  assert "error: process 0 of 2 has waited 3 s, and still it is waiting at 127.0.0.1:" in complaint


@pytest.mark.slow
def test_a_process_says_that_process_0_is_not_there():
  ((status, _, complaint),) = run(ALONE, (1, 2))
  assert status == 70
  assert (
    "error: process 1 of 2 has waited 3 s, and still it is waiting for process 0, and nothing"
    in complaint
  )


@pytest.mark.slow
@pytest.mark.parametrize("indices", [(0, 0), (0, 1, 1)], ids=["0 twice", "1 twice"])
def test_an_index_that_two_processes_have_is_told_by_all_at_once(indices):
  started = time.monotonic()
  ended = run(PROGRAM, *[(index, len(indices)) for index in indices])
  host, twice = socket.gethostname(), indices[-1]
  for status, _, complaint in ended:
    assert status == 1
    assert re.search(
      rf"--process_index={twice} is given to two processes, process id \d+ on {host} and process "
      rf"id \d+ on {host}: each of the {len(indices)} needs its own, from 0 to {len(indices) - 1}",
      complaint,
    )
  assert time.monotonic() - started < 50, "not what they would have waited"


@pytest.mark.slow
def test_counts_that_differ_are_told_by_all_at_once():
  for status, _, complaint in run(PROGRAM, (0, 2), (1, 3)):
    assert status == 1
    assert "told --process_count=3, but process 0, process id" in complaint
    assert "was told 2" in complaint


@pytest.mark.slow
def test_a_process_too_many_leaves_a_run_that_has_begun_alone():
  address = free_address()
  stays = PROGRAM + "import time; print('met', flush=True); time.sleep(20)"
  both = [launch(stays, address, index) for index in (0, 1)]
  while both[0].stdout.readline() != "met\n":
    assert both[0].poll() is None
  late = PROGRAM.replace(
    "import sys", "import sys; from rosetta_t5.distributed import roll_call as r; r._GRACE_S = 2"
  )
  third = launch(late, address, 1)
  _, complaint = third.communicate(timeout=60)
  assert third.returncode == 1
  assert f"something else than this run's process 0 answers at {address}" in complaint
  assert "Is --process_index=1 given to two processes?" in complaint
  assert all(process.communicate(timeout=60) and process.returncode == 0 for process in both)


@pytest.fixture
def roll():
  """Returns the roll of two processes, that is being called, and its address."""
  listener = socket.create_server(("127.0.0.1", 0))
  address = f"127.0.0.1:{listener.getsockname()[1]}"
  roll = Roll(listener, 2, who="first")
  threading.Thread(target=roll.call, daemon=True).start()
  return roll, address


def meet(address):
  """Returns what the two are answered."""
  with ThreadPoolExecutor() as pool:
    both = [pool.submit(answer_to, address, index, 2, f"{index}") for index in (0, 1)]
    return [each.result(timeout=10) for each in both]


def test_two_of_one_index_are_both_told_and_so_is_who_comes_later(roll):
  roll, address = roll
  with ThreadPoolExecutor() as pool:
    both = [pool.submit(answer_to, address, 1, 2, who) for who in ("here", "there")]
    told = {each.result(timeout=10) for each in both}
  told.add(answer_to(address, 0, 2, "later"))
  (refusal,) = told
  assert b"--process_index=1 is given to two processes, " in refusal


def test_strangers_at_the_address_do_not_count(roll):
  roll, address = roll
  for said in (
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"[1]\n",
    b'rosetta-t5 {"index": 0}\n',
    b"rosetta-t5 1\n",
  ):
    with socket.create_connection(address.split(":")) as stranger:
      stranger.sendall(said)
  assert roll.missing() == [0, 1]
  assert meet(address) == [b"rosetta-t5 \n"] * 2


def test_a_process_that_comes_back_before_all_are_there_takes_its_place_again(roll):
  roll, address = roll
  with socket.create_connection(address.split(":")) as lost:
    lost.sendall(b'rosetta-t5 {"index": 1, "count": 2, "who": "lost"}\n')
    while roll.missing() != [0]:
      time.sleep(0.01)
  assert roll.missing() == [0, 1]
  assert meet(address) == [b"rosetta-t5 \n"] * 2
