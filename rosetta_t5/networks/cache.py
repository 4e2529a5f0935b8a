"""The keys and values that decoding keeps: [batch, heads, kv, length], T5X's layout.

With the length last a product with one query reads the cache as it lies.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped


def by_length(x_BSHK: Float[Array, "B S H K"]) -> Float[Array, "B H K S"]:
  """Returns keys or values in the cache's layout."""
  return x_BSHK.transpose(0, 2, 3, 1)


def by_position(x_BHKS: Float[Array, "B H K S"]) -> Float[Array, "B S H K"]:
  """Returns keys or values of a cache in the layout of attention."""
  return x_BHKS.transpose(0, 3, 1, 2)


def beams_as_positions(
  q_NTHK: Float[Array, "N T H K"], mask_N1TS: Shaped[Array, "#N 1 #T S"] | None, batch_size: int
) -> tuple[Float[Array, "B M H K"], Shaped[Array, "#B 1 _ S"] | None]:
  """Returns the queries, and their mask, of an example's beams as positions of one sequence.

  The beams, which lie side by side, see the same keys, and these are then read once for all.
  """
  q_BMHK = q_NTHK.reshape(batch_size, -1, *q_NTHK.shape[2:])
  if mask_N1TS is None:
    return q_BMHK, None
  rows = (*q_NTHK.shape[:2], mask_N1TS.shape[-1])
  mask_NTS = jnp.broadcast_to(mask_N1TS[:, 0], rows)
  return q_BMHK, mask_NTS.reshape(batch_size, 1, -1, rows[-1])


def empty(x_BSHK: Float[Array, "B S H K"]) -> Float[Array, "B H K S"]:
  """Returns a cache of zeros for keys or values of this shape."""
  batch, length, heads, size = x_BSHK.shape
  return jnp.zeros((batch, heads, size, length), x_BSHK.dtype)


def prefilled(
  x_BSHK: Float[Array, "B S H K"], cache_BHKL: Float[Array, "B H K L"], lengths_B: Int[Array, " B"]
) -> Float[Array, "B H K L"]:
  """Returns the cache with each example's first positions filled, and zeros after them."""
  missing = cache_BHKL.shape[-1] - x_BSHK.shape[1]
  x_BHKL = jnp.pad(by_length(x_BSHK), ((0, 0),) * 3 + ((0, missing),))
  is_filled_B11L = jnp.arange(x_BHKL.shape[-1])[None, None, None] < lengths_B[:, None, None, None]
  return jnp.where(is_filled_B11L, x_BHKL, 0).astype(cache_BHKL.dtype)


def extended(
  x_B1HK: Float[Array, "B 1 H K"],
  cache_BHKL: Float[Array, "B H K L"],
  index: Int[Array, ""] | Int[Array, " B"],
) -> Float[Array, "B H K L"]:
  """Returns the cache with one position written, the same for all examples or each its own.

  An index beyond the cache, of an example that is full while others are not, writes nothing.
  """
  x_BHK1 = by_length(x_B1HK)
  if index.ndim == 0:
    return jax.lax.dynamic_update_slice_in_dim(cache_BHKL, x_BHK1, index, axis=3)
  examples_B = jnp.arange(x_B1HK.shape[0])
  # Sorted and unique: the rows of the batch, each once.
  return cache_BHKL.at[examples_B, :, :, index].set(
    x_BHK1[..., 0], mode="drop", unique_indices=True, indices_are_sorted=True
  )


def seen(index: Int[Array, ""] | Int[Array, " B"], length: int) -> Bool[Array, "#B 1 1 L"]:
  """Returns which of the cache's positions the query at `index` sees: those up to its own."""
  return jnp.arange(length)[None, None, None] <= index.reshape(-1, 1, 1, 1)


def bias_row(
  bias_1HLL: Shaped[Array, "1 H L L"], index: Int[Array, ""] | Int[Array, " B"]
) -> Shaped[Array, "#B H 1 L"]:
  """Returns the row of the whole relative bias that belongs to the query at `index`."""
  if index.ndim == 0:
    return jax.lax.dynamic_slice_in_dim(bias_1HLL, index, 1, axis=2)
  rows_HBL = jnp.take(bias_1HLL[0], index, axis=1, mode="clip")
  return rows_HBL.transpose(1, 0, 2)[:, :, None]
