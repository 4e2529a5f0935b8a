"""The lock of a MODEL_DIR, which one run holds at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from forked_python import python

from rosetta_t5.checkpoints import ModelDirInUseError, exclusive_model_dir
from rosetta_t5.checkpoints.model_dir import lock
from rosetta_t5.checkpoints.model_dir.lock import LOCK_FILE, RunLock, lock_model_dir, was_moved
from rosetta_t5.checkpoints.model_dir.lock_owner import LockOwner, current_process

HOLDER = """
import pathlib, sys, time
from rosetta_t5.checkpoints.model_dir.lock_owner import current_process
from rosetta_t5.checkpoints.model_dir.lock import RunLock
lock = RunLock(sys.argv[1], current_process())
print("held", flush=True)
time.sleep(600)
"""

CONTENDERS = """
import os, sys, time
from rosetta_t5.checkpoints.model_dir.lock_owner import current_process
from rosetta_t5.checkpoints.model_dir.lock import ModelDirInUseError, RunLock
begin = time.time() + 0.3
children = []
for _ in range(8):
  if pid := os.fork():
    children.append(pid)
    continue
  time.sleep(max(begin - time.time(), 0))
  try:
    lock = RunLock(sys.argv[1], current_process())
    os.write(1, b"got\\n")
    time.sleep(1.5)
  except ModelDirInUseError:
    os.write(1, b"refused\\n")
  os._exit(0)
for child in children:
  os.waitpid(child, 0)
