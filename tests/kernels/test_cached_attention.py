"""A decoding step's attention, with and without beams, compared with the reference."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from rosetta_t5.kernels.xla_attention import beam_attention, cached_attention, xla_attention

B, M, S, H, K = 2, 3, 7, 2, 4
RNG = np.random.default_rng(0)


def normal(*shape):
  return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def test_the_cache_layout_gives_the_results_of_the_reference():
  queries, keys, values = normal(B, M, H, K), normal(B, S, H, K), normal(B, S, H, K)
  bias, mask = normal(1, H, M, S), jnp.asarray(RNG.random((B, 1, M, S)) < 0.7)
  got = cached_attention(queries, keys.transpose(0, 2, 3, 1), values.swapaxes(1, 2), bias, mask)
  np.testing.assert_allclose(got, xla_attention(queries, keys, values, bias, mask), atol=1e-6)


def test_float32_logits_are_not_rounded_to_bfloat16():
  # bfloat16 rounds 257 to 256, but their softmax weights differ by a factor of e.
  query, keys = jnp.ones((1, 1, 1, 2)), jnp.asarray([[256.0, 256.0], [0.0, 1.0]])[None, None]
  half = [
    x.astype(jnp.bfloat16) for x in (query, keys, jnp.asarray([0.0, 1.0])[None, None, :, None])
  ]
  assert cached_attention(*half).item() == 0.5
  assert cached_attention(*half, float32_logits=True).item() == pytest.approx(0.731, abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("batch_of_bias", [1, B])
def test_a_beam_sees_the_past_of_its_parents_as_if_it_had_been_moved(batch_of_bias):
  queries, keys, values = normal(B, M, H, K), normal(B * M, H, K, S), normal(B * M, H, S, K)
  bias, mask = normal(batch_of_bias, H, M, S), jnp.asarray(RNG.random((B, 1, M, S)) < 0.7)
  writers = RNG.integers(0, M, (B, M, S))
  got = beam_attention(queries, keys, values, jnp.asarray(writers), bias, mask)
  keys_BMHKS, values_BMHSK = keys.reshape(B, M, H, K, S), values.reshape(B, M, H, S, K)
  for example in range(B):
    for beam in range(M):
      rows, positions = writers[example, beam], np.arange(S)
      # Separated advanced indices move the positions to the front.
      moved_keys = keys_BMHKS[example, rows, :, :, positions].transpose(1, 2, 0)
      moved_values = values_BMHSK[example, rows, :, positions].swapaxes(0, 1)
      alone = cached_attention(
        queries[example, beam][None, None],
        moved_keys[None],
        moved_values[None],
        bias[example % batch_of_bias, :, beam][None, :, None],
        mask[example, :, beam][None, :, None],
      )
      np.testing.assert_allclose(got[example, beam], alone[0, 0], atol=1e-6)


def test_in_bfloat16_beams_with_equal_pasts_attend_equally_whoever_wrote_them():
  query, key, value = normal(B, 1, H, K), normal(B, H, K, S), normal(B, H, S, K)
  queries = jnp.broadcast_to(query, (B, M, H, K)).astype(jnp.bfloat16)
  keys, values = (jnp.repeat(x, M, axis=0).astype(jnp.bfloat16) for x in (key, value))
  got = beam_attention(queries, keys, values, jnp.asarray(RNG.integers(0, M, (B, M, S))))
  assert got.dtype == jnp.bfloat16
  np.testing.assert_array_equal(got[:, 0], got[:, 1])
