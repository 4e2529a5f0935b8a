"""A process that hangs, freezes or dies ends the others, which name it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import jax
import pytest

from rosetta_t5.distributed.watchdog import (
  EXIT_STATUS,
  Report,
  Watchdog,
  blocking,
  is_failed_collective,
  is_stalled,
)

_HERE = pathlib.Path(__file__).parent
_RUN = _HERE.parent / "run"


# Above what starting takes on a loaded machine, below jax's own patience with a frozen process.
_PATIENCE = {"ROSETTA_T5_STALL_SECONDS": "20"}


def report(process: int, position: str, silent: bool = False, seconds: float = 1.0) -> Report:
  return Report(process, "here", position, seconds, silent=silent)


@pytest.mark.parametrize(
  ("positions", "guilty"),
  [
    (["computing step 3"] * 3, []),
    (["computing step 3", "waiting for the batch of step 3", "computing step 3"], [1]),
    (["waiting for the batch of step 3", "computing step 3"], [0]),
    (["saving step 3", "saving step 3", "evaluating step 3"], [2]),
    (["saving step 0", "starting", "starting"], [1, 2]),
  ],
)
def test_whoever_stands_elsewhere_holds_up_the_others(positions, guilty):
  assert blocking({i: report(i, position) for i, position in enumerate(positions)}) == guilty


def test_a_silent_process_holds_up_the_others_wherever_it_stood():
  reports = {0: report(0, "computing step 3"), 1: report(1, "computing step 3", silent=True)}
  assert blocking(reports) == [1]


def test_who_has_done_its_part_holds_up_nobody():
  finished = Report(1, "here", "saving step 3", 9000.0, left=True)
  assert blocking({0: report(0, "evaluating step 3"), 1: finished}) == []
  assert blocking({1: finished}) == []


def test_a_run_is_stalled_only_when_nobody_moves():
  slow = report(0, "saving step 0", seconds=31)
  assert not is_stalled({0: slow, 1: report(1, "computing step 1", seconds=1)}, limit=30)
  assert is_stalled({0: slow, 1: report(1, "computing step 1", seconds=30)}, limit=30)
  assert is_stalled({0: slow, 1: report(1, "computing step 1", silent=True)}, limit=30)


def test_a_process_that_ends_because_of_another_is_not_named_as_silent(capsys):
  watchdog = Watchdog(seconds=1800)
  watchdog._heard = dict.fromkeys((1, 2), (3, time.monotonic() - 20))
  reports = {
    1: Report(1, "here", "computing step 3", 0.0, left=True),
    2: report(2, "saving step 3"),
  }
  watchdog._note_silence(reports)
  said = capsys.readouterr().err
  assert said.startswith("silent: process 2 (here)")
  assert "process 1" not in said
  assert is_stalled({0: report(0, "saving step 3", seconds=31), 1: reports[1]}, limit=30)


def test_the_time_before_a_run_begins_is_no_stall():
  watchdog = Watchdog(seconds=30)
  watchdog._since -= 1000
  with watchdog:
    assert watchdog._own(beat=1, left=False)["seconds"] < 30


def _of(error: Exception, cause: Exception) -> Exception:
  error.__cause__ = cause
  return error


_GLOO = ValueError("UNKNOWN: Gloo AllGather failed: Read error [127.0.0.1]:19350")


@pytest.mark.parametrize(
  ("error", "is_one"),
  [
    (jax.errors.JaxRuntimeError("INTERNAL: Gloo all-reduce failed"), True),
    (_of(ValueError("checkpoint_10 could not be saved"), _GLOO), True),
    (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
    (_of(ValueError("too large"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: …")), False),
    (ValueError("BATCH_SIZE = 7"), False),
  ],
)
def test_a_collective_that_fails_is_known_by_what_an_error_was_made_of(error, is_one):
  assert is_failed_collective(error) is is_one


@contextlib.contextmanager
def two_processes(folder: pathlib.Path, **environment: str) -> Iterator[list[subprocess.Popen]]:
  """Yields two processes of one run that will take long."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  variables = os.environ | {"PYTHONPATH": f"{_RUN}:{_HERE}", "JAX_PLATFORMS": "cpu"} | environment
  command = [
    *(sys.executable, "-m", "t5x.train", f"--gin_file={_RUN / 'run.gin'}", "--multiprocess_gpu"),
    *(f"--gin.MODEL_DIR='{folder}/run'", "--gin.TRAIN_STEPS=1000000", "--process_count=2"),
    *(f"--coordinator_address=localhost:{port}", "--gin.train.eval_period=1000000"),
    *(
      "--gin.train.train_eval_dataset_cfg=None",
      "--gin.train.stats_period=1",
      "--gin.utils.SaveCheckpointConfig.period=1000000",
    ),
    *(environment.get("ARGUMENTS", "").split()),
  ]
  processes = []
  for index in range(2):
    arguments = [*command, f"--process_index={index}"]
    with (folder / f"{index}.txt").open("w") as output:
      processes.append(
        subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT, env=variables)
      )
  try:
    yield processes
  finally:
    for process in processes:
      process.kill()
      process.wait()


