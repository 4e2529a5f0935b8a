"""Attention masks."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from t5x.examples.t5.layers import (
  combine_biases,
  combine_masks,
  make_attention_mask,
  make_causal_mask,
  make_decoder_mask,
)

TOKENS = jnp.array([[7, 8, 9, 5, 0]])


def rows(mask):
  """Returns one text per query, with x for every key that it sees."""
  return ["".join("x" if seen else "." for seen in row) for row in np.asarray(mask)[0, 0]]


def test_a_decoder_position_sees_itself_and_earlier_positions_but_not_padding():
  assert rows(make_decoder_mask(TOKENS, bool)) == ["x....", "xx...", "xxx..", "xxxx.", "....."]


def test_a_row_without_a_batch_has_the_mask_of_a_batch_of_one():
  np.testing.assert_array_equal(
    make_decoder_mask(TOKENS[0], bool), make_decoder_mask(TOKENS, bool)[0]
  )


def test_packed_examples_do_not_see_each_other():
  segments = jnp.array([[1, 1, 2, 2, 0]])
  mask = make_decoder_mask(TOKENS, bool, decoder_segment_ids=segments)
  assert rows(mask) == ["x....", "xx...", "..x..", "..xx.", "....."]


def test_positions_of_a_prefix_all_see_each_other():
  prefix = jnp.array([[1, 1, 1, 0, 0]])
  mask = make_decoder_mask(TOKENS, bool, decoder_causal_attention=prefix)
  assert rows(mask) == ["xxx..", "xxx..", "xxx..", "xxxx.", "....."]


def test_masks_have_the_requested_type_and_dimensions():
  mask = make_attention_mask(TOKENS > 0, TOKENS[:, :3] > 0, extra_batch_dims=1, dtype=jnp.bfloat16)
  assert (mask.shape, mask.dtype) == ((1, 1, 1, 5, 3), jnp.bfloat16)
  causal = make_causal_mask(TOKENS, extra_batch_dims=2)
  assert (causal.shape, causal.dtype) == ((1, 1, 1, 1, 5, 5), jnp.float32)
  np.testing.assert_array_equal(causal[0, 0, 0, 0], np.tril(np.ones((5, 5))))


def test_masks_are_combined_by_and_and_biases_by_sum_ignoring_none():
  assert combine_masks(None, None) is None
  assert combine_biases(None, None) is None
  a, b = jnp.array([0.0, 2.0, 1.0]), jnp.array([1.0, 1.0, 0.0])
  np.testing.assert_array_equal(combine_masks(a, None, b), [0.0, 1.0, 0.0])
  np.testing.assert_array_equal(combine_biases(None, a, b), [1.0, 3.0, 1.0])
