"""Dropout that drops the same numbers however the rows of a batch are distributed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Bool, Float, Int


@struct.dataclass
class BatchRows:
  """Which rows of the whole batch are computed, as in a stage of a pipeline.

  Attributes:
    numbers: the numbers of the rows.
    batch_size: the number of rows of the whole batch.
  """

  numbers: Int[Array, " N"]
  batch_size: int = struct.field(pytree_node=False)


def draw_kept(
  key: Array, rate: float, shape: Sequence[int], axis: int, rows: BatchRows | None
) -> Bool[Array, "..."]:
  """Returns what is not dropped, drawn for the whole batch: True with the probability 1 − rate.

  Args:
    key: the random key.
    rate: the probability of False.
    shape: the shape of the result.
    axis: the dimension of the rows.
    rows: which rows these are; None for all.
  """
  if rows is None:
    return jax.random.bernoulli(key, 1.0 - rate, tuple(shape))
  whole = list(shape)
  whole[axis] = rows.batch_size
  return bernoulli_of_rows(key, 1.0 - rate, tuple(whole), axis, rows.numbers)


class Dropout(nn.Module):
  """Dropout; the name determines the key.

  Attributes:
    rate: the share of the numbers that are dropped.
    shared_axis: a dimension along which the same numbers are dropped, negative; None for no such dimension.
    batch_axis: the dimension of the batch, negative.
  """

  rate: float
  shared_axis: int | None = None
  batch_axis: int = -3

  @nn.compact
  def __call__(
    self, inputs: jax.Array, deterministic: bool, rows: BatchRows | None = None
  ) -> jax.Array:
    """Returns the inputs, some of them set to 0 and the others divided by the share that is kept."""
    if deterministic or self.rate == 0.0:
      return inputs
    shape = list(inputs.shape)
    if self.shared_axis is not None:
      shape[self.shared_axis] = 1
    kept = draw_kept(self.make_rng("dropout"), self.rate, shape, self.batch_axis, rows)
    return jnp.where(kept, inputs / (1.0 - self.rate), jnp.zeros_like(inputs))


def feature_dropout(
  rate: float, row_axes: tuple[str, str] = ("batch", "length"), name: str | None = None
) -> Dropout:
  """Returns T5's dropout of activations with these logical axes: it drops features at all positions."""
  length_axis, batch_axis = (-3, -2) if row_axes[0] == "length" else (-2, -3)
  return Dropout(rate, length_axis, batch_axis, name=name)


def attention_dropout_scale(
  key: Array, rate: float, shape_BGS: tuple[int, ...], dtype: Any, rows: BatchRows | None = None
) -> Float[Array, "B G S"]:
  """Returns a factor for each head's value at each key: 0 where dropout drops the key."""
  batch, heads, length = shape_BGS
  # T5X draws the mask in the shape [B, H, 1, S]; the shape decides which keys are dropped.
  keep = draw_kept(key, rate, (batch, heads, 1, length), 0, rows)
  return (keep[:, :, 0] / jnp.asarray(1.0 - rate, dtype)).astype(dtype)


def bernoulli_of_rows(
  key: Array, p: float, shape: tuple[int, ...], axis: int, rows: Int[Array, " N"]
) -> Bool[Array, "..."]:
  """Returns rows of `jax.random.bernoulli(key, p, shape)`: N of those along the dimension `axis`.

  jax's default generator, threefry, hashes the index of each number, so any of them can be computed
  alone. The numbers of other generators cannot be; for them the rows get a key of their own.

  Args:
    key: the random key.
    p: the probability of True.
    shape: the shape of the whole array, which has less than 2³² elements.
    axis: the dimension.
    rows: the indices along `axis`.
  """
  axis %= len(shape)
  selected = (*shape[:axis], len(rows), *shape[axis + 1 :])
  words = jax.random.key_data(key)
  is_hashed = jax.config.values["jax_threefry_partitionable"]
  if words.shape != (2,) or not is_hashed:
    return jax.random.bernoulli(jax.random.fold_in(key, rows[0]), p, selected)
  assert math.prod(shape) < 2**32
  counts = jnp.zeros(selected, jnp.uint32)
  for dimension in range(len(shape)):
    indices = jax.lax.broadcasted_iota(jnp.uint32, selected, dimension)
    if dimension == axis:
      indices = jax.lax.broadcast_in_dim(rows.astype(jnp.uint32), selected, (axis,))
    counts += indices * jnp.uint32(math.prod(shape[dimension + 1 :]))
  high, low = threefry2x32_p.bind(*words, jnp.zeros_like(counts), counts)
  # As in `jax.random.uniform`: 23 random bits are the mantissa of a number in [1, 2).
  mantissa = jax.lax.shift_right_logical(high ^ low, jnp.uint32(9)) | jnp.uint32(0x3F800000)
  return jax.lax.bitcast_convert_type(mantissa, jnp.float32) - 1.0 < p
