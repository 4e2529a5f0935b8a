"""When a process hangs, freezes or dies, the others end and name it."""

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

from rosetta_t5.distributed.presence import is_failed_collective
from rosetta_t5.distributed.watchdog import (
  Report,
  Watchdog,
  find_blocking,
  is_stalled,
)

_HERE = pathlib.Path(__file__).parent
_RUN = _HERE.parent / "run"


# Longer than a start takes on a loaded machine, shorter than jax's own timeout for a frozen process.
_STALL_LIMIT = {"ROSETTA_T5_STALL_SECONDS": "20"}


def report(process: int, phase: str, seconds: float = 1.0) -> Report:
  return Report(process, "host", phase, seconds)


@pytest.mark.parametrize(
  ("phases", "expected"),
  [
    (["computing step 3"] * 3, []),
    (["computing step 3", "waiting for the batch of step 3", "computing step 3"], [1]),
    (["waiting for the batch of step 3", "computing step 3"], [0]),
    (["saving step 3", "saving step 3", "evaluating step 3"], [2]),
    (["saving step 0", "starting", "starting"], [1, 2]),
  ],
)
def test_a_process_in_a_rare_phase_blocks_the_others(phases, expected):
  blocking = find_blocking([report(i, phase) for i, phase in enumerate(phases)])
  assert [one.process for one in blocking] == expected


def test_a_run_is_stalled_only_when_no_process_makes_progress():
  slow = report(0, "saving step 0", seconds=31)
  assert not is_stalled([slow, report(1, "computing step 1", seconds=1)], limit_s=30)
  assert is_stalled([slow, report(1, "computing step 1", seconds=30)], limit_s=30)


def test_the_time_before_a_run_starts_does_not_count_as_a_stall():
  watchdog = Watchdog()
  time.sleep(0.2)
  assert watchdog.seconds_in_phase >= 0.2
  with watchdog:
    assert watchdog.seconds_in_phase < 0.2


def test_watched_batches_end_when_the_data_ends():
  assert list(Watchdog().watch_batches(iter("ab"), step=7)) == ["a", "b"]


def _caused_by(error: Exception, cause: Exception) -> Exception:
  error.__cause__ = cause
  return error


_GLOO = ValueError("UNKNOWN: Gloo AllGather failed: Read error [127.0.0.1]:19350")


@pytest.mark.parametrize(
  ("error", "expected"),
  [
    (jax.errors.JaxRuntimeError("INTERNAL: Gloo all-reduce failed"), True),
    (_caused_by(ValueError("checkpoint_10 could not be saved"), _GLOO), True),
    (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
    (
      _caused_by(ValueError("too large"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: …")),
      False,
    ),
    (ValueError("BATCH_SIZE = 7"), False),
  ],
)
def test_a_failed_collective_is_recognized_by_the_causes_of_an_error(error, expected):
  assert is_failed_collective(error) is expected


@contextlib.contextmanager
def two_processes(folder: pathlib.Path, **environment: str) -> Iterator[list[subprocess.Popen]]:
  """Yields the two processes of a run that takes long."""
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
  ("sent", "text"),
  [
    (signal.SIGSTOP, r"unhealthy \(stopped sending heartbeats\):\n1\n"),  # jax's
    (signal.SIGKILL, "error: this run ends because process 1, process id {pid} on "),
  ],
)
def test_a_process_that_freezes_or_dies_is_named_and_ends_the_other(tmp_path, sent, text):
  with two_processes(tmp_path) as (first, second):
    wait_until_trained(tmp_path, first)
    second.send_signal(sent)
    assert first.wait(150) != 0
    output = (tmp_path / "0.txt").read_text()
    assert re.search(text.format(pid=second.pid), output), output[-5000:]
    assert "Traceback" not in output, output[-5000:]


@pytest.mark.slow
def test_a_process_that_hangs_is_named_with_its_stack_and_both_end(tmp_path):
  hang = "--gin.MIXTURE_OR_TASK_NAME='hangs' --gin.MIXTURE_OR_TASK_MODULE='hanging_task'"
  with two_processes(tmp_path, **_STALL_LIMIT, ARGUMENTS=hang) as (first, second):
    assert first.wait(600) != 0
    assert second.wait(60) != 0
  output = (tmp_path / "0.txt").read_text()
  assert f"process id {second.pid}): waiting for the batch of step" in output
  assert "The main thread of process 1 is at:" in output
  assert "/data/pipeline/feed.py" in output.partition("The main thread of process 1 is at:")[2]


_PARTS = """
import os, sys, time
import jax
from rosetta_t5.distributed import Watchdog
port, index = sys.argv[1:]
os.environ["ROSETTA_T5_STALL_SECONDS"] = "10"
jax.distributed.initialize(f"localhost:{port}", 2, int(index))
with Watchdog() as watchdog:
  watchdog.set_phase("evaluating")
  time.sleep(8 if index == "1" else 35)
time.sleep(27 if index == "1" else 0)
"""


@pytest.mark.slow
def test_a_process_that_has_finished_its_part_does_not_end_the_others():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", _PARTS, port, str(index)], stderr=subprocess.PIPE, text=True
    )
    for index in range(2)
  ]
  output = [process.communicate(timeout=300)[1] for process in processes]
  assert [process.returncode for process in processes] == [0, 0], output
