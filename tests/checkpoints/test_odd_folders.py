"""Checkpoints in folders with unusual names, folders that contain another step, and unreadable folders."""

from __future__ import annotations

import pathlib
import resource

import pytest

from rosetta_t5.checkpoints import (
  SaveCheckpointConfig,
  UnreadableCheckpointError,
  create_orbax_checkpoint_manager,
)
from rosetta_t5.checkpoints.restore import read_arrays


def save(setup, folder: pathlib.Path, step: int, **options) -> pathlib.Path:
  manager = setup.manager(folder, **options)
  manager.save(setup.state(step=step))
  manager.close()
  return folder / f"checkpoint_{step}"


def test_a_folder_that_orbax_takes_for_a_pattern_is_refused(setup, tmp_path):
  with pytest.raises(ValueError, match=r"MODEL_DIR must not contain .*, got \S+/runs\[1\]"):
    create_orbax_checkpoint_manager(
      save_cfg=SaveCheckpointConfig(),
      train_state=setup.state(),
      partitioner=setup.partitioner,
      model_dir=tmp_path / "runs[1]",
    )


def test_a_folder_that_contains_another_step_is_refused_unless_its_name_has_no_step(
  setup, tmp_path
):
  saved = save(setup, tmp_path, 20)
  renamed = saved.rename(tmp_path / "checkpoint_3000")
  with pytest.raises(
    ValueError, match=r"checkpoint_3000 contains the checkpoint of step 20.*Rename"
  ):
    setup.manager(tmp_path).restore()
  renamed.rename(tmp_path / "pretrained")
  assert setup.manager(tmp_path).restore(path=tmp_path / "pretrained").step == 20


def test_a_checkpoint_that_this_machine_cannot_open_is_not_damaged(setup, tmp_path):
  saved = save(setup, tmp_path, 1)
  limits = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
  try:
    with pytest.raises(ValueError, match=r"cannot be opened on this machine: .*Too many") as caught:
      read_arrays(saved)
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
  assert not isinstance(caught.value, UnreadableCheckpointError)


def test_an_empty_folder_of_a_step_is_a_damaged_checkpoint(setup, tmp_path):
  save(setup, tmp_path, 1)
  (tmp_path / "checkpoint_30").mkdir()
  with pytest.raises(UnreadableCheckpointError, match=r"the folder is empty.*Older steps.*: 1\."):
    setup.manager(tmp_path).restore()
