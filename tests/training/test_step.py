"""One step: microbatches, random keys, purity, mutable collections, and the record of NaN."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import (
  T5_1_1,
  Bigram,
  exchange_padding,
  make_batch,
  make_model,
  make_state,
  with_padding,
)

from rosetta_t5.networks.gpu_fusion import square_sums
from rosetta_t5.networks.transformer import Transformer
from rosetta_t5.telemetry.metrics import set_time_metrics_duration
from rosetta_t5.telemetry.run_metrics import first_bad_name
from rosetta_t5.training.optimizers.optax_wrapper import adamw
from rosetta_t5.training.step import (
  FirstNonFinite,
  accumulate_gradients,
  eval_step,
  train_step,
)
from rosetta_t5.training.train_state import TrainState

BATCH = make_batch(8)
KEY = jax.random.PRNGKey(3)


def rate(step):
  return 0.1 / (step + 1)


def gradients(**options):
  """Returns gradients, loss and the metrics' values of a T5 for BATCH."""
  model = make_model(Transformer(T5_1_1), z_loss=1e-4)
  run = functools.partial(accumulate_gradients, model.loss_fn, **options)
  grads, loss, metrics, _ = jax.jit(run)(make_state(Transformer(T5_1_1)), BATCH, KEY)
  timed = set_time_metrics_duration(metrics, 2.0)
  return grads, loss, {name: float(metric.compute()) for name, metric in timed.items()}


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 2])
def test_microbatches_sum_to_the_whole_batch_and_count_as_one_step(at_once):
  whole_grads, whole_loss, whole_metrics = gradients(num_microbatches=None)
  grads, loss, metrics = gradients(num_microbatches=4, microbatches_at_once=at_once)
  largest = max(float(jnp.max(jnp.abs(grad))) for grad in jax.tree.leaves(whole_grads))
  compare = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-6 * largest)
  jax.tree.map(compare, grads, whole_grads)
  np.testing.assert_allclose(loss, whole_loss, rtol=1e-6)
  assert metrics == pytest.approx(whole_metrics, rel=1e-6)
  assert metrics["timing/steps_per_second"] == 0.5
  assert metrics["loss"] == pytest.approx(float(whole_loss), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("factor", ["MEAN_PER_TOKEN", "MEAN_PER_SEQUENCE"])
def test_a_mean_over_the_batch_does_not_depend_on_the_number_of_microbatches(factor):
  batch = {**BATCH, "decoder_loss_weights": jnp.arange(8)[:, None] * BATCH["decoder_loss_weights"]}
  old = {"MEAN_PER_TOKEN": "NUM_REAL_TARGET_TOKENS", "MEAN_PER_SEQUENCE": "AVERAGE_PER_SEQUENCE"}
  state = make_state(Bigram())

  def loss_and_gradients(factor, parts):
    loss_fn = make_model(Bigram(), loss_normalizing_factor=factor).loss_fn
    run = functools.partial(accumulate_gradients, loss_fn, num_microbatches=parts)
    return jax.jit(run)(state, batch, KEY)[:2]

  grads, loss = loss_and_gradients(factor, 4)
  expected_grads, expected = loss_and_gradients(old[factor], 1)
  assert float(loss) == pytest.approx(float(expected), rel=1e-6)
  largest = max(float(jnp.max(jnp.abs(grad))) for grad in jax.tree.leaves(expected_grads))
  compare = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6 * largest)
  jax.tree.map(compare, grads, expected_grads)


@pytest.mark.slow
def test_a_mean_without_weights_excludes_the_padding_of_the_network():
  def loss(pad_id, num_microbatches):
    module = Transformer(T5_1_1.replace(pad_id=pad_id))
    model = make_model(module, loss_normalizing_factor="MEAN_PER_TOKEN")
    state = make_state(Transformer(T5_1_1))
    state = state.replace_params(with_padding(state.params, pad_id))
    names = [name for name in BATCH if name.endswith("_tokens")]
    batch = {name: exchange_padding(BATCH[name], pad_id) for name in names}
    run = functools.partial(accumulate_gradients, model.loss_fn, pad_id=model.pad_id)
    return float(jax.jit(run, static_argnums=3)(state, batch, KEY, num_microbatches)[1])

  assert loss(5, 4) == pytest.approx(loss(0, None), rel=1e-5)


