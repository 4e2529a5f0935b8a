"""The error of a run that is no longer finite names the first bad tensor."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import types

import jax.numpy as jnp
import pytest

from rosetta_t5.telemetry.run_metrics import (
  SKIPPED_STEPS,
  WEIGHT_NORM,
  NonFiniteError,
  first_bad_name,
  raise_if_nonfinite,
)


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
  raise_if_nonfinite(None, STATE, None, {}, 3)
  raise_if_nonfinite(record(3, False, False, False), STATE, None, {"timing/x": math.inf}, 4)


def test_error_names_the_gradient_and_the_last_checkpoint_before_it(tmp_path):
  manager = Manager(tmp_path, [0, 10, 20, 30])
  with pytest.raises(NonFiniteError) as caught:
    raise_if_nonfinite(record(25, False, True, False), STATE, manager, {}, 30)
  assert "at step 26: first in gradients a/kernel. " in str(caught.value)
  assert f"The last good checkpoint is {tmp_path}/checkpoint_20;" in str(caught.value)
  assert manager.waited, "a pending save may be the last good one"


def test_error_without_checkpoints():
  with pytest.raises(NonFiniteError, match=r"step 1: first in loss\. There is no checkpoint"):
    raise_if_nonfinite(record(0, True, True, True), STATE, None, {}, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_metric_that_is_not_finite_ends_the_run_before_its_checkpoint(tmp_path, value):
  manager = Manager(tmp_path, [0, 10, 20])
  metrics = {"accuracy": 0.5, "loss_per_token": value}
  finite = record(18, False, False, False)
  with pytest.raises(NonFiniteError, match=r"at step 20: first in metric loss_per_token") as caught:
    raise_if_nonfinite(finite, STATE, manager, metrics, 20)
  assert f"The last good checkpoint is {tmp_path}/checkpoint_10;" in str(caught.value)


def test_steps_that_optax_has_skipped_may_have_metrics_that_are_not_finite():
  skipped = {SKIPPED_STEPS: 1.0, WEIGHT_NORM: 3.0, "loss": math.nan}
  raise_if_nonfinite(None, STATE, None, skipped, 5)
  with pytest.raises(NonFiniteError):
    raise_if_nonfinite(None, STATE, None, skipped | {WEIGHT_NORM: math.nan}, 5)
