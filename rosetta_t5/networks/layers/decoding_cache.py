"""The layout of the decoding cache, and the functions that fill, extend and read it.

The cache stores keys as [batch, heads, kv, length] and values as [batch, heads, length, kv], the
layouts in which the two matmuls of a decoding step read them fastest. (T5X has the length last in
both. On a CPU, values are then read at half the speed, and every number that a step writes touches a
cache line of its own.)

The cache of a local layer is as long as its window: position p is written into slot p mod length, over
position p - length.

`PRECOMPUTED` is the variable collection of arrays that are the same in every decoding step: the keys and
values of the encoded inputs, relative biases, and kernels in the type of the matmul (on a CPU also transposed, see
`layers.matmuls`). A module writes these variables when the collection is
mutable, and reads them when they are given.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

PRECOMPUTED = "precomputed"


def keys_to_cache_layout(k_BSHK: Float[Array, "B S H K"]) -> Float[Array, "B H K S"]:
  """Returns keys in the cache's layout."""
  return k_BSHK.transpose(0, 2, 3, 1)


def values_to_cache_layout(v_BSHK: Float[Array, "B S H K"]) -> Float[Array, "B H S K"]:
  """Returns values in the cache's layout."""
  return v_BSHK.swapaxes(1, 2)


def write_precomputed(module: nn.Module, k_BSHK: jax.Array, v_BSHK: jax.Array) -> list[jax.Array]:
  """Returns the keys and values of encoded inputs in the cache's layout.

  It also writes them, if the collection is mutable.
  """
  arrays = [keys_to_cache_layout(k_BSHK), values_to_cache_layout(v_BSHK)]
  if module.is_mutable_collection(PRECOMPUTED) and not module.is_initializing():
    for name, array in zip(("keys", "values"), arrays, strict=True):
      module.put_variable(PRECOMPUTED, name, array)
  return arrays


def read_precomputed(module: nn.Module) -> list[jax.Array]:
  """Returns the keys and values of encoded inputs, in the cache's layout."""
  arrays: list[jax.Array] = [module.get_variable(PRECOMPUTED, name) for name in ("keys", "values")]
  # Without the barrier XLA transposes them before the loop and back again in every step.
  return list(jax.lax.optimization_barrier(arrays))


def with_encoded(
  cached: tuple[jax.Array, jax.Array],
  encoded: list[jax.Array],
  mask_N11L: Bool[Array, "#N 1 1 L"],
  encoded_mask_N11S: Bool[Array, "N 1 1 S"],
  beam_BML: Int[Array, "B M L"] | None,
) -> tuple[Any, ...]:
  """Returns keys, values, their mask and the table of writers for the cache followed by encoded inputs.

  Args:
    cached: keys [N, H, K, L] and values [N, H, L, K].
    encoded: keys [B, H, K, S] and values [B, H, S, K] of the encoded inputs; N = B·M.
    mask_N11L: True at the visible positions of the cache.
    encoded_mask_N11S: True at the visible encoded inputs.
    beam_BML: the beams that wrote each position of the cache; None without beams.
  """
  k_BGKS, v_BGSK = encoded
  beams = cached[0].shape[0] // k_BGKS.shape[0]
  k_NGKS, v_NGSK = (jnp.repeat(x, beams, axis=0) for x in (k_BGKS, v_BGSK))
  keys = jnp.concatenate([cached[0], k_NGKS], axis=3)
  values = jnp.concatenate([cached[1], v_NGSK], axis=2)
  mask_N11L = jnp.broadcast_to(mask_N11L, (*encoded_mask_N11S.shape[:3], mask_N11L.shape[3]))
  mask = jnp.concatenate([mask_N11L, encoded_mask_N11S], axis=3)
  if beam_BML is not None:
    # Each beam reads its own copy.
    own_1M1 = jnp.arange(beam_BML.shape[1], dtype=beam_BML.dtype)[None, :, None]
    own_BMS = jnp.broadcast_to(own_1M1, (*beam_BML.shape[:2], k_NGKS.shape[3]))
    beam_BML = jnp.concatenate([beam_BML, own_BMS], axis=2)
  return keys, values, mask, beam_BML


def group_by_example(
  x_NH1S: Shaped[Array, "#N H 1 S"], batch_size: int, num_beams: int
) -> Shaped[Array, "#B H M S"]:
  """Returns a bias or mask with one row per beam, N = B·M, as one with M queries per example."""
  _, heads, _, length = x_NH1S.shape
  if x_NH1S.shape[0] == 1:
    return jnp.broadcast_to(x_NH1S, (1, heads, num_beams, length))
  return x_NH1S.reshape(batch_size, num_beams, heads, length).swapaxes(1, 2)


