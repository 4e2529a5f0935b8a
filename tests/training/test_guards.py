"""Steps whose loss or gradients spike are skipped and counted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from rosetta_t5.telemetry.run_metrics import skipped_steps, skips_in_a_row
from rosetta_t5.training.optimizers import optax_wrapper as optimizers
from rosetta_t5.training.optimizers.adafactor import Adafactor
from rosetta_t5.training.optimizers.composite import SpikeGuard
from rosetta_t5.training.optimizers.optimizer_def import StepLoss
from rosetta_t5.training.optimizers.transformations import average_parameters

PARAMS = {"w": jnp.ones((2, 3))}
AXES = {"w": P("embed", "mlp")}


@jax.jit
def step(optimizer, size, loss):
  grads = {"w": jnp.full((2, 3), size)}
  about_loss = StepLoss(loss, lambda params: loss, 1)
  return optimizer.apply_gradient(grads, learning_rate=0.1, loss=about_loss)


def after_ten_steps(optimizer=None, **arguments):
  """Returns an optimizer after ten steps of gradient norm √6 and loss 1."""
  inner = optimizer or optimizers.chain([optax.adam])
  guard = SpikeGuard(inner, warmup_steps=5, **arguments).create(PARAMS)
  for _ in range(10):
    guard = step(guard, 1.0, 1.0)
  return guard


@pytest.mark.parametrize(
  ("size", "loss"), [(5.1, 1.0), (1.0, 2.1), (np.nan, 1.0), (1.0, np.inf)], ids=str
)
def test_a_spike_changes_nothing_and_is_counted(size, loss):
  before = after_ten_steps()
  after = step(step(before, size, loss), size, loss)
  np.testing.assert_array_equal(after.target["w"], before.target["w"])
  assert after.state.step == 12
  counts = after.state.param_states
  assert (skipped_steps(counts), skips_in_a_row(counts)) == (2, 2)
  inner = (optimizer.state.param_states.counts.inner_state for optimizer in (before, after))
  jax.tree.map(np.testing.assert_array_equal, *inner)
  again = step(after, 1.0, 1.0)
  assert jnp.any(again.target["w"] != before.target["w"])
  counts = again.state.param_states
  assert (skipped_steps(counts), skips_in_a_row(counts)) == (2, 0)


def test_other_steps_are_those_of_the_optimizer_alone():
  alone = optimizers.chain([optax.adam]).create(PARAMS)
  for _ in range(10):
    alone = alone.apply_gradient({"w": jnp.full((2, 3), 1.0)}, learning_rate=0.1)
  np.testing.assert_allclose(after_ten_steps().target["w"], alone.target["w"], rtol=1e-6)


def test_high_values_are_accepted_while_the_averages_are_young():
  guard = SpikeGuard(optimizers.chain([optax.adam]), warmup_steps=5).create(PARAMS)
  guard = step(step(guard, 1.0, 1.0), 100.0, 100.0)
  assert skipped_steps(guard.state.param_states) == 0


def test_a_negative_loss_is_compared_with_the_size_of_its_average():
  guard = SpikeGuard(optimizers.chain([optax.adam]), warmup_steps=1).create(PARAMS)
  guard = step(step(guard, 1.0, -1.0), 1.0, -1.0)
  assert skipped_steps(guard.state.param_states) == 0


def test_adafactor_can_be_guarded():
  before = after_ten_steps(Adafactor())
  after = step(before, np.nan, 1.0)
  np.testing.assert_array_equal(after.target["w"], before.target["w"])


def test_state_is_split_restored_and_evaluated_as_that_of_the_optimizer():
  inner = optimizers.chain([optax.adam, average_parameters(0.5)])
  optimizer = after_ten_steps(inner)
  definition = optimizer.optimizer_def
  axes = definition.derive_logical_axes(optimizer, AXES).state.param_states
  assert axes.counts.inner_state[0][0].mu == AXES
  fresh = definition.create(PARAMS)
  restored = fresh.restore_state(jax.device_get(optimizer.state_dict()))
  jax.tree.map(np.testing.assert_array_equal, restored, optimizer)
  average = definition.params_to_evaluate(optimizer.target, optimizer.state.param_states)
  assert jnp.all(average["w"] > optimizer.target["w"])
