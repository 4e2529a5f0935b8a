"""Training on a disk that is full or read-only."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess

import pytest
import soak

from rosetta_t5.checkpoints import all_steps


@pytest.fixture
def disk(tmp_path):
  """A disk in memory, and how it changes: remount(disk, "size=40m")."""
  with soak.small_disk(tmp_path / "disk", "4m") as is_mounted:
    if not is_mounted:
      pytest.skip("only root can mount a small disk")
    yield tmp_path / "disk"


def remount(folder: pathlib.Path, options: str) -> None:
  subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def test_a_full_disk_ends_the_run_with_its_reason_and_keeps_saved_checkpoints(
  train, disk, tmp_path
):
  whole = train(tmp_path / "whole", 8)
  with pytest.raises(ChildProcessError) as failed:
    train(disk / "run", 8)
  saved = all_steps(disk / "run")
  assert saved
  assert saved[-1] < 8
  text = str(failed.value)
  assert "could not be saved: " in text
  assert "No space left on device" in text
  assert f"checkpoints are: {', '.join(map(str, saved))}. If the disk is full" in text
  remount(disk, "size=40m")
  rest = train(disk / "run", 8)
  assert min(rest) == saved[-1] + 1
  assert rest == {step: loss for step, loss in whole.items() if step > saved[-1]}
  assert not list((disk / "run").glob("*tmp*"))


def test_a_read_only_folder_is_an_error_before_training(train, disk):
  with contextlib.ExitStack() as stack:
    remount(disk, "ro")
    stack.callback(remount, disk, "rw")
    with pytest.raises(ChildProcessError) as failed:
      train(disk / "run", 2)
  assert f"MODEL_DIR {disk}/run cannot be written to" in str(failed.value)
  assert "Read-only file system" in str(failed.value)
  assert "--gin.MODEL_DIR" in str(failed.value)
