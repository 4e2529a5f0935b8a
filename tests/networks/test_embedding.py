"""Embedding, relative position bias and norm, compared with plain formulas."""

from __future__ import annotations

import functools
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rosetta_t5.networks.layers.embedding import Embed
from rosetta_t5.networks.layers.norms import LayerNorm
from rosetta_t5.networks.layers.positions import RelativePositionBiases, relative_position_bucket
from rosetta_t5.parallel import PjitPartitioner

IDS = jnp.array([[0, 3, 3, 9], [10, 2**31 - 1, -1, -10]])  # the last four are outside the table


def one_hot_matmul(table, ids):
  return (ids[..., None] == jnp.arange(10)[None, None]).astype(table.dtype) @ table


def test_the_gather_equals_a_one_hot_matmul_also_for_ids_outside_the_table():
  embed = Embed(num_embeddings=10, features=4)
  table = jnp.asarray(np.random.default_rng(0).normal(size=(10, 4)), jnp.float32)

  def gathered(table):
    return embed.apply({"params": {"embedding": table}}, IDS)

  np.testing.assert_array_equal(gathered(table), one_hot_matmul(table, IDS))
  np.testing.assert_array_equal(gathered(table)[1], 0.0)
  weights = jnp.arange(32.0).reshape(2, 4, 4)
  grad, expected = (
    jax.grad(lambda t, f=f: jnp.sum(weights * f(t) ** 2))(table)
    for f in (gathered, lambda t: one_hot_matmul(t, IDS))
  )
  np.testing.assert_allclose(grad, expected, rtol=1e-6)


def test_the_table_and_the_sum_of_its_gradient_are_float32():
  embed = Embed(num_embeddings=10, features=4, dtype=jnp.bfloat16)
  table = embed.init(jax.random.PRNGKey(0), IDS)["params"]["embedding"]
  assert table.dtype == jnp.float32
  ids = jnp.zeros((1, 1000), jnp.int32)

  def total(table):
    vectors = embed.apply({"params": {"embedding": table}}, ids)
    assert vectors.dtype == jnp.bfloat16
    return jnp.sum(vectors.astype(jnp.float32))

  # In bfloat16 a thousand ones add up to 256.
  np.testing.assert_array_equal(jax.grad(total)(table)[0], 1000.0)


def test_ids_must_be_integers():
  with pytest.raises(ValueError, match="must be an integer or unsigned integer, got float32"):
    Embed(10, 4, cast_input_dtype=jnp.float32).init(jax.random.PRNGKey(0), IDS)


