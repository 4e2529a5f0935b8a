"""Adding, flattening and gathering beam dimensions of arrays and caches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict, freeze

from rosetta_t5.decoding import beams

X = np.arange(24).reshape(2, 3, 4)


@pytest.mark.parametrize("offset", [0, 1])
def test_repeated_sequences_are_adjacent(offset):
  expanded = beams.flat_batch_beam_expand(jnp.asarray(X), 5, offset)
  np.testing.assert_array_equal(expanded, np.repeat(X, 5, axis=offset))
  split = beams.unflatten_beam_dim(expanded, X.shape[offset], 5, offset)
  np.testing.assert_array_equal(split, beams.add_beam_dim(jnp.asarray(X), 5, offset))
  np.testing.assert_array_equal(beams.flatten_beam_dim(split, offset), expanded)


@pytest.mark.parametrize("one_hot", [True, False])
def test_beams_are_gathered_within_each_sequence(one_hot):
  indices = jnp.array([[2, 0], [1, 1]])
  nested = {"a": jnp.asarray(X), "b": jnp.asarray(X[..., 0] > 3)}
  got = beams.gather_beams(nested, indices, 2, 3, 2, one_hot)
  np.testing.assert_array_equal(got["a"], X[np.arange(2)[:, None], indices])
  np.testing.assert_array_equal(got["b"], (X[..., 0] > 3)[np.arange(2)[:, None], indices])
  assert got["b"].dtype == bool


def test_cache_entries_without_a_batch_are_not_gathered():
  stacked = jnp.asarray(np.stack([X, X + 100]))  # [layers, batch, beam, ...]
  cache = {"key": stacked, "cache_index": jnp.arange(2), "cached_bias": jnp.arange(3)}
  indices = jnp.array([[2, 0], [1, 1]])
  got = beams.cache_gather_beams({"layer": cache}, indices, 2, 3, 2, offset=1)["layer"]
  for layer in range(2):
    want = X[np.arange(2)[:, None], indices] + 100 * layer
    np.testing.assert_array_equal(got["key"][layer], want)
  np.testing.assert_array_equal(got["cache_index"], cache["cache_index"])
  np.testing.assert_array_equal(got["cached_bias"], cache["cached_bias"])


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("offset", [0, 1])
def test_keys_are_not_moved_if_the_cache_records_the_writing_beams(offset):
  parents = jnp.array([[2, 0, 0], [1, 1, 2]])
  writers = jnp.arange(6).reshape(2, 3, 1)
  layer = {"cached_key": jnp.arange(6), "cached_value": jnp.arange(6), "other": jnp.arange(6)}
  recorded, unrecorded = layer | {"cached_beam": writers}, layer | {"cache_index": jnp.int32(3)}
  cache = {"recorded": recorded, "unrecorded": unrecorded}
  if offset:
    cache = jax.tree.map(lambda x: x[None], cache)
  got = beams.flat_cache_gather_beams(cache, parents, offset)
  if offset:
    got = jax.tree.map(lambda x: x[0], got)
  moved = np.array([2, 0, 0, 4, 4, 5])
  for name in ("cached_key", "cached_value"):
    np.testing.assert_array_equal(got["recorded"][name], np.arange(6))
    np.testing.assert_array_equal(got["unrecorded"][name], moved)
  np.testing.assert_array_equal(got["recorded"]["other"], moved)
  np.testing.assert_array_equal(got["recorded"]["cached_beam"], moved.reshape(2, 3, 1))
  assert got["unrecorded"]["cache_index"] == 3


def test_the_index_is_mapped_only_if_each_sequence_has_one():
  cache = freeze({"a": {"cache_index": jnp.array([1]), "position_embedder_index": jnp.array([1])}})

  def double(x):
    return x * 2

  assert beams.cache_map(double, cache)["a"]["cache_index"] == 1
  mapped = beams.cache_map(double, cache, apply_to_index=True)
  assert isinstance(mapped, FrozenDict)
  assert mapped["a"]["cache_index"] == 2
  assert mapped["a"]["position_embedder_index"] == 1


def test_the_best_beams_come_last():
  scores = jnp.array([[1.0, 3.0, 2.0], [5.0, 4.0, 6.0]])
  got = beams.gather_topk_beams({"x": scores}, scores, 2, 2)["x"]
  np.testing.assert_array_equal(got, [[2.0, 3.0], [5.0, 6.0]])


def test_top_k_is_the_same_for_long_rows_with_ties():
  x = jnp.asarray(np.random.default_rng(0).integers(0, 50, (3, 5000)), jnp.float32)
  values, indices = beams.top_k_two_stage(x, 4)
  want = np.argsort(-np.asarray(x), axis=1, kind="stable")[:, :4]
  np.testing.assert_array_equal(indices, want)
  np.testing.assert_array_equal(values, np.take_along_axis(np.asarray(x), want, 1))


def test_top_k_of_a_long_row_with_fewer_finite_numbers_than_k_returns_infinities():
  x = np.full((2, 3000), -np.inf, np.float32)
  x[0, [2999, 7]] = 1.0, 2.0
  values, indices = beams.top_k_two_stage(jnp.asarray(x), 4)
  np.testing.assert_array_equal(indices, [[7, 2999, 0, 1], [0, 1, 2, 3]])
  np.testing.assert_array_equal(values, np.take_along_axis(x, np.asarray(indices), 1))


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("size", [1023, 1024, 1025])
def test_top_k_returns_a_nan_at_any_position(size):
  x = np.zeros((1, size), np.float32)
  x[0, -1] = np.nan
  values, indices = beams.top_k_two_stage(jnp.asarray(x), 4)
  assert np.isnan(values[0, 0])
  assert indices[0, 0] == size - 1
