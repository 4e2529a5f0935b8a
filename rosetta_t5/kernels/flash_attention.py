"""Attention of one pass over the keys, with a learned bias, segments and causality (Pallas, Triton).

No library kernel takes a learned bias together with packed segments, which is what T5 trains on. The
logits are never written: each tile is made again in the backward pass (Dao et al., 2022). The bias's
gradient, one for the whole batch, has a kernel of its own that sums over the batch in registers.

Padding has segment 0. As in the XLA reference a query that sees no key sees all alike; keys that only
fill up a tile are seen by none.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from rosetta_t5.kernels.xla_attention import MASKED_LOGIT

# Queries and keys of a tile.
_BLOCK_T = 64
_BLOCK_S = 64
# Tensor cores want 16 of everything.
_SMALLEST = 16
# Ids of what fills up the last tile: no key of that id is seen, whatever the query.
_NO_KEY = -1
_NO_QUERY = -2


class Segments(NamedTuple):
  """Which segment each query and each key belongs to; 0 is padding. One sees one's own segment."""

  query_BT: Int[Array, "B T"]
  key_BS: Int[Array, "B S"]


class _Inputs(NamedTuple):
  """What all kernels read; sides are filled up to whole tiles."""

  q_BTHK: jax.Array
  k_BSHK: jax.Array
  v_BSHK: jax.Array
  bias_HTS: jax.Array | None
  query_BT: jax.Array
  key_BS: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def flash_attention(
  q_BTHK: Float[Array, "B T H K"],
  k_BSHK: Float[Array, "B S H K"],
  v_BSHK: Float[Array, "B S H K"],
  bias_1HTS: Float[Array, "1 H T S"] | None,
  segments: Segments,
  causal: bool = False,
  interpret: bool = False,
) -> Float[Array, "B T H K"]:
  """Returns softmax(q·k + bias)·v over the keys of each query's segment, in the type of q.

  Logits and softmax are float32; the products' operands keep their type.

  Args:
    q_BTHK: queries, not scaled.
    k_BSHK: keys.
    v_BSHK: values.
    bias_1HTS: added to the logits; its gradient is [1, H, T, S].
    segments: which query sees which key.
    causal: whether a query sees no key after it.
    interpret: whether to run without a GPU, slowly.
  """
  return _forward(q_BTHK, k_BSHK, v_BSHK, bias_1HTS, segments, causal, interpret)[0]


def _forward(
  q_BTHK: Array,
  k_BSHK: Array,
  v_BSHK: Array,
  bias_1HTS: Array | None,
  segments: Segments,
  causal: bool,
  interpret: bool,
) -> tuple[Array, tuple]:
  inputs = _filled_up(q_BTHK, k_BSHK, v_BSHK, bias_1HTS, segments)
  batch, length, heads, size = inputs.q_BTHK.shape
  per_query = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
  o_BTHK, highest_BHT, total_BHT = _call(
    functools.partial(_forward_kernel, causal=causal),
    inputs,
    (),
    grid="query",
    out_shape=(
      jax.ShapeDtypeStruct((batch, length, heads, size), q_BTHK.dtype),
      per_query,
      per_query,
    ),
    interpret=interpret,
  )
  residuals = (inputs, o_BTHK, highest_BHT, total_BHT, (q_BTHK.shape, k_BSHK.shape, bias_1HTS))
  return o_BTHK[:, : q_BTHK.shape[1], :, : q_BTHK.shape[3]], residuals


