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

from rosetta_t5.distributed.coordination import LaunchInfo, find_launch_info, join_processes
from rosetta_t5.distributed.presence import call_roll, report_to_process_0
from rosetta_t5.terminal import progress_bar

PROGRAM = """
import sys
import jax
from rosetta_t5.distributed.coordination import join_processes
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
IMPATIENT = PROGRAM.replace(", 60)", ", 3)")


SLURM = {
  "SLURM_JOB_ID": "100",
  "SLURM_STEP_ID": "2",
  "SLURM_PROCID": "9",
  "SLURM_LOCALID": "1",
  "SLURM_NTASKS": "16",
  "SLURM_JOB_NODELIST": "gpu[017-018],login1",
}
OPEN_MPI = {
  "OMPI_COMM_WORLD_RANK": "3",
  "OMPI_COMM_WORLD_SIZE": "8",
  "OMPI_COMM_WORLD_LOCAL_RANK": "3",
}
URI = {"OMPI_MCA_orte_hnp_uri": "1234567.0;tcp://10.0.0.3,10.1.0.3:34911"}
PALS = {"PALS_RANKID": "5", "PMI_RANK": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1"}


@pytest.mark.parametrize(
  ("environment", "info"),
  [
    ({}, ()),
    (SLURM, ("gpu017:13947", 16, 9, 1)),
    (SLURM | {"SLURM_JOB_NODELIST": "node0", "SLURM_STEP_ID": "0"}, ("node0:13945", 16, 9, 1)),
    (OPEN_MPI, (None, 8, 3, 3)),
    (OPEN_MPI | URI, ("10.0.0.3:25417", 8, 3, 3)),
    ({"JOB_COMPLETION_INDEX": "4"}, (None, None, 4)),
    # A shell on a node of an allocation: srun did not start it, so it belongs to no run.
    ({"SLURM_JOB_ID": "100"}, ()),
  ],
)
def test_launch_info_is_read_from_the_launchers_environment(environment, info):
  assert find_launch_info(environment) == LaunchInfo(*info)


@pytest.mark.parametrize(("mpi", "ranks"), [(OPEN_MPI, (3, 3)), (PALS, (5, 1))])
def test_pbs_gives_the_nodes_and_its_mpiexec_the_indices(tmp_path, mpi, ranks):
  (tmp_path / "nodes").write_text("gpu03\n" * 4 + "gpu04\n" * 4)
  info = find_launch_info(mpi | {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_JOBID": "77.server"})
  assert info == LaunchInfo("gpu03:13577", 8, *ranks)


def test_a_single_process_needs_no_rendezvous():
  join_processes(False)


@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    ((False, None, 2), "--process_count has no effect without --multiprocess_gpu"),
    (
      (True, "host:1", 2),
      "--process_index is missing, and the environment variables of this process",
    ),
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
    assert f"\n  process 1 on {host}: jax is 0.10.1, but 0.10.0 on process 0 (1 differ)\n" in stderr


@pytest.mark.slow
@pytest.mark.parametrize(
  ("index", "missing"),
  [(0, "waiting for process 1"), (1, "waiting for process 0, which does not answer")],
)
def test_a_process_names_the_missing_ones_when_the_time_is_over(index, missing):
  ((status, _, stderr),) = run(IMPATIENT, (index, 2))
  assert status == 1
  assert re.search(
    rf"ValueError: process {index} of 2, coordinator 127.0.0.1:\d+  {missing}", stderr
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  "identities",
  [[(0, 2), (0, 2)], [(0, 3), (1, 3), (1, 3)], [(0, 2), (1, 3)]],
  ids=["0 twice", "1 twice", "different counts"],
)
def test_wrong_indices_and_counts_are_an_error_on_every_process_at_once(identities):
  started = time.monotonic()
  for status, _, stderr in run(PROGRAM, *identities):
    assert status == 1
    index, count = identities[-1]
    assert "each process of a run needs its own --process_index" in stderr
    assert re.search(
      rf"\n  process {index}, process id \d+ on {socket.gethostname()}, has --process_count={count}",
      stderr,
    )
  assert time.monotonic() - started < 50, "the processes must not wait for the timeout"


@pytest.mark.slow
def test_a_superfluous_process_does_not_disturb_a_run_that_has_started():
  address = free_address()
  stays = PROGRAM + "import time; print('joined', flush=True); time.sleep(20)"
  both = [launch(stays, address, index) for index in (0, 1)]
  while both[0].stdout.readline() != "joined\n":
    assert both[0].poll() is None
  third = launch(IMPATIENT, address, 1)
  _, stderr = third.communicate(timeout=60)
  assert third.returncode == 1
  assert "waiting for process 0, which does not answer at this address" in stderr
  assert all(process.communicate(timeout=60) and process.returncode == 0 for process in both)


def test_other_programs_and_lost_processes_do_not_disturb_the_roll_call():
  listener = socket.create_server(("127.0.0.1", 0))
  address, end = f"127.0.0.1:{listener.getsockname()[1]}", time.monotonic() + 60
  reports = [{"index": index, "count": 2, "name": f"process {index},"} for index in range(2)]
  with ThreadPoolExecutor() as pool, progress_bar("test") as bar:
    peers = pool.submit(call_roll, listener, reports[0], end, bar)
    for message in (
      b"",
      b"GET / HTTP/1.1\r\n\r\n",
      b"\0\0\0\x30rosetta-t5 ",
    ):  # killed while it wrote
      with socket.create_connection(address.split(":")) as other:
        other.sendall(message)
    (connection,) = report_to_process_0(address, reports[1], end, bar)
    assert [*peers.result(timeout=10).values()] == ["process 1,"]
    connection.close()


def test_a_program_that_says_nothing_at_the_coordinators_address_is_not_waited_for():
  with socket.create_server(("127.0.0.1", 0)) as silent, progress_bar("test") as bar:
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    report = {"index": 1, "count": 2, "name": "process 1,"}
    assert report_to_process_0(address, report, time.monotonic() + 0.1, bar) is None


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


@pytest.mark.slow
def test_the_first_difference_in_the_settings_is_named_with_its_process():
  program = FAULTY.replace("FAULT", "pass").replace(
    "SETTINGS", "return {'TRAIN_STEPS': '6', 'SEED': str(index // 2), 'MODEL_DIR': str(index // 2)}"
  )
  for status, _, stderr in run(program, (0, 3), (1, 3), (2, 3)):
    assert status == 1
    assert (
      "different settings, and would compute different things:\n"
      f"  process 2 on {socket.gethostname()}: SEED is 1, but 0 on process 0 (2 differ)\n"
      "Start all processes with the same command"
    ) in stderr


@pytest.mark.slow
def test_an_error_in_the_settings_of_one_process_ends_the_others():
  program = SAME.replace(
    "  return", "  if index: raise ValueError('there is no gin file')\n  return"
  )
  (status, _, stderr), (status_1, _, _) = run(program.replace("FAULT", "pass"), (0, 2), (1, 2))
  assert (status, status_1) == (70, 1)
  assert "failed: ValueError: there is no gin file" in stderr
