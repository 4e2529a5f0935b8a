"""Attention masks: which query may attend to which key."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Shaped


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
  visible = make_causal_mask(decoder_target_tokens, dtype=bool)
  if decoder_causal_attention is not None:
    prefix = decoder_causal_attention != 0
    visible = visible | make_attention_mask(prefix, prefix, jnp.logical_and, dtype=bool)
  real = decoder_target_tokens > 0
  mask = visible & make_attention_mask(real, real, jnp.logical_and, dtype=bool)
  if decoder_segment_ids is not None:
    mask &= make_attention_mask(decoder_segment_ids, decoder_segment_ids, jnp.equal, dtype=bool)
  return mask.astype(dtype)
