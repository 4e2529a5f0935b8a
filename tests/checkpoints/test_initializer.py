"""Train states that are initialized on the devices or restored."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rosetta_t5.checkpoints import RestoreCheckpointConfig, TrainStateInitializer

RNG = jax.random.PRNGKey(0)


@pytest.fixture
def two_checkpoints(setup, tmp_path):
  manager = setup.manager(tmp_path)
  for step in (1, 2):
    manager.save(setup.state(step=step))
  manager.close()
  return tmp_path


def test_shapes_are_known_before_initialization(setup):
  shape = setup.initializer.global_train_state_shape
  assert isinstance(shape.params["wi"], jax.ShapeDtypeStruct)
  assert shape.params["wi"].shape == (8, 16)
  assert setup.initializer.train_state_axes.params["wi"] == PartitionSpec(None, "model")


def test_an_initialized_state_is_sharded_over_the_mesh(setup):
  state = setup.initializer.from_scratch(RNG)
  assert state.params["wi"].sharding.spec == PartitionSpec(None, "model")
  assert state.params["wi"].addressable_shards[0].data.shape == (8, 8)
  assert int(state.step) == 0


def test_same_key_gives_the_same_parameters_on_every_mesh(setup, make_setup):
  other = make_setup(num_partitions=8)
  np.testing.assert_array_equal(
    setup.initializer.from_scratch(RNG).params["wi"],
    other.initializer.from_scratch(RNG).params["wi"],
  )


def test_no_two_leaves_share_memory_so_the_state_can_be_donated(setup):
  state = setup.initializer.from_scratch(RNG)
  leaves = jax.tree.leaves(state)
  buffers = {s.data.unsafe_buffer_pointer() for leaf in leaves for s in leaf.addressable_shards}
  assert len(buffers) == sum(len(leaf.addressable_shards) for leaf in leaves)
  step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
  assert int(step(step(state)).step) == 2


def test_init_function_gets_shapes_and_types(setup):
  seen = []

  def init(rng, input_shapes, input_types):
    seen.append((input_shapes, input_types))
    return setup.init_variables(rng, input_shapes, input_types)

  types = {"x": np.float32}
  TrainStateInitializer(setup.optimizer, init, {"x": (4, 8)}, setup.partitioner, types)
  assert seen == [({"x": (4, 8)}, types)]


def test_several_checkpoints_are_restored_in_order(setup, two_checkpoints):
  cfg = RestoreCheckpointConfig(path=str(two_checkpoints), mode="all")
  found = list(setup.initializer.from_checkpoints([cfg]))
  assert [int(state.step) for state, _ in found] == [1, 2]
  assert [path for _, path in found] == [f"{two_checkpoints}/checkpoint_{step}" for step in (1, 2)]


def test_from_checkpoint_restores_exactly_one_checkpoint(setup, two_checkpoints):
  latest = RestoreCheckpointConfig(path=str(two_checkpoints))
  assert int(setup.initializer.from_checkpoint([latest]).step) == 2
  every = RestoreCheckpointConfig(path=str(two_checkpoints), mode="all")
  with pytest.raises(ValueError, match="Expected at most 1 checkpoint, got 2"):
    setup.initializer.from_checkpoint([every])


def test_a_state_is_initialized_if_no_config_names_a_checkpoint(setup, two_checkpoints, tmp_path):
  latest = RestoreCheckpointConfig(path=str(two_checkpoints))
  absent = RestoreCheckpointConfig(path=str(tmp_path / "absent"))
  from_either = setup.initializer.from_checkpoint_or_scratch
  assert int(from_either([absent, latest], init_rng=RNG).step) == 2
  assert int(from_either([absent], init_rng=RNG).step) == 0
  assert setup.initializer.from_checkpoint([absent]) is None


def test_parameters_have_the_methods_of_t5xs_frozen_dicts_and_may_be_replaced_by_plain_dicts(setup):
  state = setup.initializer.from_scratch(RNG)
  plain = state.params.unfreeze()
  assert type(plain) is dict
  assert state.params.copy({"more": 1})["more"] == 1
  replaced = [state.replace_params(plain)]
  replaced.append(state.replace(_optimizer=state._optimizer.replace(target=plain)))
  for each in replaced:
    assert jax.tree.structure(each) == jax.tree.structure(state)
