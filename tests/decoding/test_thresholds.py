"""Binary search for thresholds, and the top-k and top-p masks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rosetta_t5.decoding.next_token import float32_bsearch, int32_bsearch, topk_mask, topp_mask

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
FLOAT_MAX = np.finfo(np.float32).max
RNG = np.random.default_rng(0)


def test_int32_search_finds_every_kind_of_threshold():
  wanted = jnp.array([INT_MIN, -(2**20) - 7, -1, 0, 1, 12345, INT_MAX - 1, INT_MAX], jnp.int32)
  found = jax.jit(lambda wanted: int32_bsearch(wanted.shape, lambda x: x > wanted))(wanted)
  np.testing.assert_array_equal(found, wanted)


def test_int32_search_gives_the_smallest_number_if_the_predicate_is_always_true():
  assert int32_bsearch((), lambda x: jnp.bool_(True)) == INT_MIN


def test_float32_search_finds_every_kind_of_threshold():
  wanted = jnp.array([-FLOAT_MAX, -1e30, -1.5, -1e-30, 0.0, 1e-30, 3.14, FLOAT_MAX], jnp.float32)
  found = float32_bsearch((2, 4), lambda x: x > wanted.reshape(2, 4))
  # Denormal numbers count as 0 in the search.
  np.testing.assert_allclose(found.reshape(-1), wanted, rtol=0, atol=1.2e-38)


@pytest.mark.parametrize("k", [1, 3, 10])
def test_topk_keeps_the_k_largest_of_each_row(k):
  x = jnp.asarray(RNG.normal(size=(2, 3, 10)), jnp.float32)
  masked = jax.jit(topk_mask)(x, k, -9.0)  # k may be traced
  for row, kept in zip(
    np.asarray(x).reshape(-1, 10), np.asarray(masked).reshape(-1, 10), strict=True
  ):
    want = np.where(row >= np.sort(row)[-k], row, -9.0)
    np.testing.assert_array_equal(kept, want)


def test_topk_keeps_ties_with_the_kth():
  np.testing.assert_array_equal(
    topk_mask(jnp.array([3.0, 1.0, 2.0, 2.0, -1.0]), 2, 0.0), [3.0, 0.0, 2.0, 2.0, 0.0]
  )


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 1.0])
def test_topp_keeps_the_smallest_set_that_reaches_p(p):
  logits = jnp.asarray(RNG.normal(size=(4, 12)) * 2, jnp.float32)
  masked = np.asarray(topp_mask(logits, p, -99.0))
  probs = np.asarray(jax.nn.softmax(logits))
  for row in range(4):
    order = np.argsort(-probs[row])
    count = int(np.searchsorted(np.cumsum(probs[row][order]), p - 1e-6)) + 1
    assert set(np.flatnonzero(masked[row] != -99.0)) == set(order[:count])
    np.testing.assert_array_equal(
      masked[row][order[:count]], np.asarray(logits)[row][order[:count]]
    )
