"""T5X's train state, which is made of an optimizer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import freeze, unfreeze
from flax.linen.partitioning import AxisMetadata
from jax.sharding import PartitionSpec
from tiny_models import Bigram, adafactor, make_batch, make_model, variables

from t5x import checkpoints, optimizers, partitioning, train_state, trainer, utils


def bigram_variables():
  shapes = variables(Bigram(counts_calls=True))
  return shapes | jax.tree.map(lambda x: np.ones(x.shape, x.dtype), dict(shapes))


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("like", [freeze, unfreeze])
def test_frozen_and_plain_variables_give_a_state_of_their_kind(like):
  state = train_state.FlaxOptimTrainState.create(adafactor(), like(bigram_variables()))
  assert isinstance(state.params, type(like({})))
  assert_equal(state.params["table"], bigram_variables()["params"]["table"])
  assert int(state.step) == 0
  assert set(state.state_dict()) == {"state", "target", "flax_mutables"}
  restored = state.restore_state(jax.tree.map(lambda x: x + 1, state.state_dict()))
  assert_equal(restored, jax.tree.map(lambda x: x + 1, state))
  inference = train_state.InferenceState.create(like(bigram_variables()))
  assert isinstance(inference.params, type(like({})))
  assert_equal(inference.restore_state(state.state_dict()).params, state.params)


def test_a_state_is_made_of_an_optimizer_and_its_parts_are_replaced():
  optimizer = optimizers.sgd(0.5).create({"w": jnp.ones(3)})
  state = train_state.FlaxOptimTrainState(optimizer, flax_mutables=freeze({"seen": jnp.zeros(2)}))
  assert state._optimizer is optimizer
  stepped = state.apply_gradient({"w": jnp.ones(3)}, learning_rate=None)
  assert (int(stepped.step), list(stepped.params["w"])) == (1, [0.5] * 3)
  assert stepped.flax_mutables == train_state.EMPTY_DICT
  assert int(state.replace_step(jnp.int32(7)).step) == 7
  other = state.replace(_optimizer=optimizer.replace(target={"w": jnp.zeros(3)}))
  assert_equal(other, state.replace_params({"w": jnp.zeros(3)}))
  assert state.replace_flax_mutables({}).state_dict().keys() == {"state", "target"}


def test_a_state_of_the_initializer_counts_as_one_of_t5x():
  ours = train_state.TrainState.create(adafactor(), bigram_variables())
  assert isinstance(ours, train_state.FlaxOptimTrainState)
  optimizer = ours._optimizer.replace(target={"table": np.zeros((32, 32))})
  assert_equal(ours.replace(_optimizer=optimizer), ours.replace_params(optimizer.target))


def test_variables_without_axes_are_rejected_with_the_message_of_t5x():
  plain = {"params": {"w": np.zeros((2, 4)), "b": np.zeros(4)}}
  with pytest.raises(ValueError, match=r"supports params_axes .* but the model is not emitting"):
    train_state.FlaxOptimTrainState.create(adafactor(), plain)
  assert train_state.FlaxOptimTrainState.create(optimizers.sgd(0.1), plain).params_axes is None
  axes = {"b_axes": AxisMetadata(("embed",))}
  with pytest.raises(ValueError, match=r"^Missing axis names for parameters: \{'w'\}$"):
    train_state.InferenceState.create({**plain, "params_axes": axes})


def test_logical_axes_lack_collections_without_axes_but_the_mesh_axes_are_complete():
  state = train_state.FlaxOptimTrainState.create(adafactor(), freeze(bigram_variables()))
  axes = state.as_logical_axes()
  assert (axes.params_axes, axes.flax_mutables) == (None, freeze({}))
  assert axes.params["table"] == PartitionSpec("vocab", "embed")
  specs = partitioning.PjitPartitioner(num_partitions=2).get_mesh_axes(state)
  assert jax.tree.structure(specs) == jax.tree.structure(state)
  assert specs.params["table"] == PartitionSpec("model", None)
  assert specs.flax_mutables["counters"]["calls"] == PartitionSpec()


@pytest.mark.slow
def test_two_training_steps_and_a_restore_equal_those_of_our_state(tmp_path):
  partitioner = partitioning.PjitPartitioner(num_partitions=2)
  model = make_model(Bigram())

  def train(state, folder):
    run = trainer.Trainer(
      model,
      state,
      partitioner,
      eval_names=[],
      summary_dir=None,
      train_state_axes=partitioner.get_mesh_axes(state),
      rng=jax.random.PRNGKey(0),
      learning_rate_fn=utils.create_learning_rate_scheduler("constant", base_learning_rate=0.1),
      num_microbatches=2,
    )
    with run:
      run.train(iter([make_batch(8)] * 2), 2, start_step=0).result()
    manager = checkpoints.OrbaxCheckpointManagerInterface(folder, run.train_state, partitioner)
    manager.save(run.train_state)
    manager.wait_until_finished()
    restored = manager.restore(step=2)
    manager.close()
    assert_equal(restored, run.train_state)
    return restored

  theirs = train_state.FlaxOptimTrainState.create(adafactor(), freeze(variables(Bigram())))
  ours = train_state.TrainState.create(adafactor(), variables(Bigram()))
  theirs, ours = train(theirs, str(tmp_path / "theirs")), train(ours, str(tmp_path / "ours"))
  assert type(theirs) is train_state.FlaxOptimTrainState
  assert_equal(theirs.state_dict(), ours.state_dict())
