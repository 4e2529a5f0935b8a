"""The processes of a run find each other, report which ones are missing or different, and end together."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from forked_python import python

from rosetta_t5.distributed.join import join_processes
from rosetta_t5.distributed.presence import call_roll, report_to_process_0

PROGRAM = """
import sys
import jax
from rosetta_t5.distributed.join import join_processes
join_processes(True, sys.argv[1], int(sys.argv[3]), int(sys.argv[2]), 60)
print(jax.process_index(), jax.process_count(), len(jax.devices()))
"""
# Each process has a setting and a version of jax of its own, in the arguments after its count.
DIFFERENT = PROGRAM.replace(
  "import jax\n",
  """import importlib.metadata
import jax
installed_version = importlib.metadata.version
importlib.metadata.version = lambda package: (
  f"0.10.{sys.argv[2]}" if package == "jax" else installed_version(package)
)
""",
)
IMPATIENT = PROGRAM.replace(", 60)", ", 3)").replace(
  "import sys",
  "import sys; from rosetta_t5.distributed import presence; presence.REPORT_INTERVAL_S = 0.5",
)


def test_a_single_process_needs_no_rendezvous():
  join_processes(False)


@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    ((False, None, 2), "--process_count has no effect without --multiprocess_gpu"),
    ((True, "host:1", 2), "--process_index is missing, and no known launcher started this process"),
    (
      (True, "host:1", 2, 2),
      "--process_index must be from 0 to 1, because --process_count=2, got 2",
    ),
    ((True, "host:1", 2, -1), "--process_index must be from 0 to 1, .* got -1"),
  ],
)
def test_inconsistent_flags_are_errors(arguments, text):
  with pytest.raises(ValueError, match=text):
    join_processes(*arguments)


def free_address() -> str:
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{free.getsockname()[1]}"


def launch(program: str, address: str, index: int, count: int = 2) -> subprocess.Popen:
  """Starts the program as process `index` of `count`."""
  command = [python(), "-c", program, address, str(index), str(count)]
  return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(program: str, *identities: tuple[int, int]) -> list[tuple[int, str, str]]:
  """Starts one process for each (index, count); returns their (status, stdout, stderr)."""
  address = free_address()
  processes = [launch(program, address, *identity) for identity in identities]
  outputs = [process.communicate(timeout=120) for process in processes]
  return [(p.returncode, *output) for p, output in zip(processes, outputs, strict=True)]


def test_two_processes_join_and_print_their_versions():
  (_, first, _), (_, second, _) = run(PROGRAM, (0, 2), (1, 2))
  host = socket.gethostname()
  lines = [line for line in first.splitlines() if "[Gloo]" not in line]
  assert lines[0].startswith(f"2 processes on {host}, each with 1 cpu; rosetta-t5 ")
  assert f"jax {jax.__version__}, jaxlib " in lines[0]
  assert (lines[1:], second.splitlines()[-1:]) == (["0 2 2"], ["1 2 2"])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ompi_info") is None, reason="Open MPI is not installed")
def test_processes_of_open_mpi_find_each_other_without_flags():
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
def test_different_versions_are_an_error_on_every_process():
  host = socket.gethostname()
  for status, _, stderr in run(DIFFERENT, (0, 2), (1, 2)):
    assert status == 1
    assert "the processes of this run have different settings" in stderr
    assert re.search(rf"1 on {host} +jax +0\.10\.0 +0\.10\.1 +1\n", stderr), stderr


@pytest.mark.slow
def test_process_0_reports_which_process_is_missing_and_gives_up_at_the_timeout():
  ((status, _, stderr),) = run(IMPATIENT, (0, 2))
  assert status == 70
  assert re.search(
    r"process 0 of 2, coordinator 127.0.0.1:\d+: waiting for process 1, \d of at most 3 s\n", stderr
  )
  assert re.search(
    r"error: process 0 of 2, .* gave up after 3 s while waiting for process 1", stderr
  )


@pytest.mark.slow
def test_other_processes_report_that_process_0_is_missing():
  ((status, _, stderr),) = run(IMPATIENT, (1, 2))
  assert status == 70
  assert "gave up after 3 s while waiting for process 0; nothing is reachable" in stderr


@pytest.mark.slow
@pytest.mark.parametrize("indices", [(0, 0), (0, 1, 1)], ids=["0 twice", "1 twice"])
def test_a_duplicate_index_is_an_error_on_every_process_at_once(indices):
  started = time.monotonic()
  ended = run(PROGRAM, *[(index, len(indices)) for index in indices])
  host, twice = socket.gethostname(), indices[-1]
  for status, _, stderr in ended:
    assert status == 1
    assert re.search(
      rf"--process_index={twice} is given to two processes, process id \d+ on {host} and process "
      rf"id \d+ on {host}: each of the {len(indices)} processes needs its own index, from 0 to "
      rf"{len(indices) - 1}",
      stderr,
    )
  assert time.monotonic() - started < 50, "the processes must not wait for the timeout"


@pytest.mark.slow
def test_different_counts_are_an_error_on_every_process_at_once():
  for status, _, stderr in run(PROGRAM, (0, 2), (1, 3)):
    assert status == 1
    assert "has --process_count=3, but process 0 has --process_count=2: give all" in stderr


@pytest.mark.slow
def test_a_superfluous_process_does_not_disturb_a_run_that_has_started():
  address = free_address()
  stays = PROGRAM + "import time; print('joined', flush=True); time.sleep(20)"
  both = [launch(stays, address, index) for index in (0, 1)]
  while both[0].stdout.readline() != "joined\n":
    assert both[0].poll() is None
  third = launch(IMPATIENT, address, 1)
  _, stderr = third.communicate(timeout=60)
  assert third.returncode == 70
  assert "waiting for process 0; a run that has started, or another program, uses its" in stderr
  assert all(process.communicate(timeout=60) and process.returncode == 0 for process in both)


@pytest.fixture
def roll_call():
  """Returns the address and the future result of a roll call of two processes that is in progress."""
  listener = socket.create_server(("127.0.0.1", 0))
  address = f"127.0.0.1:{listener.getsockname()[1]}"
  with ThreadPoolExecutor() as pool:
    yield address, pool.submit(call_roll, listener, _report(0), lambda status: None)


def _report(index):
  return {"index": index, "count": 2, "name": "name"}


def _join(address, index=1):
  return report_to_process_0(address, _report(index), lambda status: None)


def test_both_processes_with_one_index_are_refused(roll_call):
  address, peers = roll_call
  for end in (lambda: _join(address, 0), peers.result):
    with pytest.raises(ValueError, match="--process_index=0 is given to two processes, "):
      end()


def test_other_programs_and_lost_processes_do_not_disturb_the_roll_call(roll_call):
  address, peers = roll_call
  lost = b'rosetta-t5 {"index": 1, "count": 3, "name": "lost"}'  # killed in the middle of the line
  for message in (b"", b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", lost):
    with socket.create_connection(address.split(":")) as other:
      other.sendall(message)
  with _join(address):
    ((peer, name),) = peers.result(timeout=10).items()
  peer.close()
  assert name == "process 1, name,"


FAULTY = """
import os, signal, sys, time
import jax
from rosetta_t5.distributed import join_processes
from rosetta_t5.user_errors import exit_on_user_error

