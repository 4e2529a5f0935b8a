"""The lock of a MODEL_DIR, which one run holds at a time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rosetta_t5.checkpoints import ModelDirInUseError, exclusive_model_dir
from rosetta_t5.checkpoints.model_dir import LOCK_FILE, lock_model_dir

HOLDER = """
import sys, time
from rosetta_t5.checkpoints.model_dir import lock_model_dir
with lock_model_dir(sys.argv[1]):
  print("held", flush=True)
  time.sleep(600)
"""


def test_the_lock_is_released_after_a_run_that_ends_or_fails(tmp_path):
  with lock_model_dir(tmp_path / "new"):
    assert f"process {os.getpid()} on" in (tmp_path / "new" / LOCK_FILE).read_text()
  with pytest.raises(KeyError), lock_model_dir(tmp_path / "new"):
    raise KeyError
  with lock_model_dir(tmp_path / "new"):
    pass


def test_the_error_names_the_other_run_and_a_killed_run_holds_no_lock(tmp_path):
  command = [sys.executable, "-c", HOLDER, str(tmp_path)]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    try:
      assert process.stdout.readline() == "held\n"
      with pytest.raises(ModelDirInUseError) as refused, lock_model_dir(tmp_path):
        pass
    finally:
      process.kill()
  assert f"MODEL_DIR {tmp_path} is in use by another training run: " in str(refused.value)
  assert f"process {process.pid} on {os.uname().nodename}, since 20" in str(refused.value)
  assert "--gin.MODEL_DIR" in str(refused.value)
  assert (tmp_path / LOCK_FILE).exists()
  with lock_model_dir(tmp_path):
    pass


def test_one_process_cannot_lock_a_folder_twice(tmp_path):
  with lock_model_dir(tmp_path), pytest.raises(ModelDirInUseError), lock_model_dir(tmp_path):
    pass


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
