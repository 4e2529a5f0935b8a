"""Beams as a second dimension after the batch: adding it, joining it with the batch, gathering along it.

Caches are nested dicts of arrays with the batch first, or second after scanned layers (`offset=1`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import FrozenDict, freeze, unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Int, Shaped

from rosetta_t5.parallel.sharding_constraints import map_over_batch

PyTree = Any
Cache = FrozenDict | dict[str, Any]

# Entries of a cache that have no batch dimension.
_WITHOUT_BATCH = frozenset({"cached_bias", "position_embedder_index"})
# Has none while all sequences are equally long, one number a sequence with a prefilled cache.
_INDEX = "cache_index"
# [batch, length], within beam search [batch, beam, length]: which beam's rows hold each position's key
# and value. A network that keeps it beside them needs no moving of these.
_WRITER = "cached_beam"
_ROWS = frozenset({"cached_key", "cached_value"})
# How many candidates `top_k_two_stage` first takes together.
_BLOCK = 128


def cache_map(
  fn: Callable[[jax.Array], jax.Array], cache: Cache, apply_to_index: bool = False
) -> Cache:
  """Returns the cache with `fn` applied to each array that has a batch dimension.

  Args:
    fn: a function of one array.
    cache: a nested dict of arrays.
    apply_to_index: whether the cache's index is one number a sequence, and so to be mapped too.
  """

  return _map_with_path(
    lambda path, value: value if _is_shared(path, apply_to_index) else fn(value), cache
  )


def add_beam_dim(x: Shaped[Array, "..."], beam_size: int, offset: int = 0) -> Shaped[Array, "..."]:
  """Returns [batch, ...] as [batch, beam, ...], every beam the same; the batch lies at `offset`."""
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
  """Returns [batch, ...] as [batch · beam, ...], each sequence `beam_size` times in a row."""
  return flatten_beam_dim(add_beam_dim(x, beam_size, offset), offset)


def gather_beams(
  nested: PyTree,
  beam_indices: Int[Array, "batch new_beam"],
  batch_size: int,
  old_beam_size: int,
  new_beam_size: int,
  one_hot: bool = True,
) -> PyTree:
  """Returns arrays [batch, old_beam, ...] as [batch, new_beam, ...], with the beams that are named.

  `batch_size`, `old_beam_size`, `new_beam_size` and `one_hot` are T5X's arguments; the arrays tell the
  sizes, and a gather within each sequence stays on its device, so no one-hot product is needed.
  """
  del batch_size, old_beam_size, new_beam_size, one_hot
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
  """Returns a cache with the beams that are named (see `gather_beams`); the batch lies at `offset`."""
  del batch_size, old_beam_size, new_beam_size, one_hot
  return cache_map(lambda x: _gather(x, beam_indices, offset), nested)


def flatten_cache(cache: Cache, offset: int = 0, apply_to_index: bool = False) -> Cache:
  """Returns a cache whose beams have a dimension with these in the batch's, as a network takes it."""

  def flattened(path: tuple[str, ...], value: jax.Array) -> jax.Array:
    is_shared = _is_shared(path, apply_to_index) or path[-1] == _WRITER
    return value if is_shared else flatten_beam_dim(value, offset)

  return _map_with_path(flattened, cache)


def flat_cache_gather_beams(
  cache: Cache, beam_indices: Int[Array, "batch beam"], offset: int = 0
) -> Cache:
  """Returns a cache as `flatten_cache` makes it with the beams that are named.

  Keys and values stay where they are if the cache tells who wrote them (`cached_beam`).
  """
  flat = flatten_dict(cache)
  batch_size, beam_size = beam_indices.shape

  def gathered(path: tuple[str, ...], value: jax.Array) -> jax.Array:
    stays = path[-1] in _ROWS and (*path[:-1], _WRITER) in flat
    if stays or _is_shared(path):
      return value
    if path[-1] == _WRITER:
      return _gather(value, beam_indices, offset)
    apart = unflatten_beam_dim(value, batch_size, beam_size, offset)
    return flatten_beam_dim(_gather(apart, beam_indices, offset), offset)

  return _map_with_path(gathered, cache)


def top_k_two_stage(
  x: Float[Array, "batch candidates"], k: int
) -> tuple[Float[Array, "batch k"], Int[Array, "batch k"]]:
  """Returns the k largest values of each row and their indices, the largest first, as `lax.top_k`.

  Of a long row only the k blocks with the largest maxima are looked into: no other can hold one of
  these values. On a CPU that takes a quarter to a tenth of the time. Each device finds those of its
  own part of the batch.
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
  # Sorted, so that of equal values the first in the row is first here too.
  blocks_BK = jnp.sort(jax.lax.top_k(x_BNL.max(axis=-1), k)[1], axis=-1)
  looked_into_BKL = jnp.take_along_axis(x_BNL, blocks_BK[..., None], axis=1)
  values_BK, places_BK = jax.lax.top_k(looked_into_BKL.reshape(batch, -1), k)
  chosen_BK = jnp.take_along_axis(blocks_BK, places_BK // _BLOCK, axis=1)
  return values_BK, chosen_BK * _BLOCK + places_BK % _BLOCK


def gather_topk_beams(
  nested: PyTree,
  score_or_log_prob: Float[Array, "batch beam"],
  batch_size: int,
  new_beam_size: int,
) -> PyTree:
  """Returns the best `new_beam_size` beams of arrays [batch, beam, ...], the best last."""
  _, best_first = top_k_two_stage(score_or_log_prob, new_beam_size)
  best_last = jnp.flip(best_first, axis=1)
  return gather_beams(nested, best_last, batch_size, score_or_log_prob.shape[1], new_beam_size)


def _is_shared(path: tuple[str, ...], apply_to_index: bool = False) -> bool:
  """Tells whether an entry of a cache has no batch dimension."""
  return path[-1] in _WITHOUT_BATCH or (path[-1] == _INDEX and not apply_to_index)


def _map_with_path(fn: Callable[[tuple[str, ...], jax.Array], jax.Array], cache: Cache) -> Cache:
  flat = flatten_dict(unfreeze(cache) if isinstance(cache, FrozenDict) else cache)
  new_cache = unflatten_dict({path: fn(path, value) for path, value in flat.items()})
  return freeze(new_cache) if isinstance(cache, FrozenDict) else new_cache


def _gather(x: jax.Array, beam_indices: jax.Array, offset: int) -> jax.Array:
  """Returns x[..., b, beam_indices[b], ...] for every sequence b; the batch lies at `offset`."""

  def of_one_sequence(x_of_sequence: jax.Array, indices: jax.Array) -> jax.Array:
    return jnp.take(x_of_sequence, indices, axis=offset, mode="clip")

  return jax.vmap(of_one_sequence, in_axes=(offset, 0), out_axes=offset)(x, beam_indices)
