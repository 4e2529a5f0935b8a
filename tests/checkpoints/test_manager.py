"""The checkpoint manager: saving, restoring, retention and failures."""

from __future__ import annotations

import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_state import Tiny

from rosetta_t5.checkpoints import CheckpointSaveError, all_steps, latest_step, read_run_facts
from rosetta_t5.checkpoints.checkpoint_folders import read_arrays
from rosetta_t5.checkpoints.saved_items import pin_checkpoint


def assert_equal_states(got, expected):
  flat_got, flat_expected = jax.tree.leaves(got), jax.tree.leaves(expected)
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  for a, b in zip(flat_got, flat_expected, strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_restored_state_equals_the_saved_one_exactly(setup, tmp_path):
  state = setup.state(step=3)
  manager = setup.manager(tmp_path)
  assert manager.save(state)
  manager.close()
  assert_equal_states(setup.manager(tmp_path).restore(), state)


def test_optax_state_with_empty_nodes_is_restored(adam_setup, tmp_path):
  state = adam_setup.state(step=7)
  manager = adam_setup.manager(tmp_path)
  manager.save(state)
  manager.close()
  assert_equal_states(adam_setup.manager(tmp_path).restore(), state)


def test_arrays_are_restored_onto_another_mesh(setup, make_setup, tmp_path):
  state = setup.state(step=1)
  manager = setup.manager(tmp_path)
  manager.save(state)
  manager.close()
  wide = make_setup(num_partitions=8)
  restored = wide.manager(tmp_path).restore()
  kernel = restored.params["wi"]
  assert kernel.sharding.spec == jax.sharding.PartitionSpec(None, "model")
  assert kernel.addressable_shards[0].data.shape == (8, 2)
  np.testing.assert_array_equal(kernel, state.params["wi"])


def test_donating_the_state_during_a_save_does_not_change_the_checkpoint(setup, tmp_path):
  state = setup.state(step=1)
  expected = jax.tree.map(np.array, state)
  add = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
  manager = setup.manager(tmp_path)
  manager.save(state)
  for _ in range(20):
    state = add(state)
  manager.close()
  assert_equal_states(setup.manager(tmp_path).restore(), expected)


def test_the_layout_on_disk_is_that_of_t5x(setup, tmp_path):
  manager = setup.manager(tmp_path)
  manager.save(setup.state(step=5))
  manager.close()
  shapes = read_arrays(tmp_path / "checkpoint_5")
  assert set(shapes) == {"state/step", "target/wi", "target/wo"} | {
    f"state/param_states/{name}/{slot}"
    for name in ("wi", "wo")
    for slot in ("m", "v", "v_row", "v_col")
  }
  assert (shapes["state/step"].shape, shapes["state/step"].dtype) == ((), np.int32)
  metadata = json.loads((tmp_path / "checkpoint_5/_CHECKPOINT_METADATA").read_text())
  assert set(metadata["item_handlers"]) == {"state"}


def test_save_dtype_converts_parameters_only(setup, tmp_path):
  manager = setup.manager(tmp_path, save_dtype="bfloat16")
  manager.save(setup.state(step=1))
  manager.close()
  shapes = read_arrays(tmp_path / "checkpoint_1")
  assert shapes["target/wi"].dtype == jnp.bfloat16
  assert shapes["state/param_states/wi/v"].dtype == np.float32
  assert shapes["state/step"].dtype == np.int32
  assert setup.manager(tmp_path).restore().params["wi"].dtype == np.float32


def test_restore_dtype_converts_parameters_only(setup, tmp_path):
  manager = setup.manager(tmp_path)
  manager.save(setup.state(step=1))
  manager.close()
  restored = setup.manager(tmp_path, restore_dtype="bfloat16").restore()
  assert restored.params["wi"].dtype == jnp.bfloat16
  assert restored.param_states["wi"].v.dtype == np.float32
  assert restored.step.dtype == np.int32


def test_keep_deletes_the_oldest_but_no_pinned_or_forced_checkpoints(setup, tmp_path):
  manager = setup.manager(tmp_path, keep=2, force_keep_period=4)
  for step in range(1, 8):
    manager.save(setup.state(step=step))
    manager.wait_until_finished()
    if step == 1:
      pin_checkpoint(tmp_path / "checkpoint_1")
  manager.close()
  assert all_steps(tmp_path) == [1, 4, 6, 7]
  assert manager.all_steps() == [1, 4, 6, 7]


def test_saves_are_due_once_at_the_period_and_at_checkpoint_steps(setup, tmp_path):
  manager = setup.manager(tmp_path, period=10, checkpoint_steps=[13])
  assert [step for step in range(1, 31) if manager.should_save(step)] == [10, 13, 20, 30]
  assert manager.save(setup.state(step=10))
  assert not manager.should_save(10)
  assert not manager.save(setup.state(step=11), force=False)
  manager.close()
  assert not any(map(setup.manager(tmp_path, period=None).should_save, range(30)))


def test_an_existing_checkpoint_is_never_overwritten(setup, tmp_path):
  manager = setup.manager(tmp_path)
  manager.save(setup.state(step=1, seed=0))
  assert not manager.save(setup.state(step=1, seed=1))
  manager.close()
  again = setup.manager(tmp_path)
  assert not again.save(setup.state(step=1, seed=1))
  assert_equal_states(again.restore(), setup.state(step=1, seed=0))


def test_run_facts_are_readable_before_restore(setup, tmp_path):
  assert read_run_facts(tmp_path) == {}
  manager = setup.manager(tmp_path)
  manager.run_facts["random_seed"] = 17
  manager.save(setup.state(step=1))
  manager.wait_until_finished()
  manager.run_facts["data_seed"] = 3
  manager.save(setup.state(step=2))
  manager.close()
  assert read_run_facts(tmp_path / "checkpoint_1") == {"random_seed": 17}
  assert read_run_facts(tmp_path) == {"random_seed": 17, "data_seed": 3}


def test_dataset_position_is_saved_at_the_step_and_restored(setup, counter, tmp_path):
  manager = setup.manager(tmp_path, dataset_iterator=counter)
  for step in (1, 2):
    next(counter)
    manager.save(setup.state(step=step))
  next(counter)
  manager.close()
  saved = tmp_path / "checkpoint_1/dataset"
  assert {file.name for file in saved.glob("train_ds*")} == {
    "train_ds-000-of-001",
  }
  restorer = setup.manager(tmp_path, dataset_iterator=counter)
  restorer.restore(step=1)
  assert counter.position == 1
  restorer.restore()
  assert counter.position == 2
  restorer.restore(step=1, restore_dataset=False)
  assert counter.position == 2


def test_the_error_for_a_missing_dataset_position_suggests_a_setting(setup, counter, tmp_path):
  manager = setup.manager(tmp_path)
  manager.save(setup.state(step=1))
  manager.close()
  with pytest.raises(
    ValueError,
    match=r"(?s)checkpoint_1 contains no dataset position.*it has none.*"
    r"ignore_dataset_until=1",
  ):
    setup.manager(tmp_path, dataset_iterator=counter).restore()


def test_old_dataset_positions_are_deleted_without_their_parameters(setup, counter, tmp_path):
  manager = setup.manager(tmp_path, dataset_iterator=counter, keep_dataset_checkpoints=1)
  for step in (1, 2, 3):
    manager.save(setup.state(step=step))
  manager.close()
  with_position = [
    step for step in (1, 2, 3) if list(tmp_path.glob(f"checkpoint_{step}/dataset/train_ds*"))
  ]
  assert (all_steps(tmp_path), with_position) == ([1, 2, 3], [3])


def test_nothing_is_written_before_the_first_save(setup, tmp_path):
  manager = setup.manager(tmp_path / "new")
  assert manager.latest_step() is None
  manager.close()
  assert not (tmp_path / "new").exists()


def test_a_failed_background_save_is_raised_at_the_next_step(setup, tmp_path, monkeypatch):
  manager = setup.manager(tmp_path)
  manager.save(setup.state(step=1))
  manager.wait_until_finished()
  fail_writes(monkeypatch)
  manager.save(setup.state(step=2))
  with pytest.raises(CheckpointSaveError) as caught:
    ask_until_it_fails(manager)
  text = str(caught.value)
  assert "checkpoint_2 could not be saved" in text
  assert "No space left on device" in text
  assert "The steps of the complete checkpoints are: 1." in text
  assert latest_step(tmp_path) == 1


def test_a_failed_background_save_is_raised_by_the_final_wait(setup, tmp_path, monkeypatch):
  manager = setup.manager(tmp_path)
  fail_writes(monkeypatch)
  manager.save(setup.state(step=1))
  with pytest.raises(CheckpointSaveError, match=r"checkpoints are: none\. .*start the run again"):
    manager.wait_until_finished()
  assert manager.latest_step() is None
  monkeypatch.undo()
  assert manager.save(setup.state(step=1))
  manager.close()
  assert latest_step(tmp_path) == 1


def ask_until_it_fails(manager):
  """Asks at each step whether to save, as a run does."""
  while True:
    manager.should_save(3)


def fail_writes(monkeypatch):
  """Makes the rename at the end of a save fail, as on a full disk."""

  def fail(*args, **kwargs):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "rename", fail)
  monkeypatch.setattr(pathlib.Path, "rename", fail)


