"""Which tiles of attention's logits can contain a visible pair of a query and a key."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Segments(NamedTuple):
  """The segment of each query and each key; 0 is padding. A query sees the keys of its own segment.

  Attributes:
    query_BT: the segments of the queries.
    key_BS: those of the keys.
    query_position_T: the queries' positions among the keys, for causality; None for 0, 1, ….
  """

  query_BT: Int[Array, "B T"]
  key_BS: Int[Array, "B S"]
  query_position_T: Int[Array, " T"] | None = None


class TileRange(NamedTuple):
  """The tiles that a program of a kernel computes, from `first` to before `end`.

  Both are int32 arrays with an element for each program; inside a kernel, references to one.
  """

  first: Any
  end: Any


def visible_tiles(
  segments: Segments, block_t: int, block_s: int, causal: bool
) -> Bool[Array, "B queries keys"]:
  """Returns which tiles of `block_t` queries and `block_s` keys must be computed.

  The others have no visible pair. A tile is assumed to contain all segments between its lowest and its
  highest, which is exact for packed rows, whose segments increase. Padding sees nothing.

  Args:
    segments: of whole tiles; padding is 0 or less.
    block_t: the number of queries in a tile.
    block_s: the number of keys in a tile.
    causal: whether a query does not see the keys after it.
  """
  lowest_q, highest_q = _segment_bounds(segments.query_BT, block_t)
  lowest_k, highest_k = _segment_bounds(segments.key_BS, block_s)
  visible = (lowest_q[:, :, None] <= highest_k[:, None]) & (
    lowest_k[:, None] <= highest_q[:, :, None]
  )
  if causal:
    last_query = (jnp.arange(visible.shape[1]) + 1) * block_t - 1
    if segments.query_position_T is not None:
      last_query = jnp.max(segments.query_position_T.reshape(-1, block_t), axis=1)
    first_key = jnp.arange(visible.shape[2]) * block_s
    visible &= last_query[None, :, None] >= first_key[None, None]
  return visible


def range_of(chosen: Bool[Array, "*batch tiles"]) -> TileRange:
  """Returns the range from the first to the last chosen element of the last axis.

  If none is chosen, `first` is the last element and `end` is 0.
  """
  number = jax.lax.broadcasted_iota(jnp.int32, chosen.shape, chosen.ndim - 1)
  first = jnp.min(jnp.where(chosen, number, chosen.shape[-1] - 1), axis=-1)
  return TileRange(first, jnp.max(jnp.where(chosen, number + 1, 0), axis=-1))


def _segment_bounds(ids: Array, block: int) -> tuple[Array, Array]:
  """Returns the lowest and the highest segment of each tile; they exclude each other for padding."""
  tiles = ids.reshape(ids.shape[0], -1, block)
  lowest = jnp.min(jnp.where(tiles > 0, tiles, jnp.iinfo(ids.dtype).max), axis=-1)
  return lowest, jnp.max(jnp.maximum(tiles, 0), axis=-1)
