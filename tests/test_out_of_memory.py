"""The settings that an out-of-memory error names."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from rosetta_t5.out_of_memory import (
  TRAINING,
  OutOfMemoryError,
  check_state_fits,
  explain_out_of_memory,
)
from rosetta_t5.training import InferenceState


def test_an_allocation_that_fails_names_settings_and_plan():
  with pytest.raises(OutOfMemoryError) as raised, explain_out_of_memory(TRAINING):
    jnp.zeros((1 << 46,), jnp.float32).block_until_ready()
  message = str(raised.value)
  assert message.startswith("a device is out of memory: RESOURCE_EXHAUSTED: ")
  assert "\n  trainer.Trainer.num_microbatches = N: " in message
  assert "rosetta-t5 plan RECIPE" in message


def test_a_state_larger_than_memory_is_an_error_unless_devices_share_it():
  shape = {"w": jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.float32)}  # 4.4 TB
  state = InferenceState(step=None, params=shape)
  specs = InferenceState(step=None, params={"w": PartitionSpec("data")})
  initializer = types.SimpleNamespace(global_train_state_shape=state, train_state_axes=specs)

  def check(devices):
    mesh = types.SimpleNamespace(shape={"data": devices})
    check_state_fits(initializer, types.SimpleNamespace(mesh=mesh))

  with pytest.raises(OutOfMemoryError, match=r"needs 4.4 TB on each device"):
    check(1)
  check(1 << 16)


def test_other_errors_are_unchanged():
  with pytest.raises(ValueError, match="mine"), explain_out_of_memory(TRAINING):
    raise ValueError("mine")