def _backward(causal: bool, interpret: bool, residuals: tuple, do: Array) -> tuple:
  inputs, o_BTHK, highest_BHT, total_BHT, (q_shape, k_shape, bias_1HTS) = residuals
  do_BTHK = _pad_to(do, o_BTHK.shape)
  product = o_BTHK.astype(jnp.float32) * do_BTHK.astype(jnp.float32)
  delta_BHT = jnp.sum(product, axis=-1).transpose(0, 2, 1)
  more = (do_BTHK, highest_BHT, total_BHT, delta_BHT)
  like = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
  (dq_BTHK,) = _call(
    functools.partial(_query_gradient_kernel, causal=causal),
    inputs, more, grid="query", out_shape=like((inputs.q_BTHK,)), interpret=interpret,
  )  # fmt: skip
  dk_BSHK, dv_BSHK = _call(
    functools.partial(_key_gradient_kernel, causal=causal),
    inputs, more, grid="key", out_shape=like((inputs.k_BSHK, inputs.v_BSHK)), interpret=interpret,
  )  # fmt: skip
  dq = dq_BTHK[:, : q_shape[1], :, : q_shape[3]]
  dk, dv = (d[:, : k_shape[1], :, : k_shape[3]] for d in (dk_BSHK, dv_BSHK))
  if bias_1HTS is None:
    return dq, dk, dv, None, None
  (dbias_HTS,) = _call(
    functools.partial(_bias_gradient_kernel, causal=causal),
    inputs, more, grid="bias",
    out_shape=(jax.ShapeDtypeStruct(inputs.bias_HTS.shape, jnp.float32),), interpret=interpret,
  )  # fmt: skip
  dbias = dbias_HTS[None, :, : q_shape[1], : k_shape[1]].astype(bias_1HTS.dtype)
  return dq, dk, dv, dbias, None


flash_attention.defvjp(_forward, _backward)


def _visible_logits(
  q: Array, k: Array, bias: Array | None, ids: tuple[Array, Array], first: tuple, causal: bool
) -> tuple[Array, Array]:
  """Returns a tile's logits with T5's mask applied, and which of them gradients go through.

  Args:
    q: [t, K].
    k: [s, K].
    bias: [t, s].
    ids: the queries' segments [t], the keys' [s].
    first: positions of the tile's first query and first key.
    causal: whether a query sees no key after it.
  """
  logits = plt.dot(q, k, trans_b=True).astype(jnp.float32)
  if bias is not None:
    logits += bias.astype(jnp.float32)
  query, key = ids[0][:, None], ids[1][None, :]
  seen = (query == key) & (key > 0)
  if causal:
    # Broadcast by hand: iota's shape must be known.
    t = first[0] + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    s = first[1] + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    seen &= t >= s
  logits = jnp.where(seen, logits, MASKED_LOGIT)
  there = jnp.broadcast_to(key, logits.shape) != _NO_KEY
  return jnp.where(there, logits, -jnp.inf), seen


def _tile(ref: Any, index: Any, block: int) -> Array:
  return ref[pl.ds(index * block, block)]


def _bias_tile(ref: Any, t: Any, s: Any) -> Array | None:
  if ref is None:
    return None
  return ref[pl.ds(t * _BLOCK_T, _BLOCK_T), pl.ds(s * _BLOCK_S, _BLOCK_S)]


