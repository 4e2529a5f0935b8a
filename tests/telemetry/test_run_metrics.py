"""Metrics of a run that its steps do not measure."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rosetta_t5.networks.t5 import T5Config
from rosetta_t5.telemetry.flops import training_flops_of
from rosetta_t5.telemetry.run_metrics import (
  NonFiniteError,
  RunMetrics,
  global_norm,
  raise_if_nonfinite,
  skipped_steps,
)
from rosetta_t5.training import TrainState
from rosetta_t5.training.optimizers.optax_wrapper import chain, sgd

PARAMS = {"a": jnp.full((3, 4), 2.0), "b": jnp.full(4, -1.0, jnp.bfloat16)}
CONFIG = T5Config(vocab_size=64, emb_dim=8, num_heads=2, head_dim=4, mlp_dim=16)
BATCH = {
  name: jax.ShapeDtypeStruct((16, length), jnp.int32)
  for name, length in (("encoder_input_tokens", 32), ("decoder_input_tokens", 8))
}
H200 = types.SimpleNamespace(device_kind="NVIDIA H200")


def model(config=CONFIG):
  return types.SimpleNamespace(network_config=config)


def mesh(*devices):
  return types.SimpleNamespace(devices=np.array(devices))


def measured(devices, optimizer=None, values=None, model=None):
  state = TrainState.create(optimizer or sgd(0.1), {"params": PARAMS})
  measures = RunMetrics(model or globals()["model"](), BATCH, mesh(*devices))
  return measures(7, {"timing/seqs_per_second": 1000.0} if values is None else values, state)


def test_run_metrics_are_samples_weight_norm_utilization_and_memory():
  flops = training_flops_of(CONFIG, encoder_length=32, decoder_length=8)
  values = measured([H200, H200])
  assert 0.1 < values.pop("memory/host_peak_gib") < 1000
  assert values == {
    "data/consumed_samples": 7 * 16,
    "weight_norm": pytest.approx(np.sqrt(12 * 4 + 4)),
    "timing/model_flops_utilization": pytest.approx(1000 * flops / (2 * 989e12)),
  }


def test_samples_of_the_training_before_the_run_are_not_counted():
  state = TrainState.create(sgd(0.1), {"params": PARAMS})
  measures = RunMetrics(model(), BATCH, mesh(*jax.devices()), first_step=1200)
  assert measures(1250, {}, state)["data/consumed_samples"] == 50 * 16


@pytest.mark.parametrize(
  "unknown", [{"devices": jax.devices()}, {"model": model(None)}, {"values": {}}]
)
def test_utilization_is_omitted_if_peak_flops_or_speed_are_unknown(unknown):
  assert "timing/model_flops_utilization" not in measured(**{"devices": [H200]} | unknown)


def test_norm_of_an_empty_tree_is_zero():
  assert global_norm({}) == 0.0


def skipping():
  return chain([optax.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=2)])


def updated(state, value):
  grads = jax.tree.map(lambda x: jnp.full_like(x, value), state.params)
  return state.apply_gradient(grads, learning_rate=0.1)


def test_steps_skipped_by_apply_if_finite_are_counted_and_do_not_end_the_run():
  state = TrainState.create(skipping(), {"params": PARAMS})
  measures = RunMetrics(model(), BATCH, mesh(*jax.devices()))
  record = types.SimpleNamespace(bad=[True, False, False], step=0)
  for step, skipped in ((1, 1.0), (2, 2.0)):
    state = updated(state, np.nan)
    values = measures(step, {}, state)
    assert values["skipped_steps"] == skipped
    raise_if_nonfinite(record, state, None, values, 3)
  # After two in a row, optax applies the third.
  state = updated(state, np.nan)
  with pytest.raises(NonFiniteError, match="not finite"):
    raise_if_nonfinite(record, state, None, measures(3, {}, state), 3)


def test_nonfinite_step_ends_the_run_of_other_optimizers():
  state = TrainState.create(sgd(0.1), {"params": PARAMS})
  values = RunMetrics(model(), BATCH, mesh(*jax.devices()))(1, {}, state)
  assert skipped_steps(state.param_states) is None
  record = types.SimpleNamespace(bad=[True, False, False], step=0)
  with pytest.raises(NonFiniteError, match="first in loss"):
    raise_if_nonfinite(record, state, None, values, 3)
