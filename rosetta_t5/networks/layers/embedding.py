"""Token embedding, relative position bias, T5's layer norm."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.partitioning import param_with_axes
from jaxtyping import Array, Float, Int

from rosetta_t5.networks.layers.dense import Initializer, product_of_few_rows
from rosetta_t5.parallel.sharding_constraints import with_sharding_constraint

default_embed_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)


class Embed(nn.Module):
  """A table of token vectors, [num_embeddings, features] in float32.

  Attributes:
    num_embeddings: rows; the vocabulary's size, padded as the model has it.
    features: the width of a row.
    cast_input_dtype: what to cast the ids to first, if anything.
    dtype: what the vectors are returned in.
    attend_dtype: what `attend` computes in; None for `dtype`.
    embedding_init: initialiser of the table.
    one_hot: kept for T5X's callers. T5X multiplies by one-hot rows; the gather here gives the same
      numbers, and skips a quarter of a small model's step.
  """

  num_embeddings: int
  features: int
  cast_input_dtype: Any = None
  dtype: Any = jnp.float32
  attend_dtype: Any = None
  embedding_init: Initializer = default_embed_init
  one_hot: bool = False

  def setup(self) -> None:
    """Creates the table."""
    self.embedding = param_with_axes(
      "embedding",
      self.embedding_init,
      (self.num_embeddings, self.features),
      jnp.float32,
      axes=("vocab", "embed"),
    )

  def __call__(self, inputs: Int[Array, "..."]) -> Float[Array, "..."]:
    """Returns the vectors of the ids, [..., features]; an id outside the table gets zeros.

    Raises:
      ValueError: the ids are not integers.
    """
    if self.cast_input_dtype:
      inputs = inputs.astype(self.cast_input_dtype)
    if not jnp.issubdtype(inputs.dtype, jnp.integer):
      raise ValueError(f"token ids must be integers, but are {inputs.dtype}")
    # Cast after the gather: casting the table first would round its gradient, summed in dtype.
    # Ids outside the table count as a one-hot row of zeros, which is what T5X makes of them.
    # Parameters split by `embed` come together first: a token's vector is needed where the token is.
    table = with_sharding_constraint(self.embedding, ("vocab", None))
    rows = table.at[inputs]
    vectors = rows.get(mode="fill", fill_value=0, wrap_negative_indices=False).astype(self.dtype)
    # Positions are split afterwards: each device looks up what its part of the vocabulary has of all of
    # them, and the sums are scattered. Split at once, XLA would send the whole table around instead.
    vectors = with_sharding_constraint(vectors, ("batch", None, "embed"))
    return with_sharding_constraint(vectors, ("batch", "length", "embed"))

  def attend(self, query: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """Returns the products of `query` with every row: logits tied to the embedding."""
    dtype = self.attend_dtype or self.dtype
    table_VD = jnp.asarray(self.embedding, dtype)
    is_step = query.ndim > 1 and query.shape[-2] == 1  # of a decode
    if is_step and jax.default_backend() == "cpu":
      return product_of_few_rows(query, table_VD)
    return jnp.dot(query, table_VD.T)


# XLA's products count with 32 bits.
_MOST_PAIRS = 2**31 - 1


def relative_position_bucket(
  relative_position: np.ndarray, bidirectional: bool, num_buckets: int, max_distance: int
) -> np.ndarray:
  """Returns T5's bucket of each distance key − query: exact near by, logarithmic farther out.

  Half of a direction's buckets are for exact distances, the other half grow up to `max_distance`,
  beyond which all share the last one (Raffel et al., 2020, section 2.1).

  Args:
    relative_position: integers, key position − query position.
    bidirectional: whether keys after the query have buckets of their own; else they share bucket 0.
    num_buckets: buckets in all.
    max_distance: the distance at which the last bucket begins.
  """
  distance = -relative_position
  first = np.zeros_like(distance)
  if bidirectional:
    num_buckets //= 2
    first = np.where(distance < 0, num_buckets, 0)
    distance = np.abs(distance)
  else:
    distance = np.maximum(distance, 0)
  num_exact = num_buckets // 2
  # float32 and the small constant decide on which side a power falls: they are T5's own.
  beyond = np.log(distance.astype(np.float32) / num_exact + np.finfo(np.float32).eps)
  growth = beyond / np.log(max_distance / num_exact) * (num_buckets - num_exact)
  logarithmic = np.minimum(num_exact + growth.astype(np.int32), num_buckets - 1)
  return first + np.where(distance < num_exact, distance, logarithmic)


class RelativePositionBiases(nn.Module):
  """A learned bias for each head and each bucket of the distance between query and key.

  Attributes:
    num_buckets: buckets of distances, for both directions together.
    max_distance: distances from here on share the last bucket.
    num_heads: attention heads.
    dtype: what the bias is returned in.
    embedding_init: initialiser of the table [num_heads, num_buckets].
  """

  num_buckets: int
  max_distance: int
  num_heads: int
  dtype: Any
  embedding_init: Initializer = default_embed_init

  @nn.compact
  def __call__(self, qlen: int, klen: int, bidirectional: bool = True) -> Float[Array, "1 H T S"]:
    """Returns the bias of each of `qlen` queries and `klen` keys, the same for every example.

    Raises:
      ValueError: there are more pairs than XLA can count.
    """
    _check_lengths(qlen, klen)
    table_HN = param_with_axes(
      "rel_embedding",
      self.embedding_init,
      (self.num_heads, self.num_buckets),
      jnp.float32,
      axes=("heads", "relpos_buckets"),
    )
    distance_D = np.arange(1 - qlen, klen)
    bucket_D = relative_position_bucket(
      distance_D, bidirectional, self.num_buckets, self.max_distance
    )
    # Bytes, where they suffice: at a length of 16,384 the pairs take 0.3 GB.
    bucket_D = bucket_D.astype(np.min_scalar_type(-self.num_buckets))
    bucket_TS = np.lib.stride_tricks.sliding_window_view(bucket_D, klen)[::-1]
    # A product with one-hot columns, as in T5X, to the last bit: a gather's gradient is a scatter,
    # and of the sums that could take its place each rounds otherwise.
    one_hot_NL = jax.nn.one_hot(bucket_TS.reshape(-1), self.num_buckets, dtype=self.dtype, axis=0)
    bias_HL = jnp.dot(jnp.asarray(table_HN, self.dtype), one_hot_NL)
    return bias_HL.reshape(1, self.num_heads, qlen, klen)


def _check_lengths(qlen: int, klen: int) -> None:
  if qlen * klen > _MOST_PAIRS:
    raise ValueError(
      f"relative positions of {qlen:,} queries and {klen:,} keys are {qlen * klen:,} pairs, more than "
      f"XLA counts in an array's dimension ({_MOST_PAIRS:,}): attention computes every pair. Set "
      f"TASK_FEATURE_LENGTHS to {math.isqrt(_MOST_PAIRS):,} tokens at most; memory ends long before"
    )


class LayerNorm(nn.Module):
  """T5's norm: division by the root mean square, no mean, no bias; statistics in float32.

  Attributes:
    epsilon: added to the mean square.
    dtype: what the result is returned in.
    scale_init: initialiser of the scale.
  """

  epsilon: float = 1e-6
  dtype: Any = jnp.float32
  scale_init: Initializer = nn.initializers.ones

  @nn.compact
  def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Returns the normalised, scaled input."""
    x_BTD = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x_BTD), axis=-1, keepdims=True)
    normed_BTD = (x_BTD * jax.lax.rsqrt(mean_square + self.epsilon)).astype(self.dtype)
    scale_D = param_with_axes(
      "scale", self.scale_init, (x_BTD.shape[-1],), jnp.float32, axes=("embed",)
    )
    scale_11D = scale_D.astype(self.dtype).reshape((1,) * (x_BTD.ndim - 1) + (-1,))
    return normed_BTD * scale_11D