def _forward_kernel(
  q_ref, k_ref, v_ref, bias_ref, query_ref, key_ref, o_ref, highest_ref, total_ref, *, causal: bool
) -> None:
  """One tile of queries against all keys."""
  t = pl.program_id(0)
  q, query = q_ref[...], query_ref[...]

  def one_tile(s: Array, carry: tuple) -> tuple:
    o, highest, total = carry
    k, v, key = (_tile(ref, s, _BLOCK_S) for ref in (k_ref, v_ref, key_ref))
    bias = None if bias_ref is None else bias_ref[:, pl.ds(s * _BLOCK_S, _BLOCK_S)]
    logits, _ = _visible_logits(q, k, bias, (query, key), (t * _BLOCK_T, s * _BLOCK_S), causal)
    new_highest = jnp.maximum(highest, jnp.max(logits, axis=1))
    shrink = jnp.exp(highest - new_highest)
    weights = jnp.exp(logits - new_highest[:, None])
    o = o * shrink[:, None] + plt.dot(weights.astype(v.dtype), v)
    return o, new_highest, total * shrink + jnp.sum(weights, axis=1)

  carry = (
    jnp.zeros(q.shape, jnp.float32),
    jnp.full(q.shape[:1], -jnp.inf, jnp.float32),
    jnp.zeros(q.shape[:1], jnp.float32),
  )
  o, highest, total = jax.lax.fori_loop(0, k_ref.shape[0] // _BLOCK_S, one_tile, carry)
  o_ref[...] = (o / total[:, None]).astype(o_ref.dtype)
  highest_ref[...], total_ref[...] = highest, total


def _weights_and_logit_gradient(
  logits: Array, seen: Array, v: Array, do: Array, highest: Array, total: Array, delta: Array
) -> tuple[Array, Array]:
  """Returns a tile's softmax and the gradient of its logits, both float32."""
  weights = jnp.exp(logits - highest[:, None]) / total[:, None]
  dweights = plt.dot(do, v, trans_b=True).astype(jnp.float32)
  return weights, jnp.where(seen, weights * (dweights - delta[:, None]), 0.0)


def _query_gradient_kernel(
  q_ref, k_ref, v_ref, bias_ref, query_ref, key_ref, do_ref, highest_ref, total_ref, delta_ref,
  dq_ref, *, causal: bool,
) -> None:  # fmt: skip
  """One tile of queries against all keys."""
  t = pl.program_id(0)
  q, query, do = q_ref[...], query_ref[...], do_ref[...]
  statistics = (highest_ref[...], total_ref[...], delta_ref[...])

  def one_tile(s: Array, dq: Array) -> Array:
    k, v, key = (_tile(ref, s, _BLOCK_S) for ref in (k_ref, v_ref, key_ref))
    bias = None if bias_ref is None else bias_ref[:, pl.ds(s * _BLOCK_S, _BLOCK_S)]
    first = (t * _BLOCK_T, s * _BLOCK_S)
    logits, seen = _visible_logits(q, k, bias, (query, key), first, causal)
    _, dlogits = _weights_and_logit_gradient(logits, seen, v, do, *statistics)
    return dq + plt.dot(dlogits.astype(k.dtype), k)

  dq = jnp.zeros(q.shape, jnp.float32)
  dq = jax.lax.fori_loop(0, k_ref.shape[0] // _BLOCK_S, one_tile, dq)
  dq_ref[...] = dq.astype(dq_ref.dtype)


def _key_gradient_kernel(
  q_ref, k_ref, v_ref, bias_ref, query_ref, key_ref, do_ref, highest_ref, total_ref, delta_ref,
  dk_ref, dv_ref, *, causal: bool,
) -> None:  # fmt: skip
  """One tile of keys against all queries."""
  s = pl.program_id(0)
  k, v, key = k_ref[...], v_ref[...], key_ref[...]

  def one_tile(t: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
    dk, dv = carry
    refs = (q_ref, do_ref, query_ref, highest_ref, total_ref, delta_ref)
    q, do, query, *statistics = (_tile(ref, t, _BLOCK_T) for ref in refs)
    bias = None if bias_ref is None else bias_ref[pl.ds(t * _BLOCK_T, _BLOCK_T), :]
    first = (t * _BLOCK_T, s * _BLOCK_S)
    logits, seen = _visible_logits(q, k, bias, (query, key), first, causal)
    weights, dlogits = _weights_and_logit_gradient(logits, seen, v, do, *statistics)
    dk += plt.dot(dlogits.astype(q.dtype), q, trans_a=True)
    dv += plt.dot(weights.astype(do.dtype), do, trans_a=True)
    return dk, dv

  zeros = jnp.zeros(k.shape, jnp.float32)
  dk, dv = jax.lax.fori_loop(0, q_ref.shape[0] // _BLOCK_T, one_tile, (zeros, zeros))
  dk_ref[...], dv_ref[...] = dk.astype(dk_ref.dtype), dv.astype(dv_ref.dtype)


def _bias_gradient_kernel(
  q_ref, k_ref, v_ref, bias_ref, query_ref, key_ref, do_ref, highest_ref, total_ref, delta_ref,
  dbias_ref, *, causal: bool,
) -> None:  # fmt: skip
  """One tile of the bias against all examples."""
  first = (pl.program_id(0) * _BLOCK_T, pl.program_id(1) * _BLOCK_S)
  bias = bias_ref[...]

  def one_example(b: Array, dbias: Array) -> Array:
    refs = (q_ref, k_ref, v_ref, query_ref, key_ref, do_ref, highest_ref, total_ref, delta_ref)
    q, k, v, query, key, do, *statistics = (ref[b] for ref in refs)
    logits, seen = _visible_logits(q, k, bias, (query, key), first, causal)
    return dbias + _weights_and_logit_gradient(logits, seen, v, do, *statistics)[1]

  dbias = jnp.zeros(bias.shape, jnp.float32)
  dbias_ref[...] = jax.lax.fori_loop(0, q_ref.shape[0], one_example, dbias)


def _call(
  kernel: Any, inputs: _Inputs, more: tuple, grid: str, out_shape: tuple, interpret: bool
) -> tuple:
  """Runs a kernel over tiles of the queries, of the keys, or of the bias.

  Args:
    kernel: called with references to inputs, then to `more`, then to results.
    inputs: arrays, filled up to whole tiles.
    more: gradient of the result, and three numbers a query, for backward kernels.
    grid: what a program has one tile of: query, key or bias. Of the rest it has all.
    out_shape: the results.
    interpret: whether to run without a GPU.
  """
  batch, length, heads, size = inputs.q_BTHK.shape
  keys = inputs.k_BSHK.shape[1]
  tiles: dict[str, tuple[int, ...]] = {"query": (length // _BLOCK_T,), "key": (keys // _BLOCK_S,)}
  tiles["bias"] = tiles["query"] + tiles["key"]
  spec = functools.partial(_spec, grid=grid, batch=batch)
  q_spec, k_spec = spec("t", length, size=size), spec("s", keys, size=size)
  bias_spec = None if inputs.bias_HTS is None else _bias_spec(grid, length, keys)
  ids = spec("t", length), spec("s", keys)
  statistic = spec("t", length, heads_second=True)
  specs = {"query": (q_spec, statistic, statistic), "key": (k_spec, k_spec), "bias": (bias_spec,)}
  return pl.pallas_call(
    kernel,
    grid=(*tiles[grid], heads) if grid == "bias" else (*tiles[grid], batch, heads),
    in_specs=[q_spec, k_spec, k_spec, bias_spec, *ids]
    + ([q_spec, statistic, statistic, statistic] if more else []),
    out_specs=specs[grid][: len(out_shape)],
    out_shape=out_shape,
    compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
    interpret=interpret,
    name=kernel.func.__name__.strip("_"),
  )(*inputs, *more)


def _spec(
  side: str, length: int, grid: str, batch: int, size: int | None = None, heads_second: bool = False
) -> pl.BlockSpec:
  """Returns which part of an array [B, L], [B, L, H, K] or, `heads_second`, [B, H, L] a program has."""
  block = {"t": _BLOCK_T, "s": _BLOCK_S}[side]
  tiled = grid == "bias" or grid == {"t": "query", "s": "key"}[side]
  rows = block if tiled else length

  def index(*program: Any) -> tuple:
    if grid == "bias":
      tile, example, head = program[side == "s"], 0, program[2]
    else:
      tile, example, head = program[0] if tiled else 0, program[1], program[2]
    if heads_second:
      return example, head, tile
    return (example, tile) if size is None else (example, tile, head, 0)

  examples = batch if grid == "bias" else None
  if heads_second:
    return pl.BlockSpec((examples, None, rows), index)
  return pl.BlockSpec((examples, rows) if size is None else (examples, rows, None, size), index)


def _bias_spec(grid: str, length: int, keys: int) -> pl.BlockSpec:
  """Returns which part of [H, T, S] a program has."""
  if grid == "bias":
    return pl.BlockSpec((None, _BLOCK_T, _BLOCK_S), lambda t, s, h: (h, t, s))
  if grid == "query":
    return pl.BlockSpec((None, _BLOCK_T, keys), lambda t, b, h: (h, t, 0))
  return pl.BlockSpec((None, length, _BLOCK_S), lambda s, b, h: (h, 0, s))


def _filled_up(
  q: Array, k: Array, v: Array, bias_1HTS: Array | None, segments: Segments
) -> _Inputs:
  batch, length, heads, size = q.shape
  length, keys = _whole(length, _BLOCK_T), _whole(k.shape[1], _BLOCK_S)
  size = max(_SMALLEST, pl.next_power_of_2(size))
  return _Inputs(
    _pad_to(q, (batch, length, heads, size)),
    _pad_to(k, (batch, keys, heads, size)),
    _pad_to(v, (batch, keys, heads, size)),
    None if bias_1HTS is None else _pad_to(bias_1HTS[0], (heads, length, keys)),
    _pad_to(segments.query_BT, (batch, length), _NO_QUERY),
    _pad_to(segments.key_BS, (batch, keys), _NO_KEY),
  )


def _whole(length: int, block: int) -> int:
  return -(-length // block) * block


def _pad_to(x: Array, shape: tuple[int, ...], value: int = 0) -> Array:
  widths = [(0, to - size) for size, to in zip(x.shape, shape, strict=True)]
  return jnp.pad(x, widths, constant_values=value) if any(w for _, w in widths) else x
