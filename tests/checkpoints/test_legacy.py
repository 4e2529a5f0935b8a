"""T5X's older layout, and its checkpointers, which write Orbax's layout."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from tiny_state import write_older_layout

from rosetta_t5.checkpoints import (
  RestoreCheckpointConfig,
  SaveCheckpointConfig,
  all_steps,
)
from rosetta_t5.checkpoints.arrays.lazy_arrays import LazyArray
from rosetta_t5.checkpoints.arrays.state_dicts import flatten_state_dict
from rosetta_t5.checkpoints.checkpoint_folders import read_arrays
from rosetta_t5.checkpoints.formats import t5x_layouts
from t5x.checkpoints import (
  Checkpointer,
  LegacyCheckpointManager,
  SaveBestCheckpointer,
  load_t5x_checkpoint,
)


def checkpointer(setup, folder, cls=Checkpointer, **arguments):
  shape = setup.initializer.global_train_state_shape
  return cls(shape, setup.partitioner, folder, **arguments)


def assert_equal(got, expected):
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_a_saved_state_is_restored_exactly_and_sharded(setup, tmp_path):
  state = setup.state(step=3)
  checkpointer(setup, tmp_path).save(state)
  restored = checkpointer(setup, tmp_path).restore()
  assert_equal(restored, state)
  assert restored.params["wi"].sharding == state.params["wi"].sharding
  assert_equal(setup.manager(tmp_path).restore(), state)


def test_the_files_have_the_format_of_t5x(setup, tmp_path, shared):
  arrays = flatten_state_dict(setup.state(step=3).state_dict())
  arrays["target/wi"] = arrays["target/wi"].astype(jnp.bfloat16)
  t5x_layouts.write_older(tmp_path / "checkpoint_3", arrays)
  index = serialization.msgpack_restore((tmp_path / "checkpoint_3/checkpoint").read_bytes())
  theirs = serialization.msgpack_restore(
    (shared / "reference/t5x_legacy/checkpoint_10/checkpoint").read_bytes()
  )
  assert (set(index), index["version"]) == (set(theirs), theirs["version"])
  ours, example = index["optimizer"]["target"]["wi"], theirs["optimizer"]["target"]["decoder"]
  example = example["layers_0"]["mlp"]["wo"]["kernel"]
  assert set(ours) == set(example)
  assert ours["dtype"] == "bfloat16"
  assert ours["kvstore"] == {"driver": "file", "path": "target.wi/"}
  assert set(ours["metadata"]) == set(example["metadata"])
  assert int(index["optimizer"]["state"]["step"]) == 3


def test_keep_deletes_the_oldest_and_existing_checkpoints_are_not_overwritten(setup, tmp_path):
  saver = checkpointer(setup, tmp_path, keep=2)
  for step in (1, 2, 3):
    saver.save(setup.state(step=step, seed=step))
  saver.save(setup.state(step=3, seed=99))
  assert saver.all_steps() == [2, 3]
  assert_equal(saver.restore(step=3), setup.state(step=3, seed=3))


def test_dataset_positions_are_saved_restored_and_limited_in_number(setup, counter, tmp_path):
  saver = checkpointer(setup, tmp_path, dataset_iterator=counter, keep_dataset_checkpoints=1)
  for step in (1, 2):
    next(counter)
    saver.save(setup.state(step=step))
  assert [path.parents[1].name for path in tmp_path.glob("*/dataset/train_ds-*")] == [
    "checkpoint_2"
  ]
  counter.position = 77
  saver.restore(step=2)
  assert counter.position == 2


def test_a_checkpoint_loads_without_a_model(setup, tmp_path):
  state = setup.state(step=5)
  write_older_layout(tmp_path, state)
  for path in (tmp_path, tmp_path / "checkpoint_5", tmp_path / "checkpoint_5/checkpoint"):
    loaded = load_t5x_checkpoint(path)
    np.testing.assert_array_equal(loaded["target"]["wi"], state.params["wi"])
  half = load_t5x_checkpoint(tmp_path, restore_dtype=jnp.bfloat16, lazy_parameters=True)
  assert isinstance(half["target"]["wi"], LazyArray)
  assert half["target"]["wi"].get().dtype == jnp.bfloat16
  assert half["state"]["param_states"]["wi"]["v"].dtype == np.float32


def test_the_legacy_manager_saves_and_restores_as_configured(setup, tmp_path):
  shape = setup.initializer.global_train_state_shape
  manager = LegacyCheckpointManager(
    save_cfg=SaveCheckpointConfig(keep=1),
    restore_cfg=RestoreCheckpointConfig(path=str(tmp_path)),
    train_state_shape=shape,
    partitioner=setup.partitioner,
    model_dir=str(tmp_path),
  )
  for step in (1, 2):
    manager.save(setup.state(step=step))
  assert all_steps(tmp_path) == [2]
  cfg = RestoreCheckpointConfig(path=str(tmp_path))
  assert_equal(manager.restore([str(tmp_path / "checkpoint_2")], cfg), setup.state(step=2))
  assert manager.restore([], None) is None


def test_save_best_checkpointer_keeps_the_best_and_the_latest(setup, tmp_path, write_scalars):
  write_scalars(tmp_path / "train", "accuracy", {1: 0.1, 2: 0.9, 3: 0.5, 4: 0.2})
  saver = checkpointer(setup, tmp_path, SaveBestCheckpointer, keep=1)
  for step in (1, 2, 3, 4):
    saver.save(setup.state(step=step))
  assert saver.all_steps() == [2, 4]


def test_an_absurd_shape_of_the_step_names_the_checkpoint(tmp_path):
  folder = tmp_path / "checkpoint_3"
  step = {"driver": "zarr", "kvstore": {"driver": "file", "path": "step/"}, "metadata": {}}
  folder.mkdir()
  content = {"version": 3, "optimizer": {"state": {"step": step}}}
  (folder / "checkpoint").write_bytes(serialization.msgpack_serialize(content))
  shape = {"shape": [1 << 50], "chunks": [1], "dtype": "<i4", "compressor": None, "order": "C"}
  (folder / "step").mkdir()
  metadata = {**shape, "filters": None, "fill_value": 0, "zarr_format": 2}
  (folder / "step/.zarray").write_text(json.dumps(metadata))
  with pytest.raises(
    ValueError, match=r"checkpoint_3 cannot be opened on this machine: .*allocate"
  ):
    read_arrays(folder)
