"""The decoding cache: its layout, prompts of different lengths, the table of writing beams."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import T5_1_1, make_batch, make_model, params_of

from rosetta_t5.networks.layers import decoding_cache
from rosetta_t5.networks.transformer import Transformer
from t5x.examples.t5.layers import MultiHeadDotProductAttention

RNG = np.random.default_rng(0)
KEYS = jnp.asarray(RNG.normal(size=(2, 5, 3, 4)), jnp.float32)


def variable(value):
  return types.SimpleNamespace(value=value)


def test_prefill_writes_each_prompt_and_zeros_after_it():
  empty = jnp.zeros((2, 3, 4, 7)), jnp.zeros((2, 3, 7, 4))
  lengths = jnp.array([2, 5])
  key, value, filled, keys, values, index = MultiHeadDotProductAttention(
    num_heads=3, head_dim=4
  ).update_cache_prefill(KEYS, 2 * KEYS, *map(variable, (*empty, jnp.int32(0))), lengths)
  assert keys.shape == (2, 3, 4, 7)
  assert values.shape == (2, 3, 7, 4)
  for row, length in enumerate((2, 5)):
    kept = np.asarray(KEYS[row, :length])
    np.testing.assert_array_equal(keys[row, ..., :length], kept.transpose(1, 2, 0))
    np.testing.assert_array_equal(values[row, :, :length], 2 * kept.swapaxes(0, 1))
    assert not np.any(keys[row, ..., length:])
    assert not np.any(values[row, :, length:])
  np.testing.assert_array_equal(index, lengths)
  np.testing.assert_array_equal(filled, lengths)
  np.testing.assert_array_equal(key, KEYS)
  np.testing.assert_array_equal(value, 2 * KEYS)


@pytest.mark.parametrize("index", [3, (1, 4), (4, 5)])
def test_a_step_writes_one_position_unless_the_sequence_is_full(index):
  new = jnp.ones((2, 1, 3, 4))
  old = decoding_cache.keys_to_cache_layout(KEYS), decoding_cache.values_to_cache_layout(KEYS)
  variables = map(variable, (*old, jnp.asarray(index)))
  keys, values, position, stored_keys, stored_values, following = MultiHeadDotProductAttention(
    num_heads=3, head_dim=4
  ).update_cache_decode(new, new, *variables)
  expected = np.array(KEYS)
  for row, at in enumerate(np.broadcast_to(index, 2)):
    if at < 5:
      expected[row, at] = 1.0
  np.testing.assert_array_equal(keys, expected)
  np.testing.assert_array_equal(values, expected)
  np.testing.assert_array_equal(stored_keys, expected.transpose(0, 2, 3, 1))
  np.testing.assert_array_equal(stored_values, expected.transpose(0, 2, 1, 3))
  np.testing.assert_array_equal(position, index)
  np.testing.assert_array_equal(following, np.asarray(index) + 1)


@pytest.mark.parametrize("heads", [1, 2])
def test_bias_and_mask_of_beams_are_grouped_by_example(heads):
  of_each = RNG.normal(size=(6, heads, 1, 5))
  by_example = decoding_cache.group_by_example(jnp.asarray(of_each), 2, 3)
  for row in range(6):
    np.testing.assert_allclose(by_example[row // 3, :, row % 3], of_each[row, :, 0], rtol=1e-6)
  of_all = decoding_cache.group_by_example(jnp.asarray(of_each[:1]), 2, 3)
  np.testing.assert_allclose(of_all, np.repeat(of_each[:1], 3, axis=2), rtol=1e-6)


@pytest.mark.parametrize("index", [2, (2, 2, 4, 4)])
def test_each_beam_is_recorded_for_the_position_that_it_writes(index):
  before = jnp.full((2, 2, 5), 7)
  after = np.asarray(decoding_cache.record_writing_beam(before, jnp.asarray(index)))
  for example, at in enumerate(np.broadcast_to(index, 4)[::2]):
    np.testing.assert_array_equal(after[example, :, at], [0, 1])
    assert np.all(np.delete(after[example], at, axis=1) == 7)


def test_without_beams_no_writing_beam_is_recorded():
  writers = jnp.zeros((2, 5), jnp.int32)
  assert decoding_cache.record_writing_beam(writers, jnp.int32(3)) is writers


def test_decoding_steps_read_the_stored_relative_bias():
  length = 64
  batch = {name: jnp.ones((1, 4), jnp.int32) for name in make_batch(1)}
  batch["decoder_input_tokens"] = jnp.ones((1, length), jnp.int32)
  traced = jax.jit(make_model(Transformer(T5_1_1)).predict_batch).trace(params_of(T5_1_1), batch)
  (loop,) = (eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "while")
  bias = (1, T5_1_1.num_heads, length, length)
  assert any(each.aval.shape == bias for each in loop.invars)