def wait_until_trained(folder: pathlib.Path, process: subprocess.Popen) -> None:
  end = time.monotonic() + 600
  while "step 5/" not in (folder / "0.txt").read_text():
    going = process.poll() is None and time.monotonic() < end
    assert going, (folder / "0.txt").read_text()[-3000:]
    time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("sent", "patience"), [(signal.SIGSTOP, _PATIENCE), (signal.SIGSTOP, {}), (signal.SIGKILL, {})]
)
def test_a_process_that_freezes_or_dies_is_named_and_ends_the_other_within_a_minute(
  tmp_path, sent, patience
):
  with two_processes(tmp_path, **patience) as (first, second):
    wait_until_trained(tmp_path, first)
    time.sleep(6)  # They tell where they stand every 5 s.
    second.send_signal(sent)
    assert first.wait(60) != 0
    said = (tmp_path / "0.txt").read_text()
    noted = re.findall(r"^silent: process (\d+) \(\S+, process id (\d+)\)", said, re.MULTILINE)
    assert noted == [("1", str(second.pid))], said[-5000:]
    if sent == signal.SIGKILL:
      assert "error: this run has lost process 1" in said, said[-5000:]
      assert "Traceback" not in said, said[-5000:]
    if patience:
      assert first.returncode == EXIT_STATUS, said[-5000:]
      assert re.search(
        rf"process id {second.pid}\): (computing|waiting for the batch of) step", said
      )
      assert "silent for" in said
      assert said.count("<- holds up the others") == 1


@pytest.mark.slow
def test_a_process_that_hangs_is_named_with_its_stack_and_both_end(tmp_path):
  hang = "--gin.MIXTURE_OR_TASK_NAME='hangs' --gin.MIXTURE_OR_TASK_MODULE='hanging_task'"
  with two_processes(tmp_path, **_PATIENCE, ARGUMENTS=hang) as (first, second):
    assert first.wait(600) != 0
    assert second.wait(60) != 0
  said = (tmp_path / "0.txt").read_text()
  assert f"process id {second.pid}): waiting for the batch of step" in said
  assert "Process 1 stands at:" in said
  assert "/data/feed.py" in said.partition("Process 1 stands at:")[2]


_PARTS = """
import sys, time
import jax
from rosetta_t5.distributed import Watchdog
port, index = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", 2, int(index))
with Watchdog() as watchdog:
  watchdog.set_phase("evaluating")
  time.sleep(8 if index == "1" else 35)
time.sleep(27 if index == "1" else 0)
"""


@pytest.mark.slow
def test_a_process_that_has_done_its_part_is_not_missed_by_one_that_goes_on():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", _PARTS, port, str(index)], stderr=subprocess.PIPE, text=True
    )
    for index in range(2)
  ]
  said = [process.communicate(timeout=300)[1] for process in processes]
  assert [process.returncode for process in processes] == [0, 0], said
  assert "silent" not in "".join(said)
