"""Attention and its gradients, compared with float64 numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rosetta_t5.kernels.xla_attention import xla_attention

B, T, S, H, K = 2, 5, 7, 3, 4


def inputs(seed=0):
  """Returns float64 queries, keys, values, bias, mask (query 2 of example 1 sees no key), scale."""
  rng = np.random.default_rng(seed)
  mask = rng.random((B, 1, T, S)) < 0.6
  mask[..., 0] = True
  mask[1, :, 2] = False
  return {
    "q_BTHK": rng.normal(size=(B, T, H, K)),
    "k_BSGK": rng.normal(size=(B, S, H, K)),
    "v_BSGK": rng.normal(size=(B, S, H, K)),
    "bias_1HTS": rng.normal(size=(1, H, T, S)),
    "mask_B1TS": mask,
    "value_scale_BGS": (rng.random((B, H, S)) < 0.8) / 0.8,
  }


def reference(weight_of_output, q_BTHK, k_BSGK, v_BSGK, bias_1HTS, mask_B1TS, value_scale_BGS):
  """Returns the output and the gradients of its dot product with `weight_of_output`."""
  logits = np.einsum("bthk,bshk->bhts", q_BTHK, k_BSGK) + bias_1HTS
  logits = np.where(mask_B1TS, logits, -1e10)
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  scale = value_scale_BGS.transpose(0, 2, 1)[..., None]
  output = np.einsum("bhts,bshk->bthk", weights, v_BSGK * scale)
  by_value = np.einsum("bhts,bthk->bshk", weights, weight_of_output)
  by_weight = np.einsum("bthk,bshk->bhts", weight_of_output, v_BSGK * scale)
  by_logit = weights * (by_weight - (weights * by_weight).sum(-1, keepdims=True)) * mask_B1TS
  return output, {
    "q_BTHK": np.einsum("bhts,bshk->bthk", by_logit, k_BSGK),
    "k_BSGK": np.einsum("bhts,bthk->bshk", by_logit, q_BTHK),
    "v_BSGK": by_value * scale,
    "bias_1HTS": by_logit.sum(0, keepdims=True),
    "value_scale_BGS": (by_value * v_BSGK).sum(-1).transpose(0, 2, 1),
  }


def as_jax(arrays):
  return {
    n: jnp.asarray(a, jnp.bool if a.dtype == bool else jnp.float32) for n, a in arrays.items()
  }


# Values without an effect.
NEUTRAL = {
  "bias_1HTS": np.zeros((1, H, T, S)),
  "mask_B1TS": np.ones((B, 1, T, S), bool),
  "value_scale_BGS": np.ones((B, H, S)),
}


@pytest.mark.parametrize("omitted", [(), ("mask_B1TS", "value_scale_BGS"), tuple(NEUTRAL)])
def test_output_and_gradients_equal_float64(omitted):
  exact = inputs() | {name: NEUTRAL[name] for name in omitted}
  given = as_jax({name: a for name, a in exact.items() if name not in omitted})
  weight = np.random.default_rng(1).normal(size=(B, T, H, K))
  floats = {name: a for name, a in given.items() if name != "mask_B1TS"}
  mask = {name: a for name, a in given.items() if name == "mask_B1TS"}

  @jax.jit
  def run(floats, weight):
    output, pull_back = jax.vjp(lambda f: xla_attention(**f, **mask), floats)
    return output, pull_back(weight)[0]

  output, grads = run(floats, jnp.asarray(weight, jnp.float32))
  expected, expected_grads = reference(weight, **exact)
  np.testing.assert_allclose(output, expected, atol=2e-6)
  for name, grad in grads.items():
    np.testing.assert_allclose(grad, expected_grads[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
  "shape", [(1, 1, T, S), (B, 1, T, S), (1, H, 1, S), (B, 1, 1, S), (1, 1, 1, S), (B, H, T, S)]
)
def test_the_gradient_of_a_bias_has_its_shape(shape):
  arrays = as_jax(inputs())
  bias = jnp.asarray(np.random.default_rng(2).normal(size=shape), jnp.float32)

  def loss(bias):
    return jnp.sum(jnp.square(xla_attention(**arrays | {"bias_1HTS": bias})))

  whole = jax.grad(loss)(jnp.broadcast_to(bias, (B, H, T, S)))
  shared = [axis for axis, size in enumerate(shape) if size == 1]
  np.testing.assert_allclose(jax.grad(loss)(bias), whole.sum(shared, keepdims=True), atol=2e-5)


def test_a_query_that_sees_no_key_gets_the_mean_of_all_values():
  arrays = inputs()
  arrays.pop("value_scale_BGS")
  output = xla_attention(**as_jax(arrays))
  np.testing.assert_allclose(output[1, 2], arrays["v_BSGK"][1].mean(0), atol=1e-6)


def test_masked_keys_have_no_influence():
  arrays = inputs()
  arrays["mask_B1TS"][..., 3:] = False
  arrays["mask_B1TS"][..., 0] = True
  before = xla_attention(**as_jax(arrays))
  arrays["k_BSGK"][:, 3:], arrays["v_BSGK"][:, 3:] = 1e3, 1e6
  np.testing.assert_array_equal(xla_attention(**as_jax(arrays)), before)


def test_dropping_values_equals_dropping_weights_for_all_queries():
  arrays = as_jax(inputs())
  scale_BHS = arrays.pop("value_scale_BGS")
  got = xla_attention(**arrays, value_scale_BGS=scale_BHS)
  # Values that are one-hot over the keys show each query's weights.
  one_hot = jnp.broadcast_to(jnp.eye(S)[None, :, None], (B, S, H, S))
  weights_BTHS = xla_attention(**(arrays | {"v_BSGK": one_hot}))
  dropped = weights_BTHS * scale_BHS[:, None]
  np.testing.assert_allclose(
    got, jnp.einsum("bths,bshk->bthk", dropped, arrays["v_BSGK"]), atol=1e-6
  )


def test_float32_logits_reduce_the_error_of_bfloat16():
  exact = {name: inputs()[name] for name in ("q_BTHK", "k_BSGK", "v_BSGK")}
  exact["q_BTHK"] = exact["q_BTHK"] * 8
  halves = {name: jnp.asarray(a, jnp.bfloat16) for name, a in exact.items()}
  expected = xla_attention(**{name: a.astype(jnp.float32) for name, a in halves.items()})

  def error(float32_logits):
    output = xla_attention(**halves, float32_logits=float32_logits)
    assert output.dtype == jnp.bfloat16
    return float(jnp.max(jnp.abs(output.astype(jnp.float32) - expected)))

  # The remaining error is the rounding of weights and output to bfloat16, 8 bits.
  assert error(True) < 0.02 < 2 * error(True) < error(False)