def t5_bucket(distance, bidirectional, num_buckets=32):
  """Returns the bucket by T5's definition for a maximum distance of 128, in integers.

  In each direction, half of the buckets are exact: one for each distance below e. The other n = e
  buckets begin at the distances e · (128/e)^(k/n), which in integers is (128/e)^k · e^n ≤ distance^n.
  """
  first = 0
  if bidirectional:
    num_buckets //= 2
    first = num_buckets if distance > 0 else 0
    distance = abs(distance)
  else:
    distance = max(-distance, 0)
  exact = num_buckets // 2
  if distance < exact:
    return first + distance
  larger = [k for k in range(exact) if (128 // exact) ** k * exact**exact <= distance**exact]
  return first + exact + max(larger)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_follow_the_definition_of_t5_at_every_distance(bidirectional):
  distances = np.arange(-300, 301)
  expected = [t5_bucket(int(d), bidirectional) for d in distances]
  got = relative_position_bucket(distances, bidirectional, num_buckets=32, max_distance=128)
  np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 7), (7, 3), (1, 4), (40, 40)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_bias_is_a_gather_from_the_table_and_so_is_its_gradient(
  queries, keys, bidirectional
):
  table = np.random.default_rng(0).normal(size=(2, 32)).astype(np.float32)
  weights = np.random.default_rng(1).normal(size=(1, 2, queries, keys)).astype(np.float32)
  distances = np.arange(keys)[None] - np.arange(queries)[:, None]
  buckets = np.array([[t5_bucket(int(d), bidirectional) for d in row] for row in distances])
  bias = functools.partial(
    RelativePositionBiases(32, 128, 2, jnp.float32).apply,
    qlen=queries,
    klen=keys,
    bidirectional=bidirectional,
  )

  def weighted(table):
    value = bias({"params": {"rel_embedding": table}})
    return jnp.sum(value * weights), value

  (_, value), grad = jax.jit(jax.value_and_grad(weighted, has_aux=True))(jnp.asarray(table))
  np.testing.assert_array_equal(value, table[None, :, buckets])
  expected = np.zeros((2, 32), np.float64)
  np.add.at(expected, (slice(None), buckets), weights[0])
  np.testing.assert_allclose(grad, expected, atol=1e-4)


def test_in_decoding_the_relative_bias_is_computed_once_and_then_read_from_the_cache():
  bias = RelativePositionBiases(32, 128, 2, jnp.float32)
  table = {"rel_embedding": jax.random.normal(jax.random.PRNGKey(0), (2, 32))}
  call = functools.partial(bias.apply, qlen=5, klen=5, bidirectional=False)
  value, variables = call({"params": table}, decode=True, mutable=["cache"])
  np.testing.assert_array_equal(value, call({"params": table}))
  other = {"rel_embedding": table["rel_embedding"] + 1}
  np.testing.assert_array_equal(call({"params": other, **variables}, decode=True), value)
  with pytest.raises(ValueError, match=r"shape \(1, 2, 5, 6\) but .* has the shape \(1, 2, 5, 5\)"):
    bias.apply({"params": table, **variables}, 5, 6, bidirectional=False, decode=True)
  with pytest.raises(ValueError, match=r"bidirectional .* are not supported"):
    bias.apply({"params": table}, 5, 5, decode=True)
  with pytest.raises(ValueError, match=r"use model\.apply to initialize the decoding cache"):
    bias.init(jax.random.PRNGKey(0), 5, 5, bidirectional=False, decode=True)


def test_tracing_long_sequences_needs_one_byte_per_pair_of_positions():
  bias = RelativePositionBiases(32, 128, 2, jnp.float32)
  tracemalloc.start()
  shape = jax.eval_shape(lambda: bias.init_with_output(jax.random.PRNGKey(0), 2048, 4096)[0])
  _, most = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert shape.shape == (1, 2, 2048, 4096)
  assert most < 3 * 2048 * 4096


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_norm_divides_by_the_root_mean_square_in_float32(dtype):
  x = np.random.default_rng(0).normal(3.0, 2.0, size=(2, 3, 64))
  scale = np.random.default_rng(1).normal(size=64)
  variables = {"params": {"scale": jnp.asarray(scale, jnp.float32)}}
  got = LayerNorm(dtype=dtype).apply(variables, jnp.asarray(x, jnp.float32))
  assert got.dtype == dtype
  expected = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale
  tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
  np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=tolerance)


def test_a_table_that_devices_split_gives_the_same_vectors_and_gradient():
  embed = Embed(num_embeddings=16, features=4, dtype=jnp.bfloat16)
  rng = np.random.default_rng(0)
  table = jnp.asarray(rng.normal(size=(16, 4)), jnp.float32)
  weights = jnp.asarray(rng.normal(size=(*IDS.shape, 4)), jnp.bfloat16)

  def look_up(table):
    return embed.apply({"params": {"embedding": table}}, IDS)

  def vectors_and_gradient(table):
    vectors, vjp = jax.vjp(look_up, table)
    return vectors, vjp(weights)[0]

  whole = jax.jit(vectors_and_gradient)(table)
  spec = PartitionSpec("model")
  split_over_devices = PjitPartitioner(num_partitions=8).partition(
    vectors_and_gradient, (spec,), (PartitionSpec(), spec)
  )
  for got, want in zip(split_over_devices(table), whole, strict=True):
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
  ("bidirectional", "num_buckets", "max_distance"), [(True, 2, 128), (False, 32, 16)]
)
def test_buckets_that_cannot_be_told_apart_are_refused(bidirectional, num_buckets, max_distance):
  with pytest.raises(
    ValueError, match=r"max_distance must be greater than|num_buckets must be at least 4"
  ):
    relative_position_bucket(np.arange(3), bidirectional, num_buckets, max_distance)
