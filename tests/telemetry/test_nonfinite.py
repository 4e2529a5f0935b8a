"""A run that went bad is told what went bad first."""

from __future__ import annotations

import dataclasses
import pathlib
import types

import jax.numpy as jnp
import numpy as np
import pytest

from rosetta_t5.telemetry.nonfinite import (
  NonFinite,
  NonFiniteError,
  check_finite,
  first_nonfinite,
  name_in_step,
)

GOOD = {"encoder": {"kernel": jnp.ones((2, 3))}, "step": jnp.int32(3)}


def test_all_finite_gives_nothing():
  assert (
    first_nonfinite([("loss", 1.0), ("parameters", GOOD), ("batch", {"x": np.ones(2)})]) is None
  )


def test_first_bad_tensor_is_named_with_its_counts():
  bad = {"a": jnp.ones(2), "b": {"c": jnp.array([jnp.nan, jnp.inf, -jnp.inf, 1.0])}, "d": jnp.nan}
  found = first_nonfinite([("loss", jnp.float32(1.0)), ("gradients", bad), ("parameters", bad)])
  assert found == NonFinite("gradients", "b/c", (4,), "float32", 1, 2)
  assert str(found) == "gradients b/c (4,) float32: 1 NaN and 2 infinite of 4 values"


def test_single_number_has_no_name_of_its_own():
  assert str(first_nonfinite([("loss", jnp.nan)])).startswith("loss () float32: 1 NaN of 1 value")


def test_bfloat16_is_looked_at_and_integers_are_passed_over():
  assert first_nonfinite([("batch", {"x": jnp.array([1, 2])})]) is None
  found = first_nonfinite([("parameters", jnp.array([jnp.inf], jnp.bfloat16))])
  assert found is not None
  assert found.dtype == "bfloat16"


def test_later_groups_are_computed_only_if_the_earlier_are_finite():
  def fail():
    raise AssertionError("gradients were computed though the loss is bad")

  assert first_nonfinite([("loss", jnp.nan), ("gradients", fail)]).group == "loss"
  assert first_nonfinite([("loss", 1.0), ("gradients", lambda: {"k": jnp.nan})]).name == "k"


def test_error_says_step_tensor_checkpoint_and_what_to_try(tmp_path):
  found = first_nonfinite([("gradients", {"decoder": {"kernel": jnp.array([jnp.nan])}})])
  error = NonFiniteError(120, found, tmp_path / "checkpoint_100")
  assert str(error) == (
    "training is not finite (NaN or infinity) at step 120: first in gradients decoder/kernel (1,) "
    f"float32: 1 NaN of 1 value. The last good checkpoint is {tmp_path}/checkpoint_100; a run with "
    "other settings in the same MODEL_DIR goes on from there. To try: a lower learning rate or more warm-up steps; "
    "clip the gradients (optax.clip_by_global_norm in optimizers.chain); network.T5Config.dtype = "
    "'float32' if it is bfloat16; z_loss = 0.0001."
  )
  assert (error.step, error.first_bad) == (120, found)


@pytest.mark.parametrize(
  ("group", "advice"),
  [("batch", "look at the task's preprocessors"), ("parameters", "from an earlier checkpoint")],
)
def test_advice_goes_with_what_was_bad(group, advice):
  text = str(NonFiniteError(1, first_nonfinite([(group, jnp.nan)])))
  assert advice in text
  assert "There is no checkpoint from before it" in text


def test_step_s_record_is_turned_into_a_name():
  params = {"a": {"kernel": 0}, "b": 0}
  assert name_in_step([False, False, False], params) is None
  assert name_in_step([True, True, True], params) == "loss"
  assert name_in_step(jnp.array([False, False, True]), params) == "gradients b"
  assert name_in_step([False, True, True], params) == "gradients a/kernel"


@dataclasses.dataclass
class Manager:
  """A checkpoint manager's view of a folder."""

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
  check_finite(None, STATE, None)
  check_finite(record(3, False, False, False), STATE, None)


def test_bad_step_names_the_gradient_and_the_last_checkpoint_before_it(tmp_path):
  manager = Manager(tmp_path, [0, 10, 20, 30])
  with pytest.raises(NonFiniteError) as caught:
    check_finite(record(25, False, True, False), STATE, manager)
  assert "at step 26: first in gradients a/kernel. " in str(caught.value)
  assert f"The last good checkpoint is {tmp_path}/checkpoint_20;" in str(caught.value)
  assert manager.waited, "a save that is running may be the last good one"


def test_bad_run_without_checkpoints_says_so():
  with pytest.raises(NonFiniteError, match=r"step 1: first in loss\. There is no checkpoint"):
    check_finite(record(0, True, True, True), STATE, None)