def test_the_error_names_a_folder_that_cannot_be_written(setup, tmp_path):
  blocked = tmp_path / "file"
  blocked.write_text("in the way")
  with pytest.raises(
    CheckpointSaveError,
    match=r"file/model/checkpoint_1 could not be saved: .*"
    r"set another MODEL_DIR",
  ):
    setup.manager(blocked / "model").save(setup.state(step=1))


def test_the_error_for_a_missing_step_lists_the_existing_ones(setup, tmp_path):
  manager = setup.manager(tmp_path)
  with pytest.raises(ValueError, match="there is no checkpoint in "):
    manager.restore()
  manager.save(setup.state(step=1))
  manager.close()
  with pytest.raises(ValueError, match="has no checkpoint of step 2: it has 1"):
    manager.restore(step=2)


@pytest.mark.slow
def test_checkpoints_are_not_compressed(make_setup, tmp_path):
  setup = make_setup(module=Tiny(width=4096))
  manager = setup.manager(tmp_path)
  manager.save(jax.tree.map(jnp.zeros_like, setup.state()))
  manager.close()
  arrays = read_arrays(tmp_path / "checkpoint_0")
  stored = sum(path.stat().st_size for path in tmp_path.rglob("d/*"))
  assert stored > arrays["target/wi"].nbytes + arrays["target/wo"].nbytes > 200_000


def test_a_folder_that_cannot_be_created_is_an_error_at_once(setup, tmp_path):
  longest = os.pathconf(tmp_path, "PC_PATH_MAX")
  folder = tmp_path
  while len(os.fspath(folder)) < longest - 150:
    folder /= "x" * 80
  manager = setup.manager(folder / ("y" * (longest - 50 - len(os.fspath(folder)))))
  with pytest.raises(CheckpointSaveError, match="File name too long"):
    manager.save(setup.state(step=1))
