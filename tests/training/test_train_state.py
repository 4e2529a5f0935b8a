"""The train state: its parts, how it is stored, and its logical axes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.core import freeze
from flax.linen import partitioning as flax_partitioning
from jax.sharding import PartitionSpec
from tiny_models import Bigram, adafactor, make_state, variables

from rosetta_t5.training.optimizers.optax_wrapper import adamw
from rosetta_t5.training.optimizers.optimizer_def import OptimizerDef
from rosetta_t5.training.train_state import InferenceState, TrainState

STATE = make_state(Bigram(counts_calls=True))
INFERENCE = InferenceState.create(variables(Bigram(counts_calls=True)))


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_state_starts_at_step_0_with_all_collections():
  assert (STATE.step.dtype, int(STATE.step)) == (jnp.int32, 0)
  assert list(STATE.params) == ["table"]
  assert list(STATE.param_states) == ["table"]
  assert STATE.flax_mutables == {"counters": {"calls": 0}}
  assert STATE.params_axes["table_axes"].names == ("vocab", "embed")


def test_stored_dict_has_the_layout_of_t5x():
  stored = STATE.state_dict()
  assert set(stored) == {"state", "target", "flax_mutables"}
  assert set(stored["state"]) == {"step", "param_states"}
  assert set(stored["state"]["param_states"]["table"]) == {"m", "v", "v_col", "v_row"}
  assert_equal(stored["target"], STATE.params)
  assert "flax_mutables" not in make_state(Bigram()).state_dict()


def test_stored_values_are_restored():
  other = jax.tree.map(lambda x: x + 1, STATE)
  assert_equal(STATE.restore_state(other.state_dict()), other)
  stored = other.state_dict()
  stored["state"]["step"] = 7
  del stored["flax_mutables"]
  restored = STATE.restore_state(stored)
  assert (int(restored.step), restored.flax_mutables) == (7, {"counters": {"calls": 0}})


def test_names_of_another_model_are_rejected():
  stored = STATE.state_dict()
  stored["target"] = {"tables": stored["target"]["table"]}
  with pytest.raises(ValueError, match="table"):
    STATE.restore_state(stored)


def test_gradients_are_applied_by_the_optimizer_and_the_old_state_does_not_change():
  before = jax.tree.map(jnp.copy, STATE)
  state = STATE.apply_gradient({"table": jnp.ones((32, 32))}, 0.1)
  assert int(state.step) == 1
  assert np.all(state.params["table"] < STATE.params["table"])
  assert state.flax_mutables is STATE.flax_mutables
  counted = STATE.apply_gradient({"table": jnp.ones((32, 32))}, 0.1, {"counters": {"calls": 3}})
  assert counted.flax_mutables == {"counters": {"calls": 3}}
  assert_equal(STATE, before)


def test_a_state_of_frozen_dicts_keeps_its_structure_when_a_step_gives_plain_dicts():
  state = TrainState.create(adafactor(), freeze(variables(Bigram(counts_calls=True))))
  grads = freeze({"table": jnp.ones((32, 32))})
  updated = state.apply_gradient(grads, 0.1, {"counters": {"calls": 3}})
  assert jax.tree.structure(updated) == jax.tree.structure(state)


def test_parts_can_be_replaced():
  state = STATE.replace_step(jnp.int32(5)).replace_params({"table": jnp.zeros((32, 32))})
  state = state.replace_flax_mutables({})
  assert (int(state.step), float(jnp.sum(state.params["table"])), state.flax_mutables) == (5, 0, {})
  assert_equal(state.param_states, STATE.param_states)


def test_logical_axes_replace_the_arrays():
  axes = STATE.as_logical_axes()
  names = PartitionSpec("vocab", "embed")
  assert axes.step is None
  assert axes.params == {"table": names}
  assert axes.param_states["table"].v == names
  assert axes.flax_mutables == {"counters": {"calls": None}}


def test_logical_axes_of_frozen_collections_replace_their_arrays():
  collections = {
    "params": {"scale": jnp.ones(2)},
    "params_axes": {"scale_axes": flax_partitioning.AxisMetadata(names=("embed",))},
    "means": {"mean": jnp.zeros(2)},
    "means_axes": {"mean_axes": flax_partitioning.AxisMetadata(names=("embed",))},
  }
  axes = InferenceState.create(freeze(collections)).as_logical_axes()
  assert axes.flax_mutables == freeze({"means": {"mean": PartitionSpec("embed")}})


class Plain(nn.Module):
  """A module that names no axes."""

  @nn.compact
  def __call__(self, x):
    return nn.Dense(2)(x)


def test_error_of_a_model_without_axes_says_how_to_name_them():
  params = Plain().init(jax.random.PRNGKey(0), jnp.ones((1, 2)))
  state = TrainState.create(adamw(learning_rate=1.0), params)
  with pytest.raises(ValueError, match=r"no logical axes.*param_with_axes\(name, init, shape"):
    state.as_logical_axes()


def test_error_names_the_optimizer_without_axes():
  class Plainest(OptimizerDef):
    def __init__(self):
      super().__init__(hyper_params=None)

    init_state = adafactor().init_state

  state = TrainState.create(adafactor(), variables(Bigram())).replace(optimizer_def=Plainest())
  with pytest.raises(ValueError, match=r"optimizer Plainest has no method derive_logical_axes"):
    state.as_logical_axes()


def test_inference_state_stores_everything_except_the_optimizer():
  stored = INFERENCE.state_dict()
  assert set(stored["state"]) == {"step"}
  whole = STATE.state_dict()
  assert set(stored) == set(whole)
  assert_equal(stored["target"], whole["target"])


def test_inference_state_is_restored_from_a_train_state():
  other = jax.tree.map(lambda x: x + 1, STATE)
  restored = INFERENCE.restore_state(other.state_dict())
  assert int(restored.step) == 1
  assert_equal(restored.params, other.params)
  assert restored.flax_mutables == {"counters": {"calls": 1}}


def test_inference_state_has_the_axes_of_a_train_state_and_no_optimizer():
  assert INFERENCE.as_logical_axes().params == STATE.as_logical_axes().params
  with pytest.raises(NotImplementedError, match="no optimizer"):
    INFERENCE.apply_gradient(STATE.params, learning_rate=0.1)
  assert not hasattr(INFERENCE, "param_states")


def test_axis_names_survive_a_round_trip_through_their_state_dict():
  axes = make_state(Bigram()).as_logical_axes()
  assert axes.restore_state(axes.state_dict()) == axes
