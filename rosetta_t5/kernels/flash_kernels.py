"""The kernels of `flash_attention`, as functions of references to the blocks that a program works on.

A tile of logits is [queries, keys], or the transpose where the products need it: tensor cores read
the left operand of a matmul from registers only if it is not transposed.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Int

from rosetta_t5.kernels.xla_attention import MASKED_LOGIT, soft_cap

# GPUs compute powers of 2, so the softmax uses these.
_LOG2_E = math.log2(math.e)
# 2 ** (x·log2(e) − y) in two instructions. XLA's Triton compiler would round the product, and its powers
# of 2 keep numbers below 2 ** -126, which takes five. 0f3FB8AA3B is log2(e) in float32.
_SCALED_POWER = """{
  .reg .f32 exponent;
  fma.rn.f32 exponent, $1, 0f3FB8AA3B, $2;
  ex2.approx.ftz.f32 $0, exponent;
}"""


Window = tuple[int, int]


class FlashOptions(NamedTuple):
  """What is computed, and on which device.

  Attributes:
    causal: whether a query does not see the keys after it.
    window: how many keys a query sees before and after it, itself included in both; None for all.
    softcap: c of the soft limit of q·k, c·tanh(q·k/c); None for no limit.
    gpu: jax's `device_kind` of the GPU; None to interpret the kernels without one, slowly.
  """

  causal: bool = False
  window: Window | None = None
  softcap: float | None = None
  gpu: str | None = None


class Setting(NamedTuple):
  """What is known when a kernel is compiled.

  Attributes:
    block_t: the number of queries in a tile.
    block_s: the number of keys in a tile.
    keys: the number of keys, without those that pad the last tile.
    options: what is computed.
  """

  block_t: int
  block_s: int
  keys: int
  options: FlashOptions


class Inputs(NamedTuple):
  """The inputs of all kernels, padded to whole tiles. A query sees the keys of the same segment.

  `query_positions` are among the keys; they are None if they are 0, 1, ….
  """

  q: Any
  k: Any
  v: Any
  bias: Any
  query_segments: Any
  key_segments: Any
  query_positions: Any = None


class Residuals(NamedTuple):
  """Further inputs of the backward kernels.

  Attributes:
    do: the gradient of the output.
    log2_total: the binary logarithm of the number that the softmax divides by. It is infinite for a
      query that sees no key, so that its weights are 0.
    delta: the sum of the output times its gradient, for each query.
  """

  do: Any
  log2_total: Any
  delta: Any


def forward_kernel(
  x: Inputs, key_tiles: TileRange, o_ref: Any, log2_total_ref: Any, setting: Setting
) -> None:
  """Computes the output of one tile of queries from the tiles of keys that they may see."""
  t = pl.program_id(0)
  q, query_segments = x.q[...], x.query_segments[...][:, None]
  positions = None if x.query_positions is None else x.query_positions[...][:, None]

  def one_tile(s: Array, carry: tuple) -> tuple:
    o, highest, total = carry
    k, v, bias, key_segments = _key_tile(x, s, setting)
    visible = _visible(query_segments, key_segments, positions, t, s, setting)
    logits, _ = _logits(plt.dot(q, k, trans_b=True), bias, visible, setting)
    new_highest = jnp.maximum(highest, jnp.max(logits, axis=1) * _LOG2_E)
    shrink = jnp.exp2(highest - new_highest)
    weights = _power(logits, new_highest[:, None], setting)
    o = o * shrink[:, None] + plt.dot(weights.astype(v.dtype), v)
    return o, new_highest, total * shrink + jnp.sum(weights, axis=1)

  carry = (
    jnp.zeros(q.shape, jnp.float32),
    # Above the binary exponent of a masked logit, whose weight is therefore 0 also before the first key
    # is seen, and not a power of the error of a rounded product.
    jnp.full(q.shape[:1], MASKED_LOGIT, jnp.float32),
    jnp.zeros(q.shape[:1], jnp.float32),
  )
  tiles = (key_tiles.first[...], key_tiles.end[...])
  o, highest, total = jax.lax.fori_loop(*tiles, one_tile, carry)
  sees_nothing = total == 0
  mean_value = _mean_value(x, jnp.max(sees_nothing.astype(jnp.int32)), setting)
  o = jnp.where(sees_nothing[:, None], mean_value[None], o / total[:, None])
  o_ref[...] = o.astype(o_ref.dtype)
  log2_total_ref[...] = jnp.where(sees_nothing, jnp.inf, highest + jnp.log2(total))


def _mean_value(x: Inputs, is_needed: Array, setting: Setting) -> Array:
  """Returns the mean of all values, [K], which a query that sees no key attends to."""

  def one_tile(s: Array, total: Array) -> Array:
    v = x.v[pl.ds(s * setting.block_s, setting.block_s)]
    return total + jnp.sum(v.astype(jnp.float32), axis=0)

  tiles = is_needed * (x.v.shape[0] // setting.block_s)
  total = jax.lax.fori_loop(0, tiles, one_tile, jnp.zeros(x.v.shape[1:], jnp.float32))
  return total / setting.keys


def query_gradient_kernel(
  x: Inputs, residuals: Residuals, key_tiles: TileRange, dq_ref: Any, setting: Setting
) -> None:
  """Computes the gradient of one tile of queries from the tiles of keys that they may see."""
  t = pl.program_id(0)
  q, query_segments = x.q[...], x.query_segments[...][:, None]
  positions = None if x.query_positions is None else x.query_positions[...][:, None]
  do, log2_total, delta = (ref[...] for ref in residuals)

  def one_tile(s: Array, dq: Array) -> Array:
    k, v, bias, key_segments = _key_tile(x, s, setting)
    visible = _visible(query_segments, key_segments, positions, t, s, setting)
    logits, slope = _logits(plt.dot(q, k, trans_b=True), bias, visible, setting)
    weights = _power(logits, log2_total[:, None], setting)
    dlogits = weights * (plt.dot(do, v, trans_b=True) - delta[:, None])
    return dq + plt.dot(_uncapped(dlogits, slope).astype(k.dtype), k)

  # The loop runs at least once, also for padding. If the assembler had to expect that it does not run,
  # it would let Hopper's tensor cores finish each instruction before the next.
  first = key_tiles.first[...]
  number = jnp.maximum(key_tiles.end[...] - first, 1)
  dq = jnp.zeros(q.shape, jnp.float32)
  dq = jax.lax.fori_loop(0, number, lambda n, dq: one_tile(first + n, dq), dq)
  dq_ref[...] = dq.astype(dq_ref.dtype)


def key_gradient_kernel(
  x: Inputs,
  residuals: Residuals,
  query_tiles: TileRange,
  blind_queries: TileRange,
  dk_ref: Any,
  dv_ref: Any,
  setting: Setting,
) -> None:
  """Computes the gradients of one tile of keys and values.

  They come from the tiles of queries that may see the keys; that of the values also from queries that
  see no key, which are among `blind_queries`.
  """
  s = pl.program_id(0)
  k, v, key_segments = x.k[...], x.v[...], x.key_segments[...][:, None]

  def one_tile(t: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
    dk, dv = carry
    at = pl.ds(t * setting.block_t, setting.block_t)
    q, bias = x.q[at], None if x.bias is None else x.bias[at, :].T
    do, log2_total, delta = (ref[at] for ref in residuals)
    positions = None if x.query_positions is None else x.query_positions[at][None]
    visible = _visible(x.query_segments[at][None], key_segments, positions, t, s, setting)
    logits, slope = _logits(plt.dot(k, q, trans_b=True), bias, visible, setting)
    weights = _power(logits, log2_total[None], setting)
    dlogits = weights * (plt.dot(v, do, trans_b=True) - delta[None])
    dv += plt.dot(weights.astype(do.dtype), do)
    return dk + plt.dot(_uncapped(dlogits, slope).astype(q.dtype), q), dv

  zeros = jnp.zeros(k.shape, jnp.float32)
  tiles = (query_tiles.first[...], query_tiles.end[...])
  dk, dv = jax.lax.fori_loop(*tiles, one_tile, (zeros, zeros))
  dk_ref[...] = dk.astype(dk_ref.dtype)
  dv += _gradient_of_mean_value(residuals, blind_queries, setting)
  dv_ref[...] = dv.astype(dv_ref.dtype)


def _gradient_of_mean_value(
  residuals: Residuals, blind_queries: TileRange, setting: Setting
) -> Array:
  """Returns the gradient of each value, [1, K], from the queries that see no key."""

  def one_tile(t: Array, total: Array) -> Array:
    at = pl.ds(t * setting.block_t, setting.block_t)
    do, sees_nothing = residuals.do[at].astype(jnp.float32), residuals.log2_total[at] == jnp.inf
    return total + jnp.sum(jnp.where(sees_nothing[:, None], do, 0.0), axis=0)

  zeros = jnp.zeros(residuals.do.shape[1:], jnp.float32)
  first = blind_queries.first[...] // setting.block_t
  end = (blind_queries.end[...] + setting.block_t - 1) // setting.block_t
  total = jax.lax.fori_loop(first, end, one_tile, zeros)
  return total[None] / setting.keys


def bias_gradient_kernel(
  x: Inputs,
  residuals: Residuals,
  examples_that_see: Any,
  number_that_see: Any,
  dbias_ref: Any,
  setting: Setting,
) -> None:
  """Computes the gradient of one tile of the bias from the examples that see something of it."""
  t, s = pl.program_id(0), pl.program_id(1)
  bias = x.bias[...]
  positions = None if x.query_positions is None else x.query_positions[...][:, None]

  def one_example(number: Array, dbias: Array) -> Array:
    b = examples_that_see[number]
    q, k, v = (ref[b] for ref in (x.q, x.k, x.v))
    do, log2_total, delta = (ref[b] for ref in residuals)
    query_segments, key_segments = x.query_segments[b][:, None], x.key_segments[b][None]
    visible = _visible(query_segments, key_segments, positions, t, s, setting)
    logits, _ = _logits(plt.dot(q, k, trans_b=True), bias, visible, setting)
    weights = _power(logits, log2_total[:, None], setting)
    return dbias + weights * (plt.dot(do, v, trans_b=True) - delta[:, None])

  dbias = jnp.zeros(bias.shape, jnp.float32)
  dbias = jax.lax.fori_loop(0, number_that_see[...], one_example, dbias)
  dbias_ref[...] = dbias.astype(dbias_ref.dtype)


def _key_tile(x: Inputs, s: Array, setting: Setting) -> tuple[Array, Array, Array | None, Array]:
  """Returns the keys, the values, the bias and the segments, [1, s], of tile `s` of the keys."""
  at = pl.ds(s * setting.block_s, setting.block_s)
  return x.k[at], x.v[at], None if x.bias is None else x.bias[:, at], x.key_segments[at][None]


def _visible(
  q_segments: Array, k_segments: Array, position: Array | None, t: Array, s: Array, setting: Setting
) -> Array:
  """Returns which logits of tile `t` of the queries and `s` of the keys count.

  The segments have shapes [t, 1] and [1, s], or [1, t] and [s, 1] for a transposed tile. The queries'
  positions have the shape of their segments.
  """
  visible, (causal, window, *_) = q_segments == k_segments, setting.options
  if not causal and window is None:
    return visible
  query_axis = 0 if q_segments.shape[1] == 1 else 1
  # Triton needs the shape of an iota, so these are not broadcast implicitly.
  query = position
  if query is None:
    query = t * setting.block_t + jax.lax.broadcasted_iota(jnp.int32, visible.shape, query_axis)
  key = s * setting.block_s + jax.lax.broadcasted_iota(jnp.int32, visible.shape, 1 - query_axis)
  if causal:
    visible &= query >= key
  if window is not None:
    visible &= (query - key < window[0]) & (key - query < window[1])
  return visible


def _logits(
  product: Array, bias: Array | None, visible: Array, setting: Setting
) -> tuple[Array, Array | None]:
  """Returns the logits of a tile, and the derivative of the soft limit, None without one."""
  logits, slope, softcap = product.astype(jnp.float32), None, setting.options.softcap
  if softcap is not None:
    logits = soft_cap(logits, softcap)
    slope = 1.0 - jnp.square(logits / softcap)
  if bias is not None:
    logits += bias.astype(jnp.float32)
  return jnp.where(visible, logits, MASKED_LOGIT), slope


def _uncapped(dlogits: Array, slope: Array | None) -> Array:
  """Returns the gradient of q·k from that of the logits."""
  return dlogits if slope is None else dlogits * slope


def _power(logits: Array, log2_total: Array, setting: Setting) -> Array:
  """Returns e to the power of the logits, divided by the total."""
  if setting.options.gpu is None:
    return jnp.exp2(logits * _LOG2_E - log2_total)
  (power,) = plt.elementwise_inline_asm(
    _SCALED_POWER,
    args=[logits, jnp.broadcast_to(-log2_total, logits.shape)],
    constraints="=f,f,f",
    pack=1,
    result_shape_dtypes=[jax.ShapeDtypeStruct(logits.shape, jnp.float32)],
  )
  return power


class Segments(NamedTuple):
  """The segment of each query and each key; 0 is padding. A query sees the keys of its own segment.

  Attributes:
    query_BT: the segments of the queries.
    key_BS: those of the keys.
    query_position_T: the queries' positions among the keys; None for 0, 1, ….
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
