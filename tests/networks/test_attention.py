"""The attention module: scales, dropout and cache."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rosetta_t5.networks.layers.attention import MultiHeadDotProductAttention

B, T, D, H, K = 3, 6, 6, 2, 4
MODULE = MultiHeadDotProductAttention(num_heads=H, head_dim=K)
X = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, D)), jnp.float32)


@pytest.fixture(scope="module")
def params():
  return jax.jit(lambda key: MODULE.init(key, X, X))(jax.random.PRNGKey(0))["params"]


def test_only_the_initial_query_kernel_is_divided_by_the_root_of_the_head_size():
  wide = dataclasses.replace(MODULE, num_heads=64, head_dim=16)
  x = jnp.ones((1, 1, 256))
  kernels = jax.jit(lambda key: wide.init(key, x, x))(jax.random.PRNGKey(0))["params"]
  spread = {name: float(jnp.std(kernels[name]["kernel"])) for name in kernels}
  # fan_in is 256 for the first three and 1024 for `out`.
  expected = {"query": 1 / 16 / 4, "key": 1 / 16, "value": 1 / 16, "out": 1 / 32}
  assert spread == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
def test_scale_attn_logits_divides_the_logits_a_second_time(params):
  scaled = dataclasses.replace(MODULE, scale_attn_logits=True)
  smaller = params | {"query": {"kernel": params["query"]["kernel"] / np.sqrt(K)}}
  got = scaled.apply({"params": params}, X, X)
  np.testing.assert_allclose(got, MODULE.apply({"params": smaller}, X, X), atol=1e-6)
  assert not np.allclose(got, MODULE.apply({"params": params}, X, X), atol=1e-3)


def test_float32_logits_is_passed_to_the_kernel(params):
  half = dataclasses.replace(MODULE, dtype=jnp.bfloat16)
  exact = dataclasses.replace(half, float32_logits=True)
  steep = params | {"query": {"kernel": params["query"]["kernel"] * 40}}
  outputs = [module.apply({"params": steep}, X, X) for module in (half, exact)]
  assert {output.dtype for output in outputs} == {jnp.dtype(jnp.bfloat16)}
  assert np.any(np.asarray(outputs[0] != outputs[1]))


def weights_seen_through(module, key):
  """Returns the attention weights [B, T, S] of one head, after dropout, as the module's output."""
  one_hot = jnp.broadcast_to(jnp.eye(D)[None], (B, D, D))
  kernels = {"query": jnp.zeros((D, D)), "key": jnp.eye(D), "value": jnp.eye(D), "out": jnp.eye(D)}
  params = {name: {"kernel": kernel} for name, kernel in kernels.items()}
  return module.apply({"params": params}, X, one_hot, rngs={"dropout": key})


@pytest.mark.slow
def test_dropout_drops_the_same_keys_for_all_queries_but_different_ones_per_example():
  module = MultiHeadDotProductAttention(num_heads=1, head_dim=D, dropout_rate=0.5)
  weights = np.asarray(weights_seen_through(module, jax.random.PRNGKey(1)))
  np.testing.assert_array_equal(weights, np.broadcast_to(weights[:, :1], weights.shape))
  kept = weights[:, 0] > 0
  np.testing.assert_allclose(weights[:, 0], kept / D / 0.5, rtol=1e-6)
  assert len(np.unique(kept, axis=0)) > 1, "every example has its own dropped keys"
  assert 0 < kept.mean() < 1


def test_dropout_is_off_when_deterministic():
  module = MultiHeadDotProductAttention(num_heads=H, head_dim=K, dropout_rate=0.9)
  params = {"params": module.init(jax.random.PRNGKey(0), X, X, deterministic=True)["params"]}
  expected = MODULE.apply(params, X, X)
  np.testing.assert_array_equal(module.apply(params, X, X, deterministic=True), expected)


def test_decoding_steps_equal_the_full_sequence_with_bias_and_mask(params):
  bias = jnp.asarray(np.random.default_rng(1).normal(size=(1, H, T, T)), jnp.float32)
  causal = jnp.tril(jnp.ones((1, 1, T, T), bool))
  expected = MODULE.apply({"params": params}, X, X, causal.repeat(B, 0), bias)
  cache = MODULE.init(jax.random.PRNGKey(0), X, X, decode=True)["cache"]
  cache = jax.tree.map(jnp.zeros_like, cache)

  @jax.jit
  def step(cache, x_B1D):
    variables = {"params": params, "cache": cache}
    return MODULE.apply(variables, x_B1D, x_B1D, None, bias, decode=True, mutable=["cache"])

  for position in range(T):
    output, changed = step(cache, X[:, position : position + 1])
    cache = changed["cache"]
    np.testing.assert_allclose(output[:, 0], expected[:, position], atol=1e-5)
  assert int(cache["cache_index"]) == T


def test_decoding_refuses_more_than_one_position(params):
  cache = MODULE.init(jax.random.PRNGKey(0), X, X, decode=True)["cache"]
  with pytest.raises(ValueError, match="one position at a time, got 6"):
    MODULE.apply({"params": params, "cache": cache}, X, X, decode=True, mutable=["cache"])
