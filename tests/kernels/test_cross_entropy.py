"""The fused cross-entropy, compared with the gradient of the plain formula in float64."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rosetta_t5.kernels.cross_entropy import cross_entropy

RNG = np.random.default_rng(1)
LOGITS = RNG.normal(size=(2, 3, 11)) * 4
TARGETS = RNG.integers(0, 11, (2, 3))
GRAD_LOSS = RNG.normal(size=(2, 3))
GRAD_Z = RNG.normal(size=(2, 3))


def plain_loss(logits, z_loss, smoothing):
  """Loss and z-loss by the formula, in the type of `logits`."""
  vocab = logits.shape[-1]
  lse = jax.nn.logsumexp(logits, -1, keepdims=True)
  off = smoothing / (vocab - 1)
  soft = np.where(np.eye(vocab)[TARGETS] > 0, 1 - smoothing, off)
  entropy = -np.sum(soft * np.log(soft + (soft == 0)), -1)
  z_term = z_loss * lse[..., 0] ** 2
  return -jnp.sum(soft * (logits - lse), -1) - entropy + z_term, z_term


def gradients(loss_of, logits, z_loss, smoothing):
  """Gradients for logits and z_loss of a weighted sum of both results."""

  def total(logits, z_loss):
    loss, z_term = loss_of(logits, z_loss, smoothing)
    return jnp.sum(GRAD_LOSS * loss) + jnp.sum(GRAD_Z * z_term)

  return jax.grad(total, (0, 1))(logits, z_loss)


def fused_loss(logits, z_loss, smoothing):
  return cross_entropy(logits, jnp.asarray(TARGETS), z_loss, smoothing)


@pytest.mark.slow
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 0.05])
def test_loss_and_gradient_follow_the_formula(z_loss, smoothing):
  with jax.enable_x64(True):
    want = plain_loss(jnp.asarray(LOGITS), z_loss, smoothing)
    want_grad = gradients(plain_loss, jnp.asarray(LOGITS), z_loss, smoothing)
  logits = jnp.asarray(LOGITS, jnp.float32)
  got = jax.jit(fused_loss, static_argnums=2)(logits, z_loss, smoothing)
  got_grad = gradients(fused_loss, logits, z_loss, smoothing)
  for mine, theirs in zip((*got, *got_grad), (*want, *want_grad), strict=True):
    np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_logits_in_bfloat16_are_computed_in_float32():
  logits = jnp.asarray(LOGITS, jnp.bfloat16)
  loss, _ = fused_loss(logits, 0.05, 0.0)
  want, _ = plain_loss(logits.astype(jnp.float32), 0.05, 0.0)
  assert loss.dtype == jnp.float32
  np.testing.assert_allclose(loss, want, rtol=1e-6)
  grad = gradients(fused_loss, logits, 0.05, 0.0)[0]
  assert grad.dtype == jnp.bfloat16
  want = gradients(plain_loss, logits.astype(jnp.float32), 0.05, 0.0)[0]
  np.testing.assert_allclose(grad.astype(jnp.float32), want, rtol=1e-2, atol=1e-6)


def test_large_logits_do_not_overflow():
  logits = jnp.asarray(LOGITS, jnp.float32) + 1e4
  loss, _ = fused_loss(logits, 0.0, 0.0)
  np.testing.assert_allclose(loss, plain_loss(jnp.asarray(LOGITS), 0.0, 0.0)[0], atol=2e-2)


def test_the_backward_pass_allocates_one_array_of_the_logits_size():
  # Only the gradient has this size: there are no one-hot targets, no softmax and no copies.
  logits = jax.ShapeDtypeStruct((8, 16, 4096), jnp.float32)
  targets = jnp.zeros((8, 16), jnp.int32)

  def loss(logits):
    return jnp.sum(cross_entropy(logits, targets, 1e-4, 0.1)[0])

  memory = jax.jit(jax.grad(loss)).lower(logits).compile().memory_analysis()
  assert memory.temp_size_in_bytes < logits.size * 4 / 50


@pytest.mark.slow
def test_a_vocabulary_split_over_devices_is_never_gathered():
  mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  split = NamedSharding(mesh, P("data", None, "model"))
  logits = jax.device_put(RNG.normal(size=(4, 3, 64)).astype(np.float32), split)
  targets = jnp.asarray(RNG.integers(0, 64, (4, 3)))

  def total(logits):
    return jnp.sum(cross_entropy(logits, targets, 1e-2, 0.1)[0])

  step = jax.jit(jax.value_and_grad(total))
  text = step.lower(logits).compile().as_text()
  assert not re.findall(r"all-gather|all-to-all|collective-permute", text)
  value, grad = step(logits)
  want_value, want_grad = jax.value_and_grad(total)(jnp.asarray(jax.device_get(logits)))
  np.testing.assert_allclose(value, want_value, rtol=1e-5)
  np.testing.assert_allclose(grad, want_grad, rtol=1e-4, atol=1e-6)
  assert grad.sharding.is_equivalent_to(split, 3)