def prompts_to_cache(
  k_BSHK: Float[Array, "B S H K"],
  v_BSHK: Float[Array, "B S H K"],
  length: int,
  lengths_B: Int[Array, " B"],
) -> tuple[Float[Array, "B H K L"], Float[Array, "B H L K"]]:
  """Returns prompts' keys and values in the cache's layout, with zeros after each prompt's end.

  Args:
    k_BSHK: the keys.
    v_BSHK: the values.
    length: the number of positions in the cache.
    lengths_B: the number of tokens in each prompt.
  """
  if length < k_BSHK.shape[1]:
    # In the cache of a local layer, each slot has the last position of the prompt that belongs in it.
    position_BL = jnp.maximum(_positions_in_cache(lengths_B - 1, length), 0)
    position_BL11 = position_BL[:, :, None, None]
    k_BSHK, v_BSHK = (jnp.take_along_axis(x, position_BL11, axis=1) for x in (k_BSHK, v_BSHK))
  is_prompt_BL11 = jnp.arange(length)[None, :, None, None] < lengths_B[:, None, None, None]
  padding = ((0, 0), (0, length - k_BSHK.shape[1]), (0, 0), (0, 0))
  k_BLHK, v_BLHK = (jnp.where(is_prompt_BL11, jnp.pad(x, padding), 0) for x in (k_BSHK, v_BSHK))
  return keys_to_cache_layout(k_BLHK), values_to_cache_layout(v_BLHK)


def write_position(
  x_BHKL: Float[Array, "B H _ _"],
  new_B1HK: Float[Array, "B 1 H K"],
  index: Int[Array, ""] | Int[Array, " B"],
  axis: int,
) -> Float[Array, "B H _ _"]:
  """Returns cached keys or values with one position written.

  Args:
    x_BHKL: the cached keys or values.
    new_B1HK: the key or value of the new position.
    index: the new position, one for all examples or one per example. An index beyond the length
      belongs to an example that is full while others are not; nothing is written for it.
    axis: the dimension of the length.
  """
  if index.ndim == 0:
    new = jnp.expand_dims(new_B1HK[:, 0], axis)
    return jax.lax.dynamic_update_slice_in_dim(x_BHKL, new, index, axis=axis)
  at = (jnp.arange(new_B1HK.shape[0]), *[slice(None)] * (axis - 1), index)
  # The first index is the row of the batch, so the indices are sorted and unique.
  return x_BHKL.at[at].set(
    new_B1HK[:, 0], mode="drop", unique_indices=True, indices_are_sorted=True
  )


def record_writing_beam(
  beam_BL: Int[Array, "*beams L"], index: Int[Array, ""] | Int[Array, " N"]
) -> Int[Array, "*beams L"]:
  """Returns the table of writers after each beam has written its own row at `index`.

  Entry [example, beam, position] is the beam whose row of the cache holds what `beam` sees there.
  Without beams the table is [batch, length]; nothing reads it, and it is returned unchanged.
  """
  if beam_BL.ndim == 2:
    return beam_BL
  _, beams, length = beam_BL.shape
  index_BM1 = index.reshape(-1, beams if index.ndim else 1, 1)
  own_1M1 = jnp.arange(beams, dtype=beam_BL.dtype)[None, :, None]
  return jnp.where(jnp.arange(length)[None, None] == index_BM1, own_1M1, beam_BL)


def visible_positions(
  index: Int[Array, ""] | Int[Array, " B"], length: int, window: int | None = None
) -> Bool[Array, "#B 1 1 L"]:
  """Returns the mask of the cached positions that the query at `index` sees.

  These are those up to its own or, with a window, the last `window` of them.
  """
  index_B = index.reshape(-1)
  if window is None:
    return (jnp.arange(length)[None] <= index_B[:, None])[:, None, None]
  position_BL = _positions_in_cache(index_B, length)
  visible_BL = (position_BL >= 0) & (index_B[:, None] - position_BL < window)
  return visible_BL[:, None, None]


def _positions_in_cache(last_B: Int[Array, " B"], length: int) -> Int[Array, "B L"]:
  """Returns the position in each slot after the position `last_B` was written; negative if there is none."""
  last_B1 = last_B[:, None]
  return last_B1 - (last_B1 - jnp.arange(length)[None]) % length


def bias_row(
  bias_1HLL: Shaped[Array, "1 H L L"], index: Int[Array, ""] | Int[Array, " B"]
) -> Shaped[Array, "#B H 1 L"]:
  """Returns the row of the full relative bias that belongs to the query at `index`."""
  if index.ndim == 0:
    return jax.lax.dynamic_slice_in_dim(bias_1HLL, index, 1, axis=2)
  rows_HBL = jnp.take(bias_1HLL[0], index, axis=1, mode="clip")
  return rows_HBL.transpose(1, 0, 2)[:, :, None]
