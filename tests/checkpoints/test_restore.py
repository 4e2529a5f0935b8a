"""Reading of T5X's checkpoints and of damaged ones."""

from __future__ import annotations

import os
import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny_state import Counter, Setup, write_older_layout

from rosetta_t5 import cli
from rosetta_t5.checkpoints import (
  UnreadableCheckpointError,
  checkpoint_folders,
  fingerprint,
  read_run_facts,
  restore,
)
from rosetta_t5.checkpoints.arrays import lazy_arrays
from rosetta_t5.checkpoints.arrays.lazy_arrays import start_device_transfer
from rosetta_t5.checkpoints.checkpoint_folders import read_arrays, stored_step
from rosetta_t5.files import CHECKSUMS_NAME, DamagedFileError, write_checksums
from rosetta_t5.parallel import PjitPartitioner

# Orbax completes these after the checksums; nothing reads them.
NOT_IN_CHECKSUMS = {"_CHECKPOINT_METADATA", "commit_success.txt", CHECKSUMS_NAME}


@pytest.fixture
def three_steps(setup, tmp_path):
  manager = setup.manager(tmp_path)
  for step in (1, 2, 3):
    manager.save(setup.state(step=step))
  manager.close()
  return tmp_path


def test_the_reference_checkpoint_of_t5x_is_restored_sharded(shared):
  path = shared / "reference/t5x_orbax/checkpoint_20"
  shapes = read_arrays(path)
  assert len([name for name in shapes if name.startswith("target/")]) == 52
  mesh = PjitPartitioner(num_partitions=2).mesh
  split = NamedSharding(mesh, PartitionSpec("model"))
  name = "target/token_embedder/embedding"
  embedding = start_device_transfer(shapes[name], split)()
  assert stored_step(shapes) == 20
  assert shapes["state/step"].dtype == np.int32
  assert embedding.sharding == split
  assert embedding.shape == (384, 64)
  # After 20 steps of Adafactor from normal(1.0) the table is still close to unit variance.
  assert 0.9 < float(np.std(np.asarray(embedding))) < 1.1
  mine = read_arrays(shared / "reference/t5x_orbax/checkpoint_20/state")
  assert set(mine) == set(shapes)


def test_both_layouts_of_t5x_have_equal_names_and_shapes(shared):
  path = shared / "reference/t5x_legacy/checkpoint_10"
  assert checkpoint_folders.detect_checkpoint_type(path) is checkpoint_folders.CheckpointTypes.T5X
  legacy = read_arrays(path)
  orbax = read_arrays(shared / "reference/t5x_orbax/checkpoint_20")
  assert {n: (x.shape, x.dtype) for n, x in legacy.items()} == {
    n: (x.shape, x.dtype) for n, x in orbax.items()
  }
  assert int(legacy["state/step"].get()) == 10


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("victim", ["state/_METADATA", "state/manifest.ocdbt", "state"])
def test_the_error_for_a_damaged_checkpoint_lists_the_older_ones(setup, three_steps, victim):
  damaged = three_steps / "checkpoint_3" / victim
  if damaged.is_dir():
    for file in damaged.rglob("*"):
      if file.is_file():
        file.write_bytes(file.read_bytes()[:10])
  else:
    damaged.write_bytes(damaged.read_bytes()[:10])
  with pytest.raises(UnreadableCheckpointError) as caught:
    setup.manager(three_steps).restore()
  text = str(caught.value)
  assert f"checkpoint {three_steps}/checkpoint_3 cannot be read: " in text
  assert "Older steps beside it: 1, 2." in text
  assert len(text) < 900


def test_a_checkpoint_without_its_arrays_is_unreadable(setup, three_steps):
  for file in (three_steps / "checkpoint_3/state").rglob("d/*"):
    file.unlink()
  with pytest.raises(UnreadableCheckpointError, match=r"checkpoint_3 cannot be read"):
    setup.manager(three_steps).restore()


def test_the_older_checkpoint_is_restored_once_the_damaged_one_is_moved(setup, three_steps):
  (three_steps / "checkpoint_3").rename(three_steps / "damaged")
  assert int(setup.manager(three_steps).restore().step) == 2


