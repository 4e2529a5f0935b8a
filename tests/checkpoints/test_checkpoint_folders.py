"""Folders of checkpoints: their layouts, unusual names, and those that cannot be read."""

from __future__ import annotations

import pathlib
import resource

import pytest
from etils import epath

from rosetta_t5.checkpoints import (
  CheckpointConfig,
  RestoreCheckpointConfig,
  SaveCheckpointConfig,
  UnreadableCheckpointError,
  checkpoint_folders,
  create_orbax_checkpoint_manager,
  find_start_checkpoint,
)
from rosetta_t5.checkpoints.checkpoint_folders import read_arrays


def test_only_complete_folders_named_checkpoint_step_are_listed(tmp_path):
  for name in ("checkpoint_5", "checkpoint_12", "checkpoint_007", "checkpoint_x", "train"):
    (tmp_path / name).mkdir()
  (tmp_path / "checkpoint_9.orbax-checkpoint-tmp-0").mkdir()
  assert checkpoint_folders.all_steps(tmp_path) == [5, 12]
  assert checkpoint_folders.latest_step(tmp_path) == 12
  assert checkpoint_folders.latest_step(tmp_path / "absent") is None


def test_the_step_is_parsed_from_the_folder_name(tmp_path):
  assert checkpoint_folders.step_of(tmp_path / "checkpoint_30") == 30
  assert checkpoint_folders.step_of(tmp_path) is None
  assert checkpoint_folders.step_of(checkpoint_folders.checkpoint_path(tmp_path, 4)) == 4


def test_a_folder_of_checkpoints_is_not_a_checkpoint(tmp_path):
  (tmp_path / "checkpoint_5").mkdir()
  with pytest.raises(
    ValueError,
    match=r"is a folder of checkpoints \(steps 5\): give one of them, "
    r"such as .*checkpoint_5, or set RestoreCheckpointConfig.mode = 'latest'",
  ):
    checkpoint_folders.detect_checkpoint_type(tmp_path)


def test_errors_describe_missing_empty_and_other_folders(tmp_path):
  with pytest.raises(ValueError, match=r"there is no such file or folder"):
    checkpoint_folders.detect_checkpoint_type(tmp_path / "absent")
  with pytest.raises(ValueError, match=r"the folder is empty"):
    checkpoint_folders.detect_checkpoint_type(tmp_path)
  (tmp_path / "notes.txt").write_text("hello")
  with pytest.raises(ValueError, match=r"the folder contains notes.txt"):
    checkpoint_folders.detect_checkpoint_type(tmp_path)
  with pytest.raises(ValueError, match=r"is not a checkpoint"):
    checkpoint_folders.detect_checkpoint_type(tmp_path / "notes")


def test_layouts_are_detected_from_the_files(tmp_path):
  legacy, tensorflow = tmp_path / "legacy", tmp_path / "tensorflow"
  legacy.mkdir()
  (legacy / "checkpoint").write_bytes(b"\x82\xa7version")
  tensorflow.mkdir()
  (tensorflow / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-1000"')
  (tensorflow / "model.ckpt-1000.index").write_bytes(b"")
  assert checkpoint_folders.detect_checkpoint_type(legacy) is checkpoint_folders.CheckpointTypes.T5X
  assert (
    checkpoint_folders.detect_checkpoint_type(legacy / "checkpoint")
    is checkpoint_folders.CheckpointTypes.T5X
  )
  assert (
    checkpoint_folders.detect_checkpoint_type(tensorflow)
    is checkpoint_folders.CheckpointTypes.T5X_TF
  )
  prefix = tensorflow / "model.ckpt-1000"
  assert (
    checkpoint_folders.detect_checkpoint_type(prefix) is checkpoint_folders.CheckpointTypes.T5X_TF
  )


def test_damaged_run_facts_are_reported(tmp_path):
  (tmp_path / "checkpoint_1").mkdir()
  assert checkpoint_folders.read_run_facts(tmp_path) == {}
  (tmp_path / "checkpoint_1/run_facts.json").write_text("{")
  with pytest.raises(ValueError, match=r"run_facts\.json is not valid JSON"):
    checkpoint_folders.read_run_facts(tmp_path)


def test_remote_storage_that_cannot_be_read_is_reported(monkeypatch, tmp_path):
  path_class = type(epath.Path(tmp_path))
  is_dir = path_class.is_dir

  def fail(path):
    if path.is_relative_to(tmp_path):
      return is_dir(path)
    raise RuntimeError("Could not resolve host: storage.googleapis.com\n\t when reading metadata")

  monkeypatch.setattr(path_class, "is_dir", fail)
  cfg = CheckpointConfig(restore=RestoreCheckpointConfig("gs://bucket/run", mode="latest"))
  for find in (
    lambda: checkpoint_folders.detect_checkpoint_type("gs://bucket/run"),
    lambda: find_start_checkpoint(cfg, tmp_path),
  ):
    with pytest.raises(
      ValueError, match="gs://bucket/run cannot be read from this machine"
    ) as error:
      find()
    assert "(RuntimeError: Could not resolve host: storage.googleapis.com)" in str(error.value)
  with pytest.raises(RuntimeError):
    checkpoint_folders.detect_checkpoint_type("/local")


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
