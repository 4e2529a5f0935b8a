"""Checkpoints in folders with unusual names, folders that contain another step, and unreadable folders."""

from __future__ import annotations

import json
import os
import pathlib
import resource

import jax
import numpy as np
import pytest
from tiny_state import Counter, write_older_layout

from rosetta_t5.checkpoints import UnreadableCheckpointError, all_steps
from rosetta_t5.checkpoints.formats import t5x_legacy
from rosetta_t5.checkpoints.inspect_command import show_arrays
from rosetta_t5.checkpoints.model_dir.checkpoint_folders import (
  disk_bytes,
  find_checkpoint_type,
  with_checksum,
)
from rosetta_t5.checkpoints.reading import read_arrays
from rosetta_t5.checkpoints.run_start import read_start_facts


def save(setup, folder: pathlib.Path, step: int, **options) -> pathlib.Path:
  manager = setup.manager(folder, **options)
  manager.save(setup.state(step=step))
  manager.close()
  return folder / f"checkpoint_{step}"


@pytest.mark.parametrize(
  "name",
  ["a%20b #?|&:@", "back\\slash", "[x]*{y}", "'quotes\"", "line\nbreak", "-dash", "ü", "n" * 255],
)
def test_a_folder_of_any_name_is_written_read_and_cleaned(setup, tmp_path, name):
  folder = tmp_path / name / "run"
  counter = Counter()
  next(counter)
  for step in (1, 2):
    save(setup, folder, step, dataset_iterator=counter, keep=1)
  assert all_steps(folder) == [2]
  restored = Counter()
  state = setup.manager(folder, dataset_iterator=restored).restore()
  jax.tree.map(np.testing.assert_array_equal, state, setup.state(step=2))
  assert restored.position == 1
  write_older_layout(folder, setup.state(step=3))
  assert read_arrays(folder / "checkpoint_3").keys() == read_arrays(folder / "checkpoint_2").keys()
  assert [path.name for path in tmp_path.iterdir()] == [name]


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


def test_a_step_that_is_not_an_integer_is_refused(tmp_path):
  t5x_legacy.write(tmp_path / "checkpoint_3", [("state/step", np.float32(np.inf))])
  with pytest.raises(UnreadableCheckpointError, match="state/step must be an integer, got inf"):
    read_arrays(tmp_path / "checkpoint_3")


@pytest.mark.parametrize(
  "name",
  [
    "_CHECKPOINT_METADATA",
    "state/_METADATA",
    "state/manifest.ocdbt",
    "state/checksums-00000-of-00001.json",
  ],
)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_a_folder_in_the_place_of_a_file_is_damage(setup, tmp_path, name, make):
  save(setup, tmp_path, 1)
  file = save(setup, tmp_path, 2) / name
  file.unlink()
  make(file)
  assert read_start_facts(tmp_path, str(tmp_path / "checkpoint_2")) == {}
  with pytest.raises(
    UnreadableCheckpointError, match=r"checkpoint_2 cannot be read.*Older steps.*: 1\."
  ):
    setup.manager(tmp_path).restore()


def test_links_in_a_checkpoint_to_itself_are_not_counted(setup, tmp_path):
  folder = save(setup, tmp_path, 1)
  size = disk_bytes(folder)
  for name in "ab":  # Each path of 40 links is another one.
    (folder / name).symlink_to(".")
  assert disk_bytes(folder) == size


def test_a_pipe_in_a_checkpoint_of_the_older_layout_is_refused(setup, tmp_path):
  write_older_layout(tmp_path, setup.state(step=1))
  array = next((tmp_path / "checkpoint_1").glob("target.*/0*"))
  array.unlink()
  os.mkfifo(array)
  with pytest.raises(UnreadableCheckpointError, match=f"{array.name} is not a regular file"):
    read_arrays(tmp_path / "checkpoint_1")
  os.remove(tmp_path / "checkpoint_1/checkpoint")
  os.mkfifo(tmp_path / "checkpoint_1/checkpoint")
  assert find_checkpoint_type(tmp_path / "checkpoint_1") is None


def test_control_characters_in_run_facts_are_escaped(setup, tmp_path, capsys):
  metadata = save(setup, tmp_path, 1) / "_CHECKPOINT_METADATA"
  stored = json.loads(metadata.read_text())
  stored["custom_metadata"] = with_checksum({"x": "\x1b[31mred"})
  metadata.write_text(json.dumps(stored))
  show_arrays(metadata.parent)
  assert r"x = \x1b[31mred" in capsys.readouterr().out
