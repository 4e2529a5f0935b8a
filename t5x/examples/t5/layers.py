"""T5X's `examples.t5.layers`."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from rosetta_t5.kernels.attention import Visibility
from rosetta_t5.kernels.xla_attention import xla_attention
from rosetta_t5.networks.layers import attention, decoding_cache
from rosetta_t5.networks.layers.dense import DenseGeneral, MlpBlock
from rosetta_t5.networks.layers.dropout import attention_dropout_scale
from rosetta_t5.networks.layers.embedding import Embed, default_embed_init
from rosetta_t5.networks.layers.norms import LayerNorm
from rosetta_t5.networks.layers.positions import RelativePositionBiases


class MultiHeadDotProductAttention(attention.MultiHeadDotProductAttention):
  """T5's attention, with T5X's methods for the decoding cache; see `attention`."""

  def update_cache_prefill(
    self,
    key: jax.Array,
    value: jax.Array,
    cached_key: nn.Variable,
    cached_value: nn.Variable,
    cache_index: nn.Variable,
    prefill_lengths: jax.Array,
  ) -> tuple[jax.Array, ...]:
    """Returns (key, value, lengths, new cached_key, new cached_value, new cache_index).

    Args:
      key: [B, S, H, K], the keys of whole prompts.
      value: [B, S, H, K], their values.
      cached_key: the cache variable, [B, H, K, L].
      cached_value: the cache variable, [B, H, L, K].
      cache_index: the next position to write; from here on one for each example.
      prefill_lengths: [B], the number of positions to write; the rest of the cache is 0.
    """
    length = cached_value.value.shape[2]
    keys, values = decoding_cache.prompts_to_cache(key, value, length, prefill_lengths)
    return key, value, prefill_lengths, keys, values, prefill_lengths

  def update_cache_decode(
    self,
    key: jax.Array,
    value: jax.Array,
    cached_key: nn.Variable,
    cached_value: nn.Variable,
    cache_index: nn.Variable,
  ) -> tuple[jax.Array, ...]:
    """Returns (all keys, all values, index, new cached_key, new cached_value, new cache_index).

    Args:
      key: [B, 1, H, K], the key at the index.
      value: [B, 1, H, K], the value at the index.
      cached_key: the cache variable, [B, H, K, L].
      cached_value: the cache variable, [B, H, L, K].
      cache_index: the position to write: a scalar, or [B] after a prefill.
    """
    index = cache_index.value
    keys = decoding_cache.write_position(cached_key.value, key, index, axis=3)
    values = decoding_cache.write_position(cached_value.value, value, index, axis=2)
    return keys.transpose(0, 3, 1, 2), values.swapaxes(1, 2), index, keys, values, index + 1


def dot_product_attention(
  query: Float[Array, "B T H K"],
  key: Float[Array, "B S H K"],
  value: Float[Array, "B S H Kv"],
  bias: Float[Array, "#B #H #T #S"] | None = None,
  dropout_rng: Array | None = None,
  dropout_rate: float = 0.0,
  deterministic: bool = False,
  dtype: Any = jnp.float32,
  float32_logits: bool = False,
) -> Float[Array, "B T H Kv"]:
  """Returns the attention of queries, keys and values: the module's computation as a function.

  Args:
    query: queries, not scaled.
    key: keys.
    value: values.
    bias: added to the logits. It also carries masks, as −1e10 where a query must not see a key.
    dropout_rng: the random key for dropout of the weights, which is shared by all queries.
    dropout_rate: the dropout rate.
    deterministic: whether dropout is off.
    dtype: the type that the weights are rounded to. The result has the wider of this type and the
      values' type.
    float32_logits: whether logits and softmax are float32 whatever the type of the inputs.

  Raises:
    ValueError: dropout is on but there is no key for it.
  """
  value_scale_BHS = None
  if not deterministic and dropout_rate > 0.0:
    if dropout_rng is None:
      raise ValueError(
        f"dot_product_attention needs dropout_rng, as dropout_rate = {dropout_rate}: pass a random "
        "key, or deterministic=True"
      )
    shape = (key.shape[0], key.shape[2], key.shape[1])
    value_scale_BHS = attention_dropout_scale(dropout_rng, dropout_rate, shape, dtype)
  if bias is not None:
    pairs = (query.shape[2], query.shape[1], key.shape[1])
    bias = jnp.broadcast_to(bias, (bias.shape[0], *pairs))
  value = value.astype(jnp.promote_types(dtype, value.dtype))
  return xla_attention(query, key, value, bias, None, value_scale_BHS, float32_logits)


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
  decoder_target_tokens: Shaped[Array, "*B T"],
  dtype: Any,
  decoder_causal_attention: Shaped[Array, "B T"] | None = None,
  decoder_segment_ids: Shaped[Array, "B T"] | None = None,
) -> Shaped[Array, "*B 1 T T"]:
  """Returns the decoder's self-attention mask: causal, without padding, within a segment.

  Args:
    decoder_target_tokens: 0 is padding.
    dtype: the mask's type.
    decoder_causal_attention: 1 for positions of a prefix, which all see each other (prefix LM).
    decoder_segment_ids: the packed example that each position belongs to.
  """
  if decoder_target_tokens.ndim == 1:  # T5X accepts rows without a batch.
    return make_decoder_mask(decoder_target_tokens[None], dtype)[0]
  real, ids = decoder_target_tokens > 0, decoder_segment_ids
  prefix = decoder_causal_attention
  visible = Visibility.of_tokens(real, real, ids, ids, prefix_BT=prefix, causal=True)
  return visible.mask().astype(dtype)