def test_the_error_for_the_only_checkpoint_reports_that_there_is_no_older_one(setup, tmp_path):
  manager = setup.manager(tmp_path)
  manager.save(setup.state(step=1))
  manager.close()
  (tmp_path / "checkpoint_1/state/_METADATA").write_text("{")
  with pytest.raises(UnreadableCheckpointError, match=r"Older steps beside it: none"):
    setup.manager(tmp_path).restore()


def test_running_out_of_device_memory_is_not_reported_as_damage(setup, three_steps, monkeypatch):
  def out_of_memory(*args, **kwargs):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

  monkeypatch.setattr(jax, "make_array_from_callback", out_of_memory)
  with pytest.raises(jax.errors.JaxRuntimeError, match=r"RESOURCE_EXHAUSTED"):
    setup.manager(three_steps).restore()


def test_a_missing_chunk_is_damage_and_not_zeros(setup, tmp_path):
  write_older_layout(tmp_path, setup.state(step=1))
  (tmp_path / "checkpoint_1/target.wi/0.0").unlink()
  with pytest.raises(UnreadableCheckpointError, match=r"checkpoint_1 cannot be read"):
    setup.manager(tmp_path).restore()


def test_arrays_are_read_into_aligned_memory_that_cpu_devices_need_not_copy(setup, tmp_path):
  manager = setup.manager(tmp_path)
  manager.save(setup.state(step=1))
  manager.close()
  arrays = read_arrays(tmp_path / "checkpoint_1")
  assert all(array.get().ctypes.data % 64 == 0 for array in arrays.values())


def test_the_size_of_concurrent_reads_is_limited(setup, three_steps, monkeypatch):
  monkeypatch.setattr(restore, "_MAX_CONCURRENT_BYTES", 100)
  begin, pending, most = lazy_arrays.start_device_transfer, set(), []

  def count(array, sharding):
    finish = begin(array, sharding)
    pending.add(array)
    most.append(len(pending))
    return lambda: pending.discard(array) or finish()

  monkeypatch.setattr(lazy_arrays, "start_device_transfer", count)
  state = setup.manager(three_steps).restore()
  jax.tree.map(np.testing.assert_array_equal, state, setup.state(step=3))
  assert not pending
  assert len(most) > 2
  assert sum(array.nbytes for array in read_arrays(three_steps / "checkpoint_3").values()) > 100
  assert max(most) < len(most)


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
  return [f for f in files if f.parent != folder or f.name not in NOT_IN_CHECKSUMS]


def flip(file: pathlib.Path) -> None:
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 1
  file.write_bytes(content)


def truncate(file: pathlib.Path) -> None:
  file.write_bytes(file.read_bytes()[:-1])


def restore_from(setup: Setup, folder: pathlib.Path) -> None:
  setup.manager(folder.parent, dataset_iterator=Counter()).restore(path=folder)


@pytest.mark.one_quick_variant
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
        restore_from(setup, checkpoint)
    if is_position:
      setup.manager(checkpoint.parent).restore(path=checkpoint)
    file.write_bytes(content)
  restore_from(setup, checkpoint)


def test_damage_to_the_older_layout_is_an_error_that_names_the_file(setup, tmp_path):
  write_older_layout(tmp_path, setup.state(step=7))
  write_checksums(tmp_path / "checkpoint_7")
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
  with pytest.raises(DamagedFileError, match=r"run_facts\.json is damaged"):
    read_run_facts(checkpoint)


def test_a_checkpoint_without_checksums_is_restored(setup, checkpoint):
  before = fingerprint(checkpoint)
  assert before != fingerprint(checkpoint.with_name("checkpoint_6"))
  (checkpoint / CHECKSUMS_NAME).unlink()
  restore_from(setup, checkpoint)


def test_without_checksums_the_fingerprint_is_that_of_the_path_and_of_its_last_change(tmp_path):
  for name in ("one", "two"):
    (tmp_path / name).mkdir()
    (tmp_path / name / "model.safetensors").write_bytes(b"1")
    os.utime(tmp_path / name / "model.safetensors", (1, 1))
  before = fingerprint(tmp_path / "one")
  assert before == fingerprint(tmp_path / "one") != fingerprint(tmp_path / "two")
  os.utime(tmp_path / "one" / "model.safetensors", (2, 2))
  assert fingerprint(tmp_path / "one") != before