@pytest.mark.parametrize(("at_once", "is_loop"), [(1, True), (2, True), (4, False)])
def test_a_program_can_compute_all_microbatches_without_a_loop(at_once, is_loop):
  def run(state):
    loss_fn = make_model(Bigram()).loss_fn
    return accumulate_gradients(loss_fn, state, BATCH, KEY, 4, microbatches_at_once=at_once)

  text = jax.jit(run).lower(make_state(Bigram())).as_text()
  # Other loops compute random numbers and merge metrics.
  carries_gradients = re.compile(r"stablehlo\.while.*tensor<\d+x\d+xf32>")
  assert any(map(carries_gradients.search, text.splitlines())) == is_loop


def test_number_of_microbatches_must_divide_the_batch():
  model = make_model(Bigram())
  text = "must be a multiple of trainer.Trainer.num_microbatches × overlapping_parts = 3"
  with pytest.raises(ValueError, match=text):
    accumulate_gradients(model.loss_fn, make_state(Bigram()), BATCH, KEY, num_microbatches=3)


def noise_loss(params, batch, key):
  """A loss whose gradient is the noise that its key gives."""
  return jnp.sum(params["w"] * jax.random.normal(key, (4,))), {}


def linear_state(step=0):
  state = TrainState.create(adamw(learning_rate=0.0), {"params": {"w": jnp.ones(4)}})
  return state.replace_step(jnp.int32(step))


def gradient_of_step(step, key=KEY, num_microbatches=None):
  """Returns the gradient that `train_step` sees."""
  seen = train_step(
    linear_state(step),
    {"x": jnp.zeros(2)},
    key,
    loss_fn=noise_loss,
    learning_rate_fn=rate,
    num_microbatches=num_microbatches,
    weight_metrics=lambda grads, old, new: {"gradient": grads["w"]},
  )[1]
  return np.asarray(seen["gradient"])


def test_dropout_key_depends_on_the_key_of_the_run_and_the_step():
  for step in (0, 5):
    expected = jax.random.normal(jax.random.fold_in(KEY, step), (4,))
    np.testing.assert_array_equal(gradient_of_step(step), expected)
  assert not np.array_equal(gradient_of_step(0), gradient_of_step(5))
  assert not np.array_equal(gradient_of_step(0), gradient_of_step(0, jax.random.PRNGKey(4)))


def test_each_microbatch_has_its_own_dropout_key():
  key, first = jax.random.split(jax.random.fold_in(KEY, 7))
  _, second = jax.random.split(key)
  expected = jax.random.normal(first, (4,)) + jax.random.normal(second, (4,))
  np.testing.assert_allclose(gradient_of_step(7, num_microbatches=2), expected, rtol=1e-6)


def bigram_step(state, batch=BATCH, **options):
  model = make_model(Bigram(counts_calls=bool(state.flax_mutables)))
  step = functools.partial(train_step, loss_fn=model.loss_fn, learning_rate_fn=rate, **options)
  return jax.jit(step)(state, batch, KEY)


def test_step_is_pure():
  state = make_state(Bigram())
  before = [np.array(leaf) for leaf in jax.tree.leaves(state)]
  first, second = bigram_step(state), bigram_step(state)
  for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
    np.testing.assert_array_equal(a, b)
  for a, b in zip(jax.tree.leaves(state), before, strict=True):
    np.testing.assert_array_equal(a, b)
  assert int(first[0].step) == 1
  assert not np.array_equal(first[0].params["table"], state.params["table"])


