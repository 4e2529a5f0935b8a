"""Attention masks: which query may attend to which key."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped


def make_attention_mask(
  query_input: Shaped[Array, "B T"],
  key_input: Shaped[Array, "B S"],
  pairwise_fn: Callable[[Array, Array], Array] = jnp.multiply,
  extra_batch_dims: int = 0,
  dtype: Any = jnp.float32,
) -> Shaped[Array, "... 1 T S"]:
  """Returns the mask whose entry for a query and a key is `pairwise_fn` of their inputs.

  Args:
    query_input: one value per query position, such as whether it is a token, or its segment id.
    key_input: one value per key position.
    pairwise_fn: called with [B, T, 1] and [B, 1, S]; nonzero lets the query see the key.
    extra_batch_dims: the number of leading dimensions of size 1 to add.
    dtype: the mask's type.
  """
  mask = pairwise_fn(query_input[..., :, None], key_input[..., None, :])
  mask = jnp.expand_dims(mask, (*range(extra_batch_dims), -3))
  return mask.astype(dtype)


def make_causal_mask(
  x: Shaped[Array, "B T"], extra_batch_dims: int = 0, dtype: Any = jnp.float32
) -> Shaped[Array, "... 1 T T"]:
  """Returns the mask with which a position sees itself and the positions before it."""
  positions = jnp.broadcast_to(jnp.arange(x.shape[-1], dtype=jnp.int32), x.shape)
  return make_attention_mask(positions, positions, jnp.greater_equal, extra_batch_dims, dtype)


def combine_masks(*masks: Array | None, dtype: Any = jnp.float32) -> Array | None:
  """Returns the mask that allows what every given mask allows; None if all are None."""
  given = [mask != 0 for mask in masks if mask is not None]
  return functools.reduce(jnp.logical_and, given).astype(dtype) if given else None


def combine_biases(*biases: Array | None) -> Array | None:
  """Returns the sum of the given biases; None if all are None."""
  given = [bias for bias in biases if bias is not None]
  return functools.reduce(operator.add, given) if given else None


def make_boolean_mask(
  real_queries: Bool[Array, "B T"],
  real_keys: Bool[Array, "B S"],
  query_segments: Shaped[Array, "B T"] | None = None,
  key_segments: Shaped[Array, "B S"] | None = None,
  causal: bool = False,
  prefix: Shaped[Array, "B T"] | None = None,
) -> Bool[Array, "B 1 T S"]:
  """Returns which query sees which key.

  Args:
    real_queries: which queries are not padding.
    real_keys: which keys are not padding.
    query_segments: the packed example that each query belongs to; None if rows are not packed.
    key_segments: the packed example that each key belongs to.
    causal: whether a query does not see the keys after it.
    prefix: nonzero for the positions of a causal mask that all see each other (prefix LM).
  """
  mask = make_attention_mask(real_queries, real_keys, jnp.logical_and, dtype=bool)
  if causal:
    visible = make_causal_mask(real_queries, dtype=bool)
    if prefix is not None:
      in_prefix = prefix != 0
      visible |= make_attention_mask(in_prefix, in_prefix, jnp.logical_and, dtype=bool)
    mask = visible & mask
  if query_segments is not None and key_segments is not None:
    mask &= make_attention_mask(query_segments, key_segments, jnp.equal, dtype=bool)
  return mask


def make_decoder_mask(
  decoder_target_tokens: Shaped[Array, "B T"],
  dtype: Any,
  decoder_causal_attention: Shaped[Array, "B T"] | None = None,
  decoder_segment_ids: Shaped[Array, "B T"] | None = None,
) -> Shaped[Array, "B 1 T T"]:
  """Returns the decoder's self-attention mask: causal, without padding, within a segment.

  Args:
    decoder_target_tokens: 0 is padding.
    dtype: the mask's type.
    decoder_causal_attention: 1 for positions of a prefix, which all see each other (prefix LM).
    decoder_segment_ids: the packed example that each position belongs to.
  """
  real, ids = decoder_target_tokens > 0, decoder_segment_ids
  mask = make_boolean_mask(real, real, ids, ids, causal=True, prefix=decoder_causal_attention)
  return mask.astype(dtype)