"""

ELSEWHERE = dataclasses.replace(current_process(), host="node7", machine="another one", pid=11)


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
  """Fails a test that waits for minutes, because a defective lock may wait forever."""

  def fail(*_: object) -> None:
    raise TimeoutError("the lock was not released")

  before = signal.signal(signal.SIGALRM, fail)
  signal.alarm(180)
  yield
  signal.alarm(0)
  signal.signal(signal.SIGALRM, before)


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
  """Shortens the timeout of a lock to one second."""
  monkeypatch.setattr(lock, "HEARTBEAT_INTERVAL_S", 0.05)
  monkeypatch.setattr(lock, "HEARTBEAT_TIMEOUT_S", 1.0)
  monkeypatch.setattr(lock, "POLL_INTERVAL_S", 0.05)


def leave_lock(model_dir: pathlib.Path, owner: LockOwner, age: float = 0.0) -> pathlib.Path:
  path = model_dir / LOCK_FILE
  path.write_text(owner.to_json(0))
  os.utime(path, (time.time() - age,) * 2)
  return path


def test_the_lock_is_released_after_a_run_that_ends_or_fails(tmp_path):
  with lock_model_dir(tmp_path / "new"):
    assert json.loads((tmp_path / "new" / LOCK_FILE).read_text())["pid"] == os.getpid()
  with pytest.raises(KeyError), lock_model_dir(tmp_path / "new"):
    raise KeyError
  assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("damage", [pathlib.Path.unlink, lambda path: path.write_text("junk")])
def test_a_lock_that_is_removed_or_damaged_during_the_run_is_written_again(
  tmp_path, short_timeouts, damage, caplog
):
  with lock_model_dir(tmp_path):
    damage(tmp_path / LOCK_FILE)
    deadline = time.monotonic() + 30
    while not caplog.text:
      assert time.monotonic() < deadline
      time.sleep(0.01)
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
  assert "run.lock was removed or damaged during the run; it is written again" in caplog.text


def test_a_run_does_not_continue_in_a_folder_that_has_taken_the_place_of_its_own(
  tmp_path, short_timeouts
):
  folder = tmp_path / "run"
  with lock_model_dir(folder):
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    time.sleep(0.2)  # some heartbeats
    with pytest.raises(ValueError, match="run was moved or removed during the run, and another"):
      lock.check_lock_is_held(folder)
    assert list(folder.iterdir()) == []


def test_the_error_names_the_other_run_and_the_lock_is_taken_over_once_that_is_killed(tmp_path):
  command = [sys.executable, "-c", HOLDER, str(tmp_path)]
  with ended_process(command) as process:
    assert process.stdout.readline() == "held\n"
    with pytest.raises(ModelDirInUseError) as refused, lock_model_dir(tmp_path):
      pass
    assert f"MODEL_DIR {tmp_path} is in use by another training run: " in str(refused.value)
    assert f"process {process.pid} on {os.uname().nodename}, since 20" in str(refused.value)
    assert "--gin.MODEL_DIR" in str(refused.value)
    os.kill(process.pid, signal.SIGKILL)
    # The killed process is still a zombie in the process table, and does not count as running.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with lock_model_dir(tmp_path):
      pass


@contextlib.contextmanager
def ended_process(command: list[str]) -> Iterator[subprocess.Popen[str]]:
  """Runs a process that is killed at the end of the `with` statement at the latest."""
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    try:
      yield process
    finally:
      process.kill()


def test_a_process_that_reuses_the_pid_of_an_ended_run_does_not_hold_its_lock(tmp_path):
  leave_lock(tmp_path, dataclasses.replace(current_process(), pid=os.getppid(), born="1"))
  with lock_model_dir(tmp_path):
    pass


def test_one_process_cannot_lock_a_folder_twice(tmp_path):
  with lock_model_dir(tmp_path), pytest.raises(ModelDirInUseError), lock_model_dir(tmp_path):
    pass


@pytest.mark.usefixtures("short_timeouts")
def test_a_run_on_another_machine_that_sends_heartbeats_keeps_its_lock(tmp_path):
  lock = RunLock(tmp_path, ELSEWHERE)
  try:
    with pytest.raises(ModelDirInUseError, match="process 11 on node7"), lock_model_dir(tmp_path):
      pass
  finally:
    lock.release()
  assert not (tmp_path / LOCK_FILE).exists()


@pytest.mark.usefixtures("short_timeouts")
def test_a_run_on_another_machine_without_heartbeats_loses_its_lock(tmp_path, caplog):
  leave_lock(tmp_path, ELSEWHERE)
  started = time.monotonic()
  with lock_model_dir(tmp_path):
    assert time.monotonic() - started >= 0.9
  assert "belongs to a run on another machine (process 11 on node7" in caplog.text
  assert "was left by a run that has ended" in caplog.text


def test_a_lock_whose_timeout_has_passed_is_taken_over_at_once(tmp_path, caplog):
  leave_lock(tmp_path, ELSEWHERE, age=lock.HEARTBEAT_TIMEOUT_S + 5)
  with lock_model_dir(tmp_path):
    assert "Waiting" not in caplog.text


def test_a_requeued_slurm_job_takes_over_its_own_lock_at_once(tmp_path, monkeypatch, caplog):
  monkeypatch.setenv("SLURM_JOB_ID", "77")
  monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
  leave_lock(tmp_path, dataclasses.replace(ELSEWHERE, job="77", restart=0))
  with lock_model_dir(tmp_path):
    owner = LockOwner.from_json((tmp_path / LOCK_FILE).read_text())
    assert (owner.job, owner.restart) == ("77", 1)
  assert "Waiting" not in caplog.text


@pytest.mark.usefixtures("short_timeouts")
def test_an_incomplete_lock_file_is_taken_over(tmp_path):
  (tmp_path / LOCK_FILE).write_text('{"host": "no')
  with lock_model_dir(tmp_path):
    pass


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("no/where")])
def test_a_pipe_or_a_broken_link_in_place_of_the_lock_is_taken_over(tmp_path, make):
  make(tmp_path / LOCK_FILE)
  with lock_model_dir(tmp_path):
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()


def test_one_of_several_competitors_gets_the_lock_of_an_ended_run(tmp_path):
  leave_lock(tmp_path, dataclasses.replace(current_process(), pid=os.getppid(), born="1"))
  result = subprocess.run(
    [python(), "-c", CONTENDERS, str(tmp_path)], capture_output=True, text=True, timeout=300
  )
  assert sorted(result.stdout.split()) == ["got"] + ["refused"] * 7, result.stderr


def test_a_run_that_has_lost_its_lock_writes_no_checkpoint(setup, tmp_path):
  manager = setup.manager(tmp_path)
  with lock_model_dir(tmp_path):
    manager.save(setup.state(step=1))
    manager.wait_until_finished()
    leave_lock(tmp_path, ELSEWHERE)
    with pytest.raises(ModelDirInUseError, match="was taken over by process 11 on node7"):
      manager.save(setup.state(step=2))
  manager.close()
  assert manager.all_steps() == [1]
  assert (tmp_path / LOCK_FILE).exists(), "the other run's lock is not this one's to delete"


def test_a_folder_that_cannot_be_written_is_an_error_before_the_run_starts(tmp_path):
  (tmp_path / "file").write_text("")

  @exclusive_model_dir
  def run(*, model_dir: str) -> None:
    pytest.fail("ran")

  with pytest.raises(
    ValueError, match=r"MODEL_DIR .*file/run cannot be written to .*Not a directory"
  ) as caught:
    run(model_dir=str(tmp_path / "file/run"))
  assert not isinstance(caught.value, ModelDirInUseError)


def test_a_folder_without_its_lock_was_not_moved(tmp_path):
  folder = tmp_path / "run"
  with lock_model_dir(folder):
    (folder / LOCK_FILE).unlink()
    assert not was_moved(folder)
    folder.rename(tmp_path / "moved")
    assert was_moved(folder)
