"""The fused kernel, interpreted, compared with the XLA reference and its gradients in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from rosetta_t5.kernels.flash_attention import Segments, flash_attention
from rosetta_t5.kernels.xla_attention import xla_attention


def make_case(batch, queries, keys, size, bias, causal):
  """Returns operands, the gradient of the result, segments and the equivalent mask."""
  rng = np.random.default_rng(7)

  def segments(length):
    # Rows have two examples and padding; the first row has only one example.
    ids = np.sort(rng.integers(0, 3, (batch, length)))[:, ::-1]
    ids[0] = np.minimum(ids[0], 1)
    return np.ascontiguousarray(ids, np.int32)

  query_ids = segments(queries)
  key_ids = query_ids if queries == keys else segments(keys)
  heads = 2
  q, do = rng.normal(size=(2, batch, queries, heads, size))
  k, v = rng.normal(size=(2, batch, keys, heads, size))
  operands = [q, k, v]
  if bias:
    operands.append(rng.normal(size=(1, heads, queries, keys)))
  mask = (query_ids[:, None, :, None] == key_ids[:, None, None, :]) & (key_ids > 0)[:, None, None]
  if causal:
    mask &= np.arange(queries)[:, None] >= np.arange(keys)
  return operands, do, Segments(jnp.asarray(query_ids), jnp.asarray(key_ids)), mask


# Lengths within a tile, over several, and of whole tiles; a self-attention and a cross-attention.
CASES = {
  "short, bias": (3, 10, 10, 4, True, False),
  "long, causal, bias": (2, 70, 70, 16, True, True),
  "cross, no bias": (2, 20, 130, 8, False, False),
}


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_equal_the_reference(case):
  causal = CASES[case][-1]
  operands, do, segments, mask = make_case(*CASES[case])

  @jax.jit
  def reference(*operands):
    bias = operands[3] if len(operands) > 3 else None
    return xla_attention(*operands[:3], bias_1HTS=bias, mask_B1TS=jnp.asarray(mask))

  with jax.enable_x64(True):
    exact = [jnp.asarray(array) for array in operands]
    want, gradients = jax.vjp(reference, *exact)
    want_gradients = gradients(jnp.asarray(do))

  @jax.jit
  def fused(*operands):
    bias = operands[3] if len(operands) > 3 else None
    return flash_attention(*operands[:3], bias, segments, causal, True)

  got, gradients = jax.vjp(fused, *(jnp.asarray(array, jnp.float32) for array in operands))
  # In both, padding attends to all keys equally.
  assert not mask.any(-1).all()
  np.testing.assert_allclose(got, want, atol=5e-6)
  for mine, theirs in zip(gradients(jnp.asarray(do, jnp.float32)), want_gradients, strict=True):
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=2e-5)


def test_bfloat16_results_are_closer_to_float32_than_those_of_the_reference():
  operands, _, segments, mask = make_case(*CASES["short, bias"])
  q, k, v, bias = (jnp.asarray(array, jnp.bfloat16) for array in operands)
  exact = xla_attention(
    *(x.astype(jnp.float32) for x in (q, k, v, bias)), mask_B1TS=jnp.asarray(mask)
  )
  rounded = xla_attention(q, k, v, bias, jnp.asarray(mask))
  got = flash_attention(q, k, v, bias, segments, False, True)
  assert got.dtype == jnp.bfloat16
  errors = [np.abs(np.asarray(x, np.float64) - exact).max() for x in (got, rounded)]
  assert errors[0] <= errors[1] < 0.1


@pytest.mark.parametrize("with_bias", [True, False])
def test_it_lowers_to_triton_for_a_gpu(with_bias):
  def loss(q, k, v, bias, ids):
    bias = bias if with_bias else None
    out = flash_attention(q, k, v, bias, Segments(ids, ids), with_bias, False)
    return jnp.sum(out.astype(jnp.float32))

  heads = jax.ShapeDtypeStruct((4, 128, 2, 64), jnp.bfloat16)
  bias = jax.ShapeDtypeStruct((1, 2, 128, 128), jnp.bfloat16)
  ids = jax.ShapeDtypeStruct((4, 128), jnp.int32)
  step = jax.jit(jax.grad(loss, (0, 1, 2, 3) if with_bias else (0, 1, 2)))
  gpu = AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
  with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
    lowered = step.trace(heads, heads, heads, bias, ids).lower(lowering_platforms=("cuda",))
  assert lowered.as_text().count("xla.gpu.triton") == (4 if with_bias else 3)


def test_logits_are_never_stored():
  shape = jax.ShapeDtypeStruct((8, 256, 2, 16), jnp.float32)
  ids = jnp.ones((8, 256), jnp.int32)

  def results(kernel):
    jaxpr = jax.make_jaxpr(lambda q: jax.vjp(kernel, q, q, q)[1](q))(shape)
    return {v.aval.shape for eqn in jaxpr.eqns for v in eqn.outvars}

  fused = functools.partial(
    flash_attention, bias_1HTS=None, segments=Segments(ids, ids), causal=False, interpret=True
  )
  assert (8, 2, 256, 256) in results(xla_attention)
  assert (8, 2, 256, 256) not in results(fused)
