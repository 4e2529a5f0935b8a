"""Metrics of a run that its steps do not measure, and the error for numbers that are not finite."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rosetta_t5.telemetry.run_metrics import (
  SKIPPED_STEPS,
  WEIGHT_NORM,
  NonFiniteError,
  RunMetrics,
  first_bad_name,
  raise_if_nonfinite,
  skipped_steps,
)
from rosetta_t5.training import TrainState
from rosetta_t5.training.optimizers.optax_wrapper import chain, sgd

PARAMS = {"a": jnp.full((3, 4), 2.0), "b": jnp.full(4, -1.0, jnp.bfloat16)}
FLOPS = 1e9
BATCH = {
  name: jax.ShapeDtypeStruct((16, length), jnp.int32)
  for name, length in (("encoder_input_tokens", 32), ("decoder_input_tokens", 8))
}
H200 = types.SimpleNamespace(device_kind="NVIDIA H200")


def mesh(*devices):
  return types.SimpleNamespace(devices=np.array(devices))


def measured(devices, optimizer=None, values=None, flops=FLOPS):
  state = TrainState.create(optimizer or sgd(0.1), {"params": PARAMS})
  measures = RunMetrics(flops, BATCH, mesh(*devices), 0)
  return measures(7, {"timing/seqs_per_second": 1000.0} if values is None else values, state)


def test_run_metrics_are_samples_weight_norm_utilization_and_memory():
  values = measured([H200, H200])
  assert 0.1 < values.pop("memory/host_peak_gib") < 1000
  assert values == {
    "data/consumed_samples": 7 * 16,
    "weight_norm": pytest.approx(np.sqrt(12 * 4 + 4)),
    "timing/model_flops_utilization": pytest.approx(1000 * FLOPS / (2 * 989e12)),
  }


def test_samples_of_the_training_before_the_run_are_not_counted():
  state = TrainState.create(sgd(0.1), {"params": PARAMS})
  measures = RunMetrics(FLOPS, BATCH, mesh(*jax.devices()), first_step=1200)
  assert measures(1250, {}, state)["data/consumed_samples"] == 50 * 16


@pytest.mark.parametrize("unknown", [{"devices": jax.devices()}, {"flops": None}, {"values": {}}])
def test_utilization_is_omitted_if_peak_flops_or_speed_are_unknown(unknown):
  assert "timing/model_flops_utilization" not in measured(**{"devices": [H200]} | unknown)


def skipping():
  return chain([optax.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=2)])


def updated(state, value):
  grads = jax.tree.map(lambda x: jnp.full_like(x, value), state.params)
  return state.apply_gradient(grads, learning_rate=0.1)


def test_steps_skipped_by_apply_if_finite_are_counted_and_do_not_end_the_run():
  state = TrainState.create(skipping(), {"params": PARAMS})
  measures = RunMetrics(FLOPS, BATCH, mesh(*jax.devices()), 0)
  record = types.SimpleNamespace(bad=[True, False, False], step=0)
  for step, skipped in ((1, 1.0), (2, 2.0)):
    state = updated(state, np.nan)
    values = measures(step, {}, state)
    assert values["skipped_steps"] == skipped
    raise_if_nonfinite(record, state.params, None, values, 3)
  # After two in a row, optax applies the third.
  state = updated(state, np.nan)
  with pytest.raises(NonFiniteError, match="not finite"):
    raise_if_nonfinite(record, state.params, None, measures(3, {}, state), 3)


def test_nonfinite_step_ends_the_run_of_other_optimizers():
  state = TrainState.create(sgd(0.1), {"params": PARAMS})
  values = RunMetrics(FLOPS, BATCH, mesh(*jax.devices()), 0)(1, {}, state)
  assert skipped_steps(state.param_states) is None
  record = types.SimpleNamespace(bad=[True, False, False], step=0)
  with pytest.raises(NonFiniteError, match="first in loss"):
    raise_if_nonfinite(record, state.params, None, values, 3)


def test_error_contains_step_tensor_checkpoint_and_advice(tmp_path):
  error = NonFiniteError(120, "gradients decoder/kernel", tmp_path / "checkpoint_100")
  assert str(error) == (
    "training is not finite (NaN or infinity) at step 120: first in gradients decoder/kernel. "
    f"The last good checkpoint is {tmp_path}/checkpoint_100; a run with other settings in the same "
    "MODEL_DIR continues from there. To try: a lower learning rate or more warm-up steps; clip the "
    "gradients (optax.clip_by_global_norm in optimizers.chain); network.T5Config.dtype = 'float32' "
    "if it is bfloat16; z_loss = 0.0001."
  )
  assert (error.step, error.first_bad) == (120, "gradients decoder/kernel")


def test_first_bad_name_is_the_loss_or_a_gradient():
  params = {"a": {"kernel": 0}, "b": 0}
  assert first_bad_name([False, False, False], params) is None
  assert first_bad_name([True, True, True], params) == "loss"
  assert first_bad_name(jnp.array([False, False, True]), params) == "gradients b"
  assert first_bad_name([False, True, True], params) == "gradients a/kernel"


@dataclasses.dataclass
class Manager:
  """The interface of a checkpoint manager that the check uses."""

  directory: pathlib.Path
  steps: list[int]
  waited: bool = False

  def wait_until_finished(self):
    self.waited = True

  def all_steps(self):
    return self.steps


STATE = types.SimpleNamespace(params={"a": {"kernel": 0}, "b": 0})


def record(step, *bad):
  return types.SimpleNamespace(step=jnp.int32(step), bad=jnp.array(bad))


def test_finite_steps_pass():
  raise_if_nonfinite(None, STATE.params, None, {}, 3)
  raise_if_nonfinite(record(3, False, False, False), STATE.params, None, {"timing/x": math.inf}, 4)


def test_error_names_the_gradient_and_the_last_checkpoint_before_it(tmp_path):
  manager = Manager(tmp_path, [0, 10, 20, 30])
  with pytest.raises(NonFiniteError) as caught:
    raise_if_nonfinite(record(25, False, True, False), STATE.params, manager, {}, 30)
  assert "at step 26: first in gradients a/kernel. " in str(caught.value)
  assert f"The last good checkpoint is {tmp_path}/checkpoint_20;" in str(caught.value)
  assert manager.waited, "a pending save may be the last good one"


def test_error_without_checkpoints():
  with pytest.raises(NonFiniteError, match=r"step 1: first in loss\. There is no checkpoint"):
    raise_if_nonfinite(record(0, True, True, True), STATE.params, None, {}, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_metric_that_is_not_finite_ends_the_run_before_its_checkpoint(tmp_path, value):
  manager = Manager(tmp_path, [0, 10, 20])
  metrics = {"accuracy": 0.5, "loss_per_token": value}
  finite = record(18, False, False, False)
  with pytest.raises(NonFiniteError, match=r"at step 20: first in metric loss_per_token") as caught:
    raise_if_nonfinite(finite, STATE.params, manager, metrics, 20)
  assert f"The last good checkpoint is {tmp_path}/checkpoint_10;" in str(caught.value)


def test_steps_that_optax_has_skipped_may_have_metrics_that_are_not_finite():
  skipped = {SKIPPED_STEPS: 1.0, WEIGHT_NORM: 3.0, "loss": math.nan}
  raise_if_nonfinite(None, STATE.params, None, skipped, 5)
  with pytest.raises(NonFiniteError):
    raise_if_nonfinite(None, STATE.params, None, skipped | {WEIGHT_NORM: math.nan}, 5)