def test_learning_rate_is_evaluated_at_the_number_of_completed_steps():
  state = make_state(Bigram()).replace_step(jnp.int32(4))
  metrics = bigram_step(state)[1]
  assert float(metrics["learning_rate"].compute()) == pytest.approx(0.02)
  assert float(metrics["learning_rate/current"].compute()) == pytest.approx(0.02)


def test_weight_metrics_see_gradients_and_both_states():
  def compute(gradients, old_state, new_state):
    return {"steps": (old_state.step, new_state.step), "size": gradients["table"].size}

  metrics = bigram_step(make_state(Bigram()), weight_metrics=compute)[1]
  assert [int(step) for step in metrics["steps"]] == [0, 1]
  assert metrics["size"] == 32 * 32


@pytest.mark.one_quick_variant
@pytest.mark.parametrize(("num_microbatches", "calls"), [(None, 1), (1, 1), (4, 4)])
def test_mutable_collections_pass_through_every_microbatch(num_microbatches, calls):
  state = make_state(Bigram(counts_calls=True))
  once, _ = bigram_step(state, num_microbatches=num_microbatches)
  twice, _ = bigram_step(once, num_microbatches=num_microbatches)
  assert int(once.flax_mutables["counters"]["calls"]) == calls
  assert int(twice.flax_mutables["counters"]["calls"]) == 2 * calls


@pytest.mark.slow
def test_evaluation_returns_the_metrics_without_dropout():
  model, state = make_model(Bigram()), make_state(Bigram())
  metrics = eval_step(state, BATCH, eval_fn=model.eval_fn)
  loss, _ = model.loss_fn(state.params, BATCH, None)
  assert float(metrics["loss"].compute()) == pytest.approx(float(loss))


GRADS = {"a": {"kernel": jnp.ones((2, 2)), "scale": jnp.ones(3)}, "b": jnp.ones(4)}


@pytest.mark.parametrize(
  ("loss", "bad", "name"),
  [
    (1.0, {}, None),
    (np.nan, {}, "loss"),
    (np.inf, {"b": np.nan}, "loss"),
    (1.0, {"b": -np.inf}, "gradients b"),
    (1.0, {"scale": np.nan, "b": np.nan}, "gradients a/scale"),
  ],
)
def test_first_nonfinite_tensor_is_named(loss, bad, name):
  def spoil(path, grad):
    key = path[-1].key
    return grad.at[(0,) * grad.ndim].set(bad[key]) if key in bad else grad

  grads = jax.tree_util.tree_map_with_path(spoil, GRADS)
  record = FirstNonFinite.of(jnp.int32(3), jnp.float32(loss), square_sums(grads))
  assert first_bad_name(record.bad, GRADS) == name
  assert bool(record.compute()) is (name is not None)


def test_merging_keeps_the_first_bad_step():
  def record(step, **bad):
    return FirstNonFinite.of(jnp.int32(step), jnp.float32(bad.get("loss", 0.0)), [jnp.ones(())])

  good, first, second = record(1), record(2, loss=np.nan), record(3, loss=np.inf)
  for order in ([good, first, second], [first, second]):
    assert int(functools.reduce(FirstNonFinite.merge, order).step) == 2
  assert not good.merge(record(5)).compute()


def test_large_finite_gradients_are_not_recorded():
  grads = GRADS | {"b": jnp.full(4, 1e18, jnp.bfloat16)}
  assert not FirstNonFinite.of(jnp.int32(0), jnp.float32(0), square_sums(grads)).compute()


def test_nan_parameter_is_recorded_as_a_nonfinite_loss():
  state = make_state(Bigram())
  spoiled = state.replace_params({"table": state.params["table"].at[5, 5].set(jnp.nan)})
  record = bigram_step(spoiled)[1]["first_nonfinite"]
  assert first_bad_name(record.bad, spoiled.params) == "loss"
  assert int(record.step) == 0
