"""The chunked output layer and loss, compared with the plain formula in float64, and its memory."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rosetta_t5.kernels.cross_entropy import LogitFactors, chunked_cross_entropy, cross_entropy
from rosetta_t5.parallel.placement import use_placement

RNG = np.random.default_rng(5)
HIDDEN = RNG.normal(size=(3, 7, 5))
KERNEL = RNG.normal(size=(5, 11)) * 2
TARGETS = RNG.integers(0, 11, (3, 7))
GRAD_LOSS, GRAD_Z = RNG.normal(size=(2, 3, 7))


def plain(hidden, kernel, z_loss, smoothing):
  """Returns a weighted sum of loss and z-loss by the formula, in the type of its arguments."""
  logits = hidden @ kernel
  lse = jax.nn.logsumexp(logits, -1, keepdims=True)
  off = smoothing / 10
  soft = np.where(np.eye(11)[TARGETS] > 0, 1 - smoothing, off)
  entropy = -np.sum(soft * np.log(soft + (soft == 0)), -1)
  z_term = z_loss * lse[..., 0] ** 2
  loss = -jnp.sum(soft * (logits - lse), -1) - entropy + z_term
  return jnp.sum(GRAD_LOSS * loss) + jnp.sum(GRAD_Z * z_term)


def chunked(hidden, kernel, z_loss, smoothing, chunk):
  parts = chunked_cross_entropy(
    LogitFactors(hidden, kernel), jnp.asarray(TARGETS), z_loss, smoothing, chunk
  )
  grads = jnp.asarray(GRAD_LOSS, jnp.float32), jnp.asarray(GRAD_Z, jnp.float32)
  return jnp.sum(grads[0] * parts.loss_BT) + jnp.sum(grads[1] * parts.z_loss_BT)


# Chunks that divide the length of 7, that do not, and that are longer.
@pytest.mark.one_quick_variant
@pytest.mark.parametrize(("smoothing", "chunk"), [(0.0, 3), (0.1, 7), (0.1, 1), (0.0, 9)])
def test_loss_and_gradients_follow_the_formula(smoothing, chunk):
  with jax.enable_x64(True):
    arguments = jnp.asarray(HIDDEN), jnp.asarray(KERNEL), 0.05
    want = jax.jit(jax.value_and_grad(plain, (0, 1, 2)), static_argnums=3)(*arguments, smoothing)
  arguments = jnp.asarray(HIDDEN, jnp.float32), jnp.asarray(KERNEL, jnp.float32), 0.05
  got = jax.jit(jax.value_and_grad(chunked, (0, 1, 2)), static_argnums=(3, 4))(
    *arguments, smoothing, chunk
  )
  for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=1e-5)


def test_an_excluded_token_does_not_affect_loss_and_gradients():
  hidden, kernel = jnp.asarray(HIDDEN, jnp.float32), jnp.asarray(KERNEL, jnp.float32)
  targets = jnp.asarray(np.where(TARGETS == 4, 5, TARGETS))

  def in_chunks(hidden, kernel):
    factors = LogitFactors(hidden, kernel, jnp.arange(KERNEL.shape[-1]) == 4)
    return jnp.sum(chunked_cross_entropy(factors, targets, 0.05, 0.0, 3).loss_BT)

  def at_once(hidden, kernel):
    others = jnp.array([n for n in range(11) if n != 4])
    indices = jnp.where(targets > 4, targets - 1, targets)
    return jnp.sum(cross_entropy(hidden @ kernel[:, others], indices, 0.05, 0.0)[0])

  got, want = (jax.jit(jax.value_and_grad(f, (0, 1)))(hidden, kernel) for f in (in_chunks, at_once))
  for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_targets_with_the_highest_logit_are_correct():
  logits = HIDDEN @ KERNEL
  targets = np.where(RNG.random(TARGETS.shape) < 0.5, np.argmax(logits, -1), TARGETS)
  parts = chunked_cross_entropy(
    LogitFactors(jnp.asarray(HIDDEN), jnp.asarray(KERNEL)), jnp.asarray(targets), 0.0, 0.0, 2
  )
  np.testing.assert_array_equal(parts.correct_BT, np.argmax(logits, -1) == targets)
  assert 0 < np.sum(parts.correct_BT) < targets.size


def test_all_logits_never_exist_at_once():
  hidden = jax.ShapeDtypeStruct((8, 64, 32), jnp.bfloat16)
  kernel = jax.ShapeDtypeStruct((32, 4096), jnp.float32)
  targets = jnp.zeros((8, 64), jnp.int32)
  logits_bytes = 8 * 64 * 4096 * 4

  def temporary_bytes(loss):
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, kernel).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  def in_chunks(hidden, kernel):
    factors = LogitFactors(hidden, kernel)
    return jnp.sum(chunked_cross_entropy(factors, targets, 1e-4, 0.1, 4).loss_BT)

  def at_once(hidden, kernel):
    return jnp.sum(cross_entropy(hidden.astype(jnp.float32) @ kernel, targets, 1e-4, 0.1)[0])

  assert temporary_bytes(at_once) > logits_bytes
  assert temporary_bytes(in_chunks) < logits_bytes / 3


def test_a_batch_and_a_vocabulary_split_over_devices_are_never_gathered():
  mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  hidden = jnp.asarray(RNG.normal(size=(4, 6, 8)), jnp.float32)
  kernel = jnp.asarray(RNG.normal(size=(8, 64)), jnp.float32)
  targets = jnp.asarray(RNG.integers(0, 64, (4, 6)))

  def total(hidden, kernel):
    return jnp.sum(
      chunked_cross_entropy(LogitFactors(hidden, kernel), targets, 1e-2, 0.1, 2).loss_BT
    )

  step = jax.jit(jax.value_and_grad(total, (0, 1)))
  want = step(hidden, kernel)
  placed = [
    jax.device_put(array, NamedSharding(mesh, spec))
    for array, spec in ((hidden, P("data")), (kernel, P(None, "model")))
  ]
  text = step.lower(*placed).compile().as_text()
  assert not re.findall(r"all-gather|all-to-all|collective-permute", text)
  for mine, theirs in zip(jax.tree.leaves(step(*placed)), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_no_chunk_gathers_the_kernel_or_sums_its_gradient_over_devices():
  """Both happen once, before and after the loop, and the numbers are those of one device."""
  mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
  hidden = jnp.asarray(RNG.normal(size=(4, 6, 8)), jnp.float32)
  kernel = jnp.asarray(RNG.normal(size=(8, 64)), jnp.float32)
  targets = jnp.asarray(RNG.integers(0, 64, (4, 6)))

  def total(hidden, kernel):
    factors = LogitFactors(hidden, kernel)
    return jnp.sum(chunked_cross_entropy(factors, targets, 1e-2, 0.1, 2).loss_BT)

  want = jax.value_and_grad(total, (0, 1))(hidden, kernel)
  split = NamedSharding(mesh, P("fsdp"))
  with use_placement(mesh, [("batch", "fsdp"), ("embed", "fsdp")]):
    step = jax.jit(jax.value_and_grad(total, (0, 1)), out_shardings=(None, (split, split)))
    placed = [jax.device_put(array, split) for array in (hidden, kernel)]
    got, text = step(*placed), step.lower(*placed).compile().as_text()
  loops, entry = text.split("\nENTRY ")
  assert not re.findall(r"all-gather|all-reduce|reduce-scatter", loops)
  assert re.findall(r"all-gather", entry)
  for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
