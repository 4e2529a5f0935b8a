"""Random numbers of some rows of an array, without drawing the others."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Bool, Int


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
