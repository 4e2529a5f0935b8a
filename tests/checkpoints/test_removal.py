"""Deletion of old checkpoints."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess

from forked_python import python
from tiny_state import Setup, Tiny

from rosetta_t5.checkpoints import all_steps
from rosetta_t5.checkpoints.model_dir import REMOVED_FOLDER, remove_checkpoint_dir

# Deletes a checkpoint of two files, and is killed after the first of them.
KILLED = """
import os, signal, sys
from rosetta_t5.checkpoints.model_dir import remove_checkpoint_dir
unlink = os.unlink
def once(*args, **kwargs):
  unlink(*args, **kwargs)
  os.kill(os.getpid(), signal.SIGKILL)
os.unlink = once
remove_checkpoint_dir(sys.argv[1])
"""


def make_checkpoint(folder: pathlib.Path) -> None:
  folder.mkdir(parents=True)
  for name in ("checkpoint", "target.wi"):
    (folder / name).write_text(name)


def test_a_killed_deletion_leaves_no_incomplete_checkpoint_and_the_next_one_cleans_up(tmp_path):
  for step in (3, 6):
    make_checkpoint(tmp_path / f"checkpoint_{step}")
  command = [python(), "-c", KILLED, str(tmp_path / "checkpoint_3")]
  assert subprocess.run(command).returncode == -signal.SIGKILL
  assert len(os.listdir(tmp_path / REMOVED_FOLDER / "checkpoint_3")) == 1
  assert all_steps(tmp_path) == [6]
  make_checkpoint(tmp_path / "checkpoint_3")
  remove_checkpoint_dir(tmp_path / "checkpoint_3")
  assert os.listdir(tmp_path) == ["checkpoint_6"]


def test_a_link_is_deleted_rather_than_the_checkpoint_that_it_names(tmp_path):
  make_checkpoint(tmp_path / "elsewhere")
  (tmp_path / "checkpoint_3").symlink_to("elsewhere")
  remove_checkpoint_dir(tmp_path / "checkpoint_3")
  assert os.listdir(tmp_path) == ["elsewhere"]
  assert len(os.listdir(tmp_path / "elsewhere")) == 2


def test_a_run_deletes_its_old_checkpoints_and_those_that_a_killed_run_left(tmp_path):
  make_checkpoint(tmp_path / REMOVED_FOLDER / "checkpoint_1")
  setup = Setup(module=Tiny(), num_partitions=1)
  manager = setup.manager(tmp_path, keep=1)
  for step in (2, 3):
    manager.save(setup.state(step=step))
  manager.close()
  assert all_steps(tmp_path) == [3]
  assert not (tmp_path / REMOVED_FOLDER).exists()
