"""Position information: T5's learned relative bias, and rotary embeddings."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.partitioning import param_with_axes
from jaxtyping import Array, Float, Int

from rosetta_t5.argument_types import check_one_of
from rosetta_t5.networks.layers.dense import Initializer
from rosetta_t5.networks.layers.embedding import default_embed_init


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
      ValueError: `decode` is set in `init`, with `bidirectional`, or with a cache for other lengths.
    """
    if decode and bidirectional:
      raise ValueError("bidirectional RelativePositionBiases are not supported when `decode=True`.")
    if decode and self.is_initializing():
      raise ValueError(
        "decode-mode cannot be enabled during init. use model.apply to initialize the decoding cache."
      )
    table_HN = bias_table(self.embedding_init, self.num_heads, self.num_buckets)
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


def bias_table(init: Initializer, num_heads: int, num_buckets: int) -> jax.Array:
  """Returns the table of relative biases, [H, N], a parameter of the calling module."""
  shape, axes = (num_heads, num_buckets), ("heads", "relpos_buckets")
  table: jax.Array = param_with_axes("rel_embedding", init, shape, jnp.float32, axes=axes)
  return table


def _bias(
  table_HN: jax.Array, dtype: Any, qlen: int, klen: int, bidirectional: bool, max_distance: int
) -> Float[Array, "1 H T S"]:
  """Returns each pair's column of the table (N buckets, R distances, P = T·S pairs)."""
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


class Rope(NamedTuple):
  """The frequencies of rotary position embeddings (Su et al. 2021, arXiv:2104.09864).

  Attributes:
    theta: the base of the frequencies; a larger one makes the slowest pair rotate more slowly.
    interleaved: whether features 2i and 2i + 1 form a pair (GPT-J, Cohere), rather than i and i + K/2
      (GPT-NeoX, Llama).
    scaling: how the frequencies of longer texts are derived from those of pretraining, as (name, value)
      pairs with Hugging Face's names; see `frequencies`.
  """

  theta: float = 10_000.0
  interleaved: bool = False
  scaling: tuple[tuple[str, Any], ...] = ()

  def frequencies(self, pairs: int) -> Float[Array, " P"]:
    """Returns the angle per position of each pair of features.

    `rope_type` "linear" divides all by `factor`. "llama3" (Llama 3.1) divides those whose wavelength
    is longer than `original_max_position_embeddings` / `low_freq_factor`, keeps those with one shorter
    than it / `high_freq_factor`, and interpolates between the two.
    """
    frequency_P = self.theta ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
    scaling: dict[str, Any] = dict(self.scaling)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    check_one_of("rope_scaling's rope_type", kind, ROPE_TYPES)
    if kind == "default":
      return frequency_P
    divided_P = frequency_P / scaling["factor"]
    if kind == "linear":
      return divided_P
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    rotations_P = scaling["original_max_position_embeddings"] * frequency_P / (2 * math.pi)
    kept_P = jnp.clip((rotations_P - low) / (high - low), 0.0, 1.0)
    return kept_P * frequency_P + (1 - kept_P) * divided_P


ROPE_TYPES = ("default", "linear", "llama3")


def apply_rotary(
  x_BTHK: Float[Array, "B T H K"],
  positions_BT: Int[Array, "#B T"],
  rope: Rope = Rope(),  # noqa: B008 - it is immutable
) -> Float[Array, "B T H K"]:
  """Returns queries or keys whose pairs of features are rotated by their position times a frequency.

  Angles are float32, because bfloat16 cannot represent position 257.

  Args:
    x_BTHK: queries or keys; K is even.
    positions_BT: the position of each.
    rope: the frequencies.
  """
  pairs = x_BTHK.shape[-1] // 2
  frequency_111P = rope.frequencies(pairs)[None, None, None]
  angle_BT1P = positions_BT[..., None, None].astype(jnp.float32) * frequency_111P
  cos, sin = jnp.cos(angle_BT1P), jnp.sin(angle_BT1P)
  x_BTHK32 = x_BTHK.astype(jnp.float32)
  if rope.interleaved:
    first, second = x_BTHK32[..., ::2], x_BTHK32[..., 1::2]
  else:
    first, second = x_BTHK32[..., :pairs], x_BTHK32[..., pairs:]
  rotated = first * cos - second * sin, second * cos + first * sin
  joined = jnp.stack(rotated, -1) if rope.interleaved else jnp.concatenate(rotated, -1)
  return joined.reshape(x_BTHK.shape).astype(x_BTHK.dtype)
