"""What decoding keeps: keys [batch, heads, kv, length], values [batch, heads, length, kv], kernels.

So both products of one query, or of a few beams', read the cache as it lies, and fast. (T5X has the
length last in both: on a CPU values are then read at half the speed, and each number that a step writes
goes to a cache line of its own.)

KEPT is the collection of what is the same in every step: the keys and values that cross-attention made
of the encoded inputs, one for all of an example's beams, and kernels as a CPU reads them fastest. Where
it is mutable they are put there; where it is given they are taken from it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

KEPT = "kept"


def keys_kept(k_BSHK: Float[Array, "B S H K"]) -> Float[Array, "B H K S"]:
  """Returns keys in the cache's layout."""
  return k_BSHK.transpose(0, 2, 3, 1)


def values_kept(v_BSHK: Float[Array, "B S H K"]) -> Float[Array, "B H S K"]:
  """Returns values in the cache's layout."""
  return v_BSHK.swapaxes(1, 2)


def by_position(
  k_BHKS: Float[Array, "B H K S"], v_BHSK: Float[Array, "B H S K"]
) -> tuple[Float[Array, "B S H K"], Float[Array, "B S H K"]]:
  """Returns keys and values of a cache in the layout of attention."""
  return k_BHKS.transpose(0, 3, 1, 2), v_BHSK.swapaxes(1, 2)


def by_beam(
  x_NH1S: Shaped[Array, "#N H 1 S"], batch_size: int, num_beams: int
) -> Shaped[Array, "#B H M S"]:
  """Returns a bias or mask of the beams of a batch, one of them all or each its own, by example."""
  _, heads, _, length = x_NH1S.shape
  if x_NH1S.shape[0] == 1:
    return jnp.broadcast_to(x_NH1S, (1, heads, num_beams, length))
  return x_NH1S.reshape(batch_size, num_beams, heads, length).swapaxes(1, 2)


def prefilled(
  x_BSHK: Float[Array, "B S H K"], length: int, lengths_B: Int[Array, " B"]
) -> Float[Array, "B L H K"]:
  """Returns keys or values with each example's first positions as they are, and zeros after them."""
  x_BLHK = jnp.pad(x_BSHK, ((0, 0), (0, length - x_BSHK.shape[1]), (0, 0), (0, 0)))
  is_filled_BL11 = jnp.arange(length)[None, :, None, None] < lengths_B[:, None, None, None]
  return jnp.where(is_filled_BL11, x_BLHK, 0)


def extended(
  x_BHKL: Float[Array, "B H _ _"],
  new_B1HK: Float[Array, "B 1 H K"],
  index: Int[Array, ""] | Int[Array, " B"],
  axis: int,
) -> Float[Array, "B H _ _"]:
  """Returns kept keys or values with one position written, the same for all examples or each its own.

  The length is the dimension `axis`. An index beyond it, of an example that is full while others are
  not, writes nothing.
  """
  if index.ndim == 0:
    new = jnp.expand_dims(new_B1HK[:, 0], axis)
    return jax.lax.dynamic_update_slice_in_dim(x_BHKL, new, index, axis=axis)
  examples_B = jnp.arange(new_B1HK.shape[0])
  place = (examples_B, *[slice(None)] * (axis - 1), index)
  # Sorted and unique: the rows of the batch, each once.
  return x_BHKL.at[place].set(
    new_B1HK[:, 0], mode="drop", unique_indices=True, indices_are_sorted=True
  )


def written(
  beam_BL: Int[Array, "*beams L"], index: Int[Array, ""] | Int[Array, " N"]
) -> Int[Array, "*beams L"]:
  """Returns which beam's rows hold each position, now that each beam wrote at `index` in its own.

  Without beams, [batch, length], it is as it was: nobody reads it.
  """
  if beam_BL.ndim == 2:
    return beam_BL
  _, beams, length = beam_BL.shape
  index_BM1 = index.reshape(-1, beams if index.ndim else 1, 1)
  own_1M1 = jnp.arange(beams, dtype=beam_BL.dtype)[None, :, None]
  return jnp.where(jnp.arange(length)[None, None] == index_BM1, own_1M1, beam_BL)


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
