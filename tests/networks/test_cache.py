"""What decoding keeps: T5X's layout, prompts of different lengths, beams that share keys."""

from __future__ import annotations

import types

import jax.numpy as jnp
import numpy as np
import pytest

from rosetta_t5.networks import cache
from rosetta_t5.networks.attention import MultiHeadDotProductAttention

RNG = np.random.default_rng(0)
KEYS = jnp.asarray(RNG.normal(size=(2, 5, 3, 4)), jnp.float32)


def variable(value):
  return types.SimpleNamespace(value=value)


def test_prefill_keeps_each_prompt_s_own_positions_and_zeros_after_them():
  empty = cache.empty(jnp.zeros((2, 7, 3, 4)))
  lengths = jnp.array([2, 5])
  key, value, filled, keys, values, index = MultiHeadDotProductAttention(
    num_heads=3, head_dim=4
  ).update_cache_prefill(KEYS, 2 * KEYS, *map(variable, (empty, empty, jnp.int32(0))), lengths)
  assert keys.shape == (2, 3, 4, 7)
  for row, length in enumerate((2, 5)):
    kept = np.asarray(KEYS[row, :length]).transpose(1, 2, 0)
    np.testing.assert_array_equal(keys[row, ..., :length], kept)
    np.testing.assert_array_equal(values[row, ..., :length], 2 * kept)
    assert not np.any(keys[row, ..., length:])
  np.testing.assert_array_equal(index, lengths)
  np.testing.assert_array_equal(filled, lengths)
  np.testing.assert_array_equal(key, KEYS)
  np.testing.assert_array_equal(value, 2 * KEYS)


@pytest.mark.parametrize("index", [3, (1, 4), (4, 5)])
def test_step_writes_one_position_and_a_full_sequence_none(index):
  old = cache.by_length(KEYS)
  new = jnp.ones((2, 1, 3, 4))
  variables = map(variable, (old, old, jnp.asarray(index)))
  keys, _, position, stored, _, following = MultiHeadDotProductAttention(
    num_heads=3, head_dim=4
  ).update_cache_decode(new, new, *variables)
  expected = np.array(KEYS)
  for row, at in enumerate(np.broadcast_to(index, 2)):
    if at < 5:
      expected[row, at] = 1.0
  np.testing.assert_array_equal(keys, expected)
  np.testing.assert_array_equal(stored, expected.transpose(0, 2, 3, 1))
  np.testing.assert_array_equal(position, index)
  np.testing.assert_array_equal(following, np.asarray(index) + 1)


def test_beams_of_one_example_become_its_positions():
  queries = jnp.asarray(RNG.normal(size=(6, 1, 3, 4)), jnp.float32)
  mask = jnp.arange(6 * 5).reshape(6, 1, 1, 5)
  joined, joined_mask = cache.beams_as_positions(queries, mask, 2)
  for row in range(6):
    np.testing.assert_array_equal(joined[row // 3, row % 3], queries[row, 0])
    np.testing.assert_array_equal(joined_mask[row // 3, 0, row % 3], mask[row, 0, 0])
