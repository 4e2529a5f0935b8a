"""Operations on arrays and caches with a beam dimension: adding, flattening and gathering beams.

The beam dimension follows the batch dimension. Caches are nested dicts of arrays whose batch is the
first dimension, or the second one after scanned layers (`offset=1`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import FrozenDict
from jax.tree_util import DictKey, tree_leaves_with_path, tree_map_with_path
from jaxtyping import Array, Float, Int, Shaped

from rosetta_t5.parallel.placement import map_over_batch

PyTree = Any
Cache = FrozenDict | dict[str, Any]

# Cache entries without a batch dimension.
_WITHOUT_BATCH = frozenset({"cached_bias", "position_embedder_index"})
# A scalar while all sequences have the same length; [batch] after a prefill.
_INDEX = "cache_index"
# The beam whose row of the cache has the key and value of each position: [batch, length], or
# [batch, beam, length] in a beam search. With this table, keys and values do not have to be moved when
# beams are reordered.
_WRITING_BEAM = DictKey("cached_beam")
_KEYS_AND_VALUES = frozenset({"cached_key", "cached_value"})
# The number of candidates in a block of `top_k_two_stage`.
_BLOCK = 128


def cache_map(
  fn: Callable[[jax.Array], jax.Array], cache: Cache, apply_to_index: bool = False
) -> Cache:
  """Returns the cache with `fn` applied to each array that has a batch dimension.

  Args:
    fn: a function of one array.
    cache: a nested dict of arrays.
    apply_to_index: whether the cache's index is [batch], so that `fn` is applied to it as well.
  """
  return tree_map_with_path(
    lambda path, value: value if _is_shared(path, apply_to_index) else fn(value), cache
  )


def add_beam_dim(x: Shaped[Array, "..."], beam_size: int, offset: int = 0) -> Shaped[Array, "..."]:
  """Returns [batch, ...] as [batch, beam, ...] with equal beams; `offset` is the batch dimension."""
  shape = (*x.shape[: offset + 1], beam_size, *x.shape[offset + 1 :])
  return jnp.broadcast_to(jnp.expand_dims(x, offset + 1), shape)


def flatten_beam_dim(x: Shaped[Array, "..."], offset: int = 0) -> Shaped[Array, "..."]:
  """Returns [batch, beam, ...] as [batch · beam, ...]."""
  return x.reshape((*x.shape[:offset], -1, *x.shape[offset + 2 :]))


def unflatten_beam_dim(
  x: Shaped[Array, "..."], batch_size: int, beam_size: int, offset: int = 0
) -> Shaped[Array, "..."]:
  """Returns [batch · beam, ...] as [batch, beam, ...]."""
  return x.reshape((*x.shape[:offset], batch_size, beam_size, *x.shape[offset + 1 :]))


def flat_batch_beam_expand(
  x: Shaped[Array, "..."], beam_size: int, offset: int = 0
) -> Shaped[Array, "..."]:
  """Returns [batch, ...] as [batch · beam, ...], with each sequence repeated `beam_size` times."""
  return flatten_beam_dim(add_beam_dim(x, beam_size, offset), offset)


def gather_beams(
  nested: PyTree,
  beam_indices: Int[Array, "batch new_beam"],
  batch_size: int,
  old_beam_size: int,
  new_beam_size: int,
  one_hot: bool = True,
) -> PyTree:
  """Returns the beams with the given indices: [batch, old_beam, ...] becomes [batch, new_beam, ...].

  The arguments `batch_size`, `old_beam_size`, `new_beam_size` and `one_hot` have no effect and exist
  because T5X has them. The sizes are those of the arrays. T5X multiplies by one-hot matrices to keep the
  work on each device, which the gather used here does as well.
  """
  return jax.tree.map(lambda x: _gather(x, beam_indices, offset=0), nested)


def cache_gather_beams(
  nested: Cache,
  beam_indices: Int[Array, "batch new_beam"],
  batch_size: int,
  old_beam_size: int,
  new_beam_size: int,
  one_hot: bool = True,
  offset: int = 0,
) -> Cache:
  """Returns a cache of the beams with the given indices.

  It has the ignored arguments of `gather_beams`; `offset` is the batch dimension.
  """
  return cache_map(lambda x: _gather(x, beam_indices, offset), nested)


def flatten_cache(cache: Cache, offset: int = 0, apply_to_index: bool = False) -> Cache:
  """Returns the cache with its beam dimension flattened into the batch, as a network expects it."""

  def flatten(path: tuple[DictKey, ...], value: jax.Array) -> jax.Array:
    is_shared = _is_shared(path, apply_to_index) or path[-1] == _WRITING_BEAM
    return value if is_shared else flatten_beam_dim(value, offset)

  return tree_map_with_path(flatten, cache)


def flat_cache_gather_beams(
  cache: Cache, beam_indices: Int[Array, "batch beam"], offset: int = 0
) -> Cache:
  """Returns a cache of the beams with the given indices, for a cache from `flatten_cache`.

  Keys and values are not moved if the cache records the beams that wrote them (`cached_beam`).
  """
  paths = {path for path, _ in tree_leaves_with_path(cache)}
  batch_size, beam_size = beam_indices.shape

  def gather(path: tuple[DictKey, ...], value: jax.Array) -> jax.Array:
    is_in_place = path[-1].key in _KEYS_AND_VALUES and (*path[:-1], _WRITING_BEAM) in paths
    if is_in_place or _is_shared(path):
      return value
    if path[-1] == _WRITING_BEAM:
      return _gather(value, beam_indices, offset)
    unflattened = unflatten_beam_dim(value, batch_size, beam_size, offset)
    return flatten_beam_dim(_gather(unflattened, beam_indices, offset), offset)

  return tree_map_with_path(gather, cache)


def top_k_two_stage(
  x: Float[Array, "batch candidates"], k: int
) -> tuple[Float[Array, "batch k"], Int[Array, "batch k"]]:
  """Returns the k largest values of each row and their indices, the largest first, like `lax.top_k`.

  In a long row only the k blocks with the largest maxima are searched, because no other block can
  contain one of these values. On a CPU this takes a quarter to a tenth of the time. Each device
  searches its own part of the batch.
  """
  values, indices = map_over_batch(functools.partial(_top_k, k), x)
  return values, indices


def _top_k(k: int, x_BC: jax.Array) -> tuple[jax.Array, jax.Array]:
  batch, size = x_BC.shape
  if size < 2 * k * _BLOCK:
    values_BK, chosen_BK = jax.lax.top_k(x_BC, k)
    return values_BK, chosen_BK
  x_BC = jnp.pad(x_BC, ((0, 0), (0, -size % _BLOCK)), constant_values=-jnp.inf)
  x_BNL = x_BC.reshape(batch, -1, _BLOCK)
  # Sorted, so that equal values keep their order.
  blocks_BK = jnp.sort(jax.lax.top_k(x_BNL.max(axis=-1), k)[1], axis=-1)
  candidates_BKL = jnp.take_along_axis(x_BNL, blocks_BK[..., None], axis=1)
  values_BK, within_BK = jax.lax.top_k(candidates_BKL.reshape(batch, -1), k)
  chosen_BK = jnp.take_along_axis(blocks_BK, within_BK // _BLOCK, axis=1)
  return values_BK, chosen_BK * _BLOCK + within_BK % _BLOCK


def gather_topk_beams(
  nested: PyTree, score_or_log_prob: Float[Array, "batch beam"], batch_size: int, new_beam_size: int
) -> PyTree:
  """Returns the best `new_beam_size` beams of arrays [batch, beam, ...], the best last."""
  _, best_first = top_k_two_stage(score_or_log_prob, new_beam_size)
  best_last = jnp.flip(best_first, axis=1)
  return gather_beams(nested, best_last, batch_size, score_or_log_prob.shape[1], new_beam_size)


def _is_shared(path: tuple[DictKey, ...], apply_to_index: bool = False) -> bool:
  """Returns whether a cache entry has no batch dimension."""
  name = path[-1].key
  return name in _WITHOUT_BATCH or (name == _INDEX and not apply_to_index)


def _gather(x: jax.Array, beam_indices: jax.Array, offset: int) -> jax.Array:
  """Returns x[..., b, beam_indices[b], ...] for every sequence b; `offset` is the batch dimension."""
  take = functools.partial(jnp.take, axis=offset, mode="clip")
  return jax.vmap(take, in_axes=(offset, 0), out_axes=offset)(x, beam_indices)
