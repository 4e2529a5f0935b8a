"""The fused kernel, interpreted, compared with the XLA reference and its gradients in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rosetta_t5.kernels.attention import Visibility
from rosetta_t5.kernels.flash_attention import (
  FlashOptions,
  flash_attention,
  tile_range,
  visible_tiles,
)
from rosetta_t5.kernels.flash_kernels import Segments
from rosetta_t5.kernels.xla_attention import xla_attention


def make_case(batch, queries, keys, size, bias, causal, sort=True):
  """Returns operands, the gradient of the result, segments and the equivalent mask."""
  rng = np.random.default_rng(7)

  def segments(length):
    # Rows have two examples and padding; the first row has only one example.
    ids = rng.integers(0, 3, (batch, length))
    ids = np.sort(ids)[:, ::-1] if sort else ids
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
  "segments and padding in any order": (2, 70, 130, 8, True, False, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_equal_the_reference(case):
  causal = CASES[case][5]
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
    return flash_attention(*operands[:3], bias, segments, FlashOptions(causal))

  got, gradients = jax.vjp(fused, *(jnp.asarray(array, jnp.float32) for array in operands))
  # In both, padding attends to all keys equally.
  assert not mask.any(-1).all()
  np.testing.assert_allclose(got, want, atol=5e-6)
  for mine, theirs in zip(gradients(jnp.asarray(do, jnp.float32)), want_gradients, strict=True):
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.slow
def test_tiles_without_a_visible_pair_are_not_read():
  length = 128
  operands, do, _, _ = make_case(3, length, length, 8, True, True)
  first, last = slice(0, length // 2), slice(length // 2, length)
  # The first row is two examples, of which the second is NaN. The others are one example, whose last half
  # is hidden by causality, and padding.
  ids = np.ones((3, length), np.int32)
  ids[0, last], ids[2] = 2, 0
  for x in (*operands[:3], do):
    x[0, last] = np.nan
  operands[1][1, last] = operands[2][1, last] = np.nan

  def fused(*operands):
    return flash_attention(
      *operands,
      Segments(jnp.asarray(ids), jnp.asarray(ids)),
      FlashOptions(causal=True),
    )

  out, gradients = jax.vjp(jax.jit(fused), *(jnp.asarray(x, jnp.float32) for x in operands))
  dq, dk, dv, dbias = gradients(jnp.asarray(do, jnp.float32))
  assert np.isfinite(np.asarray(out[:2, first])).all()
  assert np.isnan(np.asarray(out[:2, last])).any(axis=(1, 2, 3)).all()
  assert np.isfinite(np.asarray(dq[:2, first])).all()
  assert np.isfinite([x[0, first] for x in (dk, dv)]).all()
  assert np.isfinite(np.asarray(dbias[..., first, first])).all()
  np.testing.assert_array_equal(dbias[..., first, last], 0)


def packed(*lengths):
  """Returns the segments of a row of examples with these lengths."""
  return jnp.asarray(np.repeat(np.arange(len(lengths)) + 1, lengths), jnp.int32)[None]


@pytest.mark.parametrize(
  ("row", "tiles", "causal_tiles"),
  [
    (packed(512), 64, 36),
    (packed(256, 256), 32, 20),
    (packed(128, 128, 128, 128), 16, 12),
    # An example that begins inside a tile shares that tile with the one before it.
    (packed(200, 312), 40, 24),
    (packed(100, 150, 130, 132), 28, 18),
    # Padding is not computed.
    (packed(256, 256) % 2, 16, 10),
  ],
)
def test_packed_rows_and_causality_leave_the_tiles_on_the_diagonal(row, tiles, causal_tiles):
  for causal, expected in ((False, tiles), (True, causal_tiles)):
    visible = visible_tiles(Segments(row, row), 64, 64, FlashOptions(causal))
    mask = (row[0, :, None] == row) & (row > 0)
    mask &= jnp.tri(512, dtype=bool) | (not causal)
    needed = mask.reshape(8, 64, 8, 64).any((1, 3))
    assert not (needed & ~visible[0]).any()
    first, end = tile_range(visible)
    assert jnp.sum(jnp.maximum(end - first, 0)) == jnp.sum(visible) == expected


@pytest.mark.slow
def test_bfloat16_results_are_closer_to_float32_than_those_of_the_reference():
  operands, _, segments, mask = make_case(*CASES["short, bias"])
  q, k, v, bias = (jnp.asarray(array, jnp.bfloat16) for array in operands)
  exact = xla_attention(
    *(x.astype(jnp.float32) for x in (q, k, v, bias)), mask_B1TS=jnp.asarray(mask)
  )
  rounded = xla_attention(q, k, v, bias, jnp.asarray(mask))
  got = flash_attention(q, k, v, bias, segments, FlashOptions())
  assert got.dtype == jnp.bfloat16
  errors = [np.abs(np.asarray(x, np.float64) - exact).max() for x in (got, rounded)]
  assert errors[0] <= errors[1] < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("with_bias", [True, False])
def test_it_lowers_to_triton_for_a_gpu(with_bias):
  options = FlashOptions(causal=with_bias, gpu="NVIDIA H100 80GB HBM3")

  def loss(q, k, v, bias, ids):
    bias = bias if with_bias else None
    out = flash_attention(q, k, v, bias, Segments(ids, ids), options)
    return jnp.sum(out.astype(jnp.float32))

  heads = jax.ShapeDtypeStruct((4, 128, 2, 64), jnp.bfloat16)
  bias = jax.ShapeDtypeStruct((1, 2, 128, 128), jnp.bfloat16)
  ids = jax.ShapeDtypeStruct((4, 128), jnp.int32)
  step = jax.jit(jax.grad(loss, (0, 1, 2, 3) if with_bias else (0, 1, 2)))
  lowered = step.trace(heads, heads, heads, bias, ids).lower(lowering_platforms=("cuda",))
  assert lowered.as_text().count("xla.gpu.triton") == (4 if with_bias else 3)


def test_logits_are_never_stored():
  shape = jax.ShapeDtypeStruct((8, 256, 2, 16), jnp.float32)
  ids = jnp.ones((8, 256), jnp.int32)

  def results(kernel):
    jaxpr = jax.make_jaxpr(lambda q: jax.vjp(kernel, q, q, q)[1](q))(shape)
    return {v.aval.shape for eqn in jaxpr.eqns for v in eqn.outvars}

  fused = functools.partial(
    flash_attention,
    bias_1HTS=None,
    segments=Segments(ids, ids),
    options=FlashOptions(),
  )
  assert (8, 2, 256, 256) in results(xla_attention)
  assert (8, 2, 256, 256) not in results(fused)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("kv_heads", "size", "options"),
  [
    (1, 16, FlashOptions(causal=True)),
    (2, 16, FlashOptions(window=(24, 9))),
    (4, 16, FlashOptions(causal=True, window=(70, 70), softcap=2.0)),
    (2, 256, FlashOptions(softcap=1.5)),
  ],
)
def test_grouped_queries_windows_and_soft_caps_equal_the_reference(kv_heads, size, options):
  rng = np.random.default_rng(3)
  batch, length, heads = 2, 150, 4
  q, do = (jnp.asarray(rng.normal(size=(batch, length, heads, size))) for _ in range(2))
  k, v = (jnp.asarray(rng.normal(size=(batch, length, kv_heads, size))) for _ in range(2))
  bias = jnp.asarray(rng.normal(size=(1, heads, length, length)))
  ids = jnp.asarray(np.repeat([[1] * 60 + [2] * 70 + [0] * 20], batch, axis=0), jnp.int32)
  visible = Visibility(ids, ids, causal=options.causal, window=options.window, packed=True)
  expected = functools.partial(xla_attention, mask_B1TS=visible.mask(), softcap=options.softcap)
  found = functools.partial(flash_attention, segments=Segments(ids, ids), options=options)
  results = []
  for attend in (expected, found):
    out, gradients = jax.vjp(lambda *x, run=attend: run(*x[:3], bias_1HTS=x[3]), q, k, v, bias)
    results.append([out, *gradients(do * (ids > 0)[..., None, None])])
  for want, got in zip(*results, strict=True):
    # How float32 sums of 256 products are rounded depends on the CPU.
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)


def test_tiles_outside_the_window_are_not_computed():
  row = packed(512)
  visible = visible_tiles(Segments(row, row), 64, 64, FlashOptions(causal=True, window=(64, 64)))
  # A query's window reaches into the tile before its own.
  assert jnp.sum(visible) == 8 + 7
