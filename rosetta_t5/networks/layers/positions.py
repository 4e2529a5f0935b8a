"""Attention masks and position information: T5's learned relative bias, and rotary embeddings."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.partitioning import param_with_axes
from jaxtyping import Array, Bool, Float, Int, Shaped

from rosetta_t5.networks.layers.dense import Initializer
from rosetta_t5.networks.layers.embedding import default_embed_init

# XLA counts the elements of a matmul's dimension with 32 bits.
_MAX_PAIRS = 2**31 - 1


def relative_position_bucket(
  relative_position: np.ndarray, bidirectional: bool, num_buckets: int, max_distance: int
) -> np.ndarray:
  """Returns T5's bucket of each distance key − query: exact when close, logarithmic farther away.

  Half of a direction's buckets are for exact distances. The other half grow up to `max_distance`;
  larger distances share the last bucket (Raffel et al., 2020, section 2.1).

  Args:
    relative_position: integers, key position − query position.
    bidirectional: whether keys after the query have buckets of their own, rather than bucket 0.
    num_buckets: the total number of buckets.
    max_distance: the distance at which the last bucket begins.

  Raises:
    ValueError: there are too few buckets, or `max_distance` is so small that distances up to it are exact.
  """
  least = 4 if bidirectional else 2
  if num_buckets < least:
    raise ValueError(f"num_buckets must be at least {least}, got {num_buckets}")
  distance = -relative_position
  first = np.zeros_like(distance)
  if bidirectional:
    num_buckets //= 2
    first = np.where(distance < 0, num_buckets, 0)
    distance = np.abs(distance)
  else:
    distance = np.maximum(distance, 0)
  num_exact = num_buckets // 2
  if max_distance <= num_exact:
    raise ValueError(
      f"max_distance must be greater than {num_exact}, the number of exact distances, got {max_distance}"
    )
  # float32 and the small constant are T5's: they decide on which side of a boundary a power falls.
  beyond = np.log(distance.astype(np.float32) / num_exact + np.finfo(np.float32).eps)
  growth = beyond / np.log(max_distance / num_exact) * (num_buckets - num_exact)
  logarithmic = np.minimum(num_exact + growth.astype(np.int32), num_buckets - 1)
  return first + np.where(distance < num_exact, distance, logarithmic)


class RelativePositionBiases(nn.Module):
  """A learned bias for each head and each bucket of the distance between query and key.

  Attributes:
    num_buckets: the number of distance buckets, for both directions together.
    max_distance: this distance and larger ones share the last bucket.
    num_heads: the number of attention heads.
    dtype: the type of the returned bias.
    embedding_init: initializer of the table [num_heads, num_buckets].
  """

  num_buckets: int
  max_distance: int
  num_heads: int
  dtype: Any
  embedding_init: Initializer = default_embed_init

  @nn.compact
  def __call__(
    self, qlen: int, klen: int, bidirectional: bool = True, decode: bool = False
  ) -> Float[Array, "1 H T S"]:
    """Returns the bias of `qlen` queries and `klen` keys, which is the same for every example.

    Args:
      qlen: the number of queries.
      klen: the number of keys.
      bidirectional: whether keys after the query have buckets of their own.
      decode: whether the bias is kept in the collection `cache` and read from there in later calls.

    Raises:
      ValueError: there are more pairs than XLA can count, or `decode` is set in `init`, with
        `bidirectional`, or with a cache for other lengths.
    """
    if decode and bidirectional:
      raise ValueError(
        "bidirectional RelativePositionBiases are not supported when `decode=True`. Set "
        "bidirectional=False"
      )
    if decode and self.is_initializing():
      raise ValueError(
        "decode-mode cannot be enabled during init. use model.apply to initialize the decoding cache."
      )
    table_HN = param_with_axes(
      "rel_embedding",
      self.embedding_init,
      (self.num_heads, self.num_buckets),
      jnp.float32,
      axes=("heads", "relpos_buckets"),
    )
    arguments = (table_HN, self.dtype, qlen, klen, bidirectional, self.max_distance)
    if not decode:
      return _bias(*arguments)
    cached = self.variable("cache", "cached_bias", _bias, *arguments).value
    if cached.shape != (1, self.num_heads, qlen, klen):
      raise ValueError(
        "The cached relative position attention bias was expected to have shape "
        f"{(1, self.num_heads, qlen, klen)} but instead has the shape {cached.shape}."
      )
    return cached


def _bias(
  table_HN: jax.Array, dtype: Any, qlen: int, klen: int, bidirectional: bool, max_distance: int
) -> Float[Array, "1 H T S"]:
  """Returns each pair's column of the table (N buckets, R distances, P = T·S pairs)."""
  _check_lengths(qlen, klen)
  heads, num_buckets = table_HN.shape
  distance_R = np.arange(1 - qlen, klen)
  bucket_R = relative_position_bucket(distance_R, bidirectional, num_buckets, max_distance)
  # The smallest integer type that fits: at a length of 16,384 the pairs then take 0.3 GB.
  bucket_R = bucket_R.astype(np.min_scalar_type(-num_buckets))
  bucket_TS = np.lib.stride_tricks.sliding_window_view(bucket_R, klen)[::-1]
  # A matmul with one-hot columns gives T5X's numbers to the last bit. The gradient of a gather is a
  # scatter, and every other way to compute its sums rounds differently.
  one_hot_NP = jax.nn.one_hot(bucket_TS.reshape(-1), num_buckets, dtype=dtype, axis=0)
  bias_HP = jnp.dot(jnp.asarray(table_HN, dtype), one_hot_NP)
  return bias_HP.reshape(1, heads, qlen, klen)


def _check_lengths(qlen: int, klen: int) -> None:
  if qlen * klen > _MAX_PAIRS:
    raise ValueError(
      f"the relative position bias of {qlen:,} queries and {klen:,} keys has {qlen * klen:,} pairs, "
      f"but an array's dimension can have at most {_MAX_PAIRS:,} in XLA. Set TASK_FEATURE_LENGTHS to "
      f"at most {math.isqrt(_MAX_PAIRS):,} tokens (memory runs out long before that)"
    )


def apply_rotary(
  x_BTHK: Float[Array, "B T H K"], positions_BT: Int[Array, "#B T"], base: float = 10_000.0
) -> Float[Array, "B T H K"]:
  """Returns queries or keys with rotary position embeddings (Su et al. 2021, arXiv:2104.09864).

  Features i and i + K/2 form a pair, as in GPT-NeoX and Llama. The pair is rotated by the angle
  position · base^(−2i/K). Angles are float32, because bfloat16 cannot represent position 257.

  Args:
    x_BTHK: queries or keys; K is even.
    positions_BT: the position of each.
    base: the base of the frequencies; a larger one makes the slowest pair rotate more slowly.
  """
  half = x_BTHK.shape[-1] // 2
  frequency_P = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle_BT1P = positions_BT[..., None, None].astype(jnp.float32) * frequency_P[None, None, None]
  cos, sin = jnp.cos(angle_BT1P), jnp.sin(angle_BT1P)
  first, second = x_BTHK[..., :half].astype(jnp.float32), x_BTHK[..., half:].astype(jnp.float32)
  rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return rotated.astype(x_BTHK.dtype)


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
