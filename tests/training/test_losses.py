"""Weighted cross-entropy and its normalizing factors compared with their definitions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from rosetta_t5.training import losses
from rosetta_t5.training.losses import SpecialLossNormalizingFactor as Special

RNG = np.random.default_rng(0)
LOGITS = jnp.asarray(RNG.normal(size=(3, 5, 7)) * 3, jnp.float32)
TARGETS = jnp.asarray(RNG.integers(0, 7, (3, 5)), jnp.int32)
WEIGHTS = jnp.asarray(RNG.integers(0, 2, (3, 5)), jnp.float32)


def plain(logits, targets, z_loss=0.0, smoothing=0.0):
  """Loss and z-loss of each token in float64, from one-hot targets."""
  logits, targets = np.asarray(logits, np.float64), np.asarray(targets)
  vocab = logits.shape[-1]
  lse = np.log(np.exp(logits).sum(-1, keepdims=True))
  off = smoothing / (vocab - 1)
  soft = np.where(np.eye(vocab)[targets] > 0, 1 - smoothing, off)
  entropy = -(soft * np.log(soft + (soft == 0))).sum(-1)
  z_term = z_loss * lse[..., 0] ** 2
  return -(soft * (logits - lse)).sum(-1) - entropy + z_term, z_term


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_weighted_sums_follow_the_definition(smoothing, z_loss):
  loss, z_term, weight_sum = losses.compute_weighted_cross_entropy(
    LOGITS, TARGETS, WEIGHTS, smoothing, z_loss, loss_normalizing_factor=11.0
  )
  want_loss, want_z = plain(LOGITS, TARGETS, z_loss, smoothing)
  np.testing.assert_allclose(loss, (want_loss * WEIGHTS).sum() / 11, rtol=1e-5)
  np.testing.assert_allclose(z_term, (want_z * WEIGHTS).sum() / 11, rtol=1e-5)
  assert weight_sum == WEIGHTS.sum()


def test_default_weight_of_every_token_is_one():
  loss, _, weight_sum = losses.compute_weighted_cross_entropy(LOGITS, TARGETS)
  np.testing.assert_allclose(loss, plain(LOGITS, TARGETS)[0].sum(), rtol=1e-5)
  assert weight_sum == TARGETS.size


def test_perfect_prediction_of_smoothed_targets_has_zero_loss():
  soft = np.full((1, 1, 7), 0.1 / 6, np.float32)
  soft[0, 0, 2] = 0.9
  loss, _, _ = losses.compute_weighted_cross_entropy(
    jnp.log(soft), jnp.array([[2]]), label_smoothing=0.1
  )
  np.testing.assert_allclose(loss, 0.0, atol=1e-6)


@pytest.mark.slow
def test_soft_targets_agree_with_integer_targets():
  soft = jnp.eye(7)[TARGETS]
  loss, z_term = losses.cross_entropy_with_logits(LOGITS, soft, 1e-2)
  want_loss, want_z = plain(LOGITS, TARGETS, 1e-2)
  np.testing.assert_allclose(loss, want_loss, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(z_term, want_z, rtol=1e-5)


def test_gradient_for_soft_targets_follows_the_formula():
  soft = jax.nn.softmax(RNG.normal(size=LOGITS.shape).astype(np.float32))

  def formula(logits, targets, z_loss):
    lse = jax.nn.logsumexp(logits, -1, keepdims=True)
    z_term = z_loss * lse[..., 0] ** 2
    return -(targets * (logits - lse)).sum(-1) + z_term, z_term

  def total(function):
    # The second result has a gradient of its own.
    return lambda *args: (WEIGHTS * (function(*args)[0] + 0.3 * function(*args)[1])).sum()

  got = jax.jit(jax.grad(total(losses.cross_entropy_with_logits), (0, 1, 2)))(LOGITS, soft, 0.01)
  want = jax.jit(jax.grad(total(formula), (0, 1, 2)))(LOGITS, soft, 0.01)
  jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5), got, want)


def test_error_names_the_shapes_that_do_not_match(monkeypatch):
  # What a user sees: shapes are checked at every call only in tests.
  monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
  with pytest.raises(ValueError, match=r"targets must have shape \(3, 5\), got \(3, 4\)"):
    losses.compute_weighted_cross_entropy(LOGITS, TARGETS[:, :4])


BATCH = {"decoder_target_tokens": jnp.array([[3, 4, 5, 0], [6, 0, 0, 0]])}
PACKED = {
  "decoder_target_tokens": jnp.array([[3, 4, 5, 6, 0, 0], [7, 8, 9, 3, 4, 5]]),
  "decoder_segment_ids": jnp.array([[1, 1, 1, 2, 0, 0], [1, 2, 2, 2, 2, 3]]),
  "decoder_positions": jnp.array([[0, 1, 2, 0, 0, 0], [0, 0, 1, 2, 3, 0]]),
}


@pytest.mark.parametrize("factor", [None, 7, 2.5])
def test_number_is_returned_with_the_weights_of_the_batch(factor):
  weights = jnp.ones((2, 4))
  assert losses.get_loss_normalizing_factor_and_weights(factor, BATCH) == (factor, None)
  batch = BATCH | {"decoder_loss_weights": weights}
  assert losses.get_loss_normalizing_factor_and_weights(factor, batch) == (factor, weights)


@pytest.mark.parametrize("given", [Special.NUM_REAL_TARGET_TOKENS, "num_real_target_tokens"])
def test_real_tokens_exclude_padding(given):
  factor, weights = losses.get_loss_normalizing_factor_and_weights(given, BATCH)
  assert factor == 4
  np.testing.assert_array_equal(weights, [[1, 1, 1, 0], [1, 0, 0, 0]])


def test_weights_of_the_batch_count_as_real_tokens():
  batch = BATCH | {"decoder_loss_weights": jnp.array([[0.5, 0, 0, 0], [1, 1, 0, 0]])}
  factor, _ = losses.get_loss_normalizing_factor_and_weights("NUM_REAL_TARGET_TOKENS", batch)
  assert factor == 2.5


def test_total_tokens_include_padding():
  factor, weights = losses.get_loss_normalizing_factor_and_weights("NUM_TOTAL_TARGET_TOKENS", BATCH)
  assert factor == 8
  np.testing.assert_array_equal(weights, [[1, 1, 1, 0], [1, 0, 0, 0]])


def test_average_per_sequence_gives_sequences_the_same_weight():
  factor, weights = losses.get_loss_normalizing_factor_and_weights("AVERAGE_PER_SEQUENCE", BATCH)
  np.testing.assert_allclose(weights, [[1 / 3, 1 / 3, 1 / 3, 0], [1, 0, 0, 0]])
  np.testing.assert_allclose(factor, 2)


def test_average_per_sequence_counts_packed_sequences_separately():
  factor, weights = losses.get_loss_normalizing_factor_and_weights("AVERAGE_PER_SEQUENCE", PACKED)
  want = [[1 / 3, 1 / 3, 1 / 3, 1, 0, 0], [1, 1 / 4, 1 / 4, 1 / 4, 1 / 4, 1]]
  np.testing.assert_allclose(weights, want)
  np.testing.assert_allclose(factor, 5)


def test_average_per_sequence_ignores_sequences_without_weight():
  masked = jnp.array([[0, 0, 0, 1.0, 1, 1], [2, 1, 1, 1, 1, 1]])
  factor, weights = losses.get_loss_normalizing_factor_and_weights(
    "AVERAGE_PER_SEQUENCE", PACKED | {"decoder_loss_weights": masked}
  )
  want = [[0, 0, 0, 1, 0, 0], [1, 1 / 4, 1 / 4, 1 / 4, 1 / 4, 1]]
  np.testing.assert_allclose(weights, want)
  np.testing.assert_allclose(factor, 4)


def test_error_names_the_unknown_factor_and_a_similar_one():
  with pytest.raises(ValueError, match=r"'NUM_REAL_TOKENS'.*did you mean 'NUM_REAL_TARGET_TOKENS'"):
    losses.get_loss_normalizing_factor_and_weights("NUM_REAL_TOKENS", BATCH)


@pytest.mark.parametrize("factor", ["NUM_REAL_TARGET_TOKENS", "AVERAGE_PER_SEQUENCE"])
def test_a_factor_that_multiplies_the_loss_by_the_microbatches_is_reported(factor):
  name = losses.convert_special_loss_normalizing_factor_to_enum(factor)
  (text,) = losses.microbatch_warning(name, 4)
  assert "4 microbatches multiply loss and gradients by 4. 'MEAN_PER_" in text
  assert losses.microbatch_warning(name, 1) == losses.microbatch_warning(512.0, 4) == []
  assert losses.microbatch_warning(Special.MEAN_PER_TOKEN, 4) == []
