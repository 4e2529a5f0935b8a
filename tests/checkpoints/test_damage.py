"""Damage to any file of a checkpoint is found when the checkpoint is restored or verified."""

from __future__ import annotations

import pathlib

import pytest
from tiny_state import Counter, Setup, write_older_layout

from rosetta_t5 import cli, manifest
from rosetta_t5.checkpoints import UnreadableCheckpointError, fingerprint, read_run_facts

# Orbax completes these after the manifest; nothing reads them.
NOT_IN_MANIFEST = {"_CHECKPOINT_METADATA", "commit_success.txt", manifest.NAME}


@pytest.fixture
def checkpoint(request, setup, tmp_path) -> pathlib.Path:
  """A checkpoint of step 7 with run facts and a position in the data, beside one of step 6."""
  manager = setup.manager(tmp_path, dataset_iterator=Counter())
  manager.run_facts = {"random_seed": 3}
  for step in (6, 7):
    manager.save(setup.state(step=step, seed=step))
  manager.close()
  return tmp_path / "checkpoint_7"


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
  files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
  return [f for f in files if f.parent != folder or f.name not in NOT_IN_MANIFEST]


def flip(file: pathlib.Path) -> None:
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 1
  file.write_bytes(content)


def truncate(file: pathlib.Path) -> None:
  file.write_bytes(file.read_bytes()[:-1])


def restore(setup: Setup, folder: pathlib.Path) -> None:
  setup.manager(folder.parent, dataset_iterator=Counter()).restore(path=folder)


@pytest.mark.parametrize("damage", [flip, truncate, pathlib.Path.unlink])
def test_damage_to_a_file_is_an_error_that_names_the_file(setup, checkpoint, damage):
  files = files_of(checkpoint)
  assert len(files) > 10
  for file in files:
    content = file.read_bytes()
    damage(file)
    is_position = file.parent.name == "dataset"
    if not (damage is pathlib.Path.unlink and is_position):  # Old positions are deleted.
      with pytest.raises(UnreadableCheckpointError, match=rf"{file} is .*Older steps.*: 6"):
        restore(setup, checkpoint)
    if is_position:
      setup.manager(checkpoint.parent).restore(path=checkpoint)
    file.write_bytes(content)
  restore(setup, checkpoint)


def test_damage_to_the_older_layout_is_an_error_that_names_the_file(setup, tmp_path):
  write_older_layout(tmp_path, setup.state(step=7))
  manifest.write(tmp_path / "checkpoint_7")
  for file in files_of(tmp_path / "checkpoint_7"):
    content = file.read_bytes()
    flip(file)
    with pytest.raises(UnreadableCheckpointError, match=f"{file} is damaged"):
      setup.manager(tmp_path).restore()
    file.write_bytes(content)


def test_verify_names_a_damaged_position_and_run_facts(checkpoint, capsys):
  verify = ["ckpt", "verify", str(checkpoint)]
  assert cli.main(verify) == 0
  for name in ("dataset/train_ds-000-of-001", "run_facts.json"):
    content = (checkpoint / name).read_bytes()
    flip(checkpoint / name)
    assert cli.main(verify) == 1
    assert f"{name} is damaged" in capsys.readouterr().out
    (checkpoint / name).write_bytes(content)
  flip(checkpoint / "run_facts.json")
  with pytest.raises(manifest.DamagedFileError, match=r"run_facts\.json is damaged"):
    read_run_facts(checkpoint)


def test_a_checkpoint_without_a_manifest_is_restored(setup, checkpoint):
  before = fingerprint(checkpoint)
  assert before not in (None, fingerprint(checkpoint.with_name("checkpoint_6")))
  (checkpoint / manifest.NAME).unlink()
  assert fingerprint(checkpoint) is None
  restore(setup, checkpoint)