address, index, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def settings():
  SETTINGS
with exit_on_user_error(ValueError):
  join_processes(True, address, count, index, 60, settings)
  if index == count - 1:
    FAULT
  time.sleep(100)
"""
SAME = FAULTY.replace("SETTINGS", "return {'TRAIN_STEPS': '6'}")


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_process_that_fails_ends_at_once_and_the_others_repeat_its_error(count):
  started = time.monotonic()
  *others, (status, _, stderr) = run(
    SAME.replace("FAULT", "raise ValueError('wrong:' + chr(10) + '  row 7')"),
    *((index, count) for index in range(count)),
  )
  assert time.monotonic() - started < 60
  assert status == 1
  assert "error: wrong:\n  row 7" in stderr
  for status, _, stderr in others:
    assert status == 70
    assert re.search(
      rf"error: this run ends because process {count - 1}, process id \d+ on {socket.gethostname()}, "
      r"failed: ValueError: wrong:\n  row 7\n",
      stderr,
    )


def test_a_process_that_is_killed_is_named_by_the_others():
  started = time.monotonic()
  program = SAME.replace("FAULT", "os.kill(os.getpid(), signal.SIGKILL)")
  (status, _, stderr), _ = run(program, (0, 2), (1, 2))
  assert time.monotonic() - started < 60
  assert status == 70
  assert re.search(r"this run ends because process 1, .*, has died without a message", stderr)


def test_the_first_difference_in_the_settings_is_named_with_its_process():
  program = FAULTY.replace("FAULT", "pass").replace(
    "SETTINGS", "return {'TRAIN_STEPS': '6', 'SEED': str(index // 2), 'MODEL_DIR': str(index // 2)}"
  )
  for status, _, stderr in run(program, (0, 3), (1, 3), (2, 3)):
    assert status == 1
    assert re.search(
      r"different settings, and would .*:\n"
      r"  process +first difference +process 0 +this process +in all\n"
      rf"  2 on {socket.gethostname()} +SEED +0 +1 +2\n"
      r"Start all processes with the same command",
      stderr,
    )


@pytest.mark.slow
def test_an_error_in_the_settings_of_one_process_ends_the_others():
  program = SAME.replace(
    "  return", "  if index: raise ValueError('there is no gin file')\n  return"
  )
  (status, _, stderr), (status_1, _, _) = run(program.replace("FAULT", "pass"), (0, 2), (1, 2))
  assert (status, status_1) == (70, 1)
  assert "failed: ValueError: there is no gin file" in stderr
