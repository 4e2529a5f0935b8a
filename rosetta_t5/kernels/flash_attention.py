"""Fused attention with a learned bias, segments and causality (Pallas, Triton).

No library kernel supports a learned bias together with packed segments, which T5 trains with. The
logits are never stored: the backward pass recomputes each tile (Dao et al., 2022). The gradient of the
bias, which is shared by the batch, has a kernel of its own that sums over the batch in registers.

Padding has segment 0. As in the XLA reference, a query that sees no key attends to all keys equally;
keys that only pad the last tile are never visible.
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

# The number of queries and of keys in a tile.
_BLOCK_T = 64
_BLOCK_S = 64
# Tensor cores need at least 16 of every dimension.
_SMALLEST = 16
# The segments of the positions that pad the last tile; no query sees a key of this segment.
_NO_KEY = -1
_NO_QUERY = -2

# The dimensions that a kernel's programs are distributed over. The letters are those of shapes in
# names: b batch, t query, s key, h head, k head size.
_GRIDS = {"query": "tbh", "key": "sbh", "bias": "tsh"}
# The size of a program's block along such a dimension; None is one element, without the dimension.
_BLOCKS = {"t": _BLOCK_T, "s": _BLOCK_S, "b": None, "h": None}


class Segments(NamedTuple):
  """The segment of each query and each key; 0 is padding. A query sees the keys of its own segment."""

  query_BT: Int[Array, "B T"]
  key_BS: Int[Array, "B S"]


class _Inputs(NamedTuple):
  """The inputs of all kernels, padded to whole tiles; inside a kernel, references to its blocks."""

  q: Any
  k: Any
  v: Any
  bias: Any
  query: Any
  key: Any


class _Residuals(NamedTuple):
  """Further inputs of the backward kernels: the output's gradient and three numbers per query."""

  do: Any
  highest: Any
  total: Any
  delta: Any


_INPUT_DIMS = _Inputs("bthk", "bshk", "bshk", "hts", "bt", "bs")
_RESIDUAL_DIMS = _Residuals("bthk", "bht", "bht", "bht")


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

  Logits and softmax are float32; the operands of matmuls keep their type.

  Args:
    q_BTHK: queries, not scaled.
    k_BSHK: keys.
    v_BSHK: values.
    bias_1HTS: added to the logits; its gradient is [1, H, T, S].
    segments: which query sees which key.
    causal: whether a query does not see the keys after it.
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
  inputs = _pad_to_tiles(q_BTHK, k_BSHK, v_BSHK, bias_1HTS, segments)
  outputs = [("bthk", q_BTHK.dtype), ("bht", jnp.float32), ("bht", jnp.float32)]
  o_BTHK, highest_BHT, total_BHT = _call(
    _forward_kernel, "query", inputs, None, outputs, causal, interpret
  )
  residuals = (inputs, o_BTHK, highest_BHT, total_BHT, (q_BTHK.shape, k_BSHK.shape, bias_1HTS))
  return o_BTHK[:, : q_BTHK.shape[1], :, : q_BTHK.shape[3]], residuals


def _backward(causal: bool, interpret: bool, residuals: tuple, do: Array) -> tuple:
  inputs, o_BTHK, highest_BHT, total_BHT, (q_shape, k_shape, bias_1HTS) = residuals
  do_BTHK = _pad_to(do, o_BTHK.shape)
  weighted = o_BTHK.astype(jnp.float32) * do_BTHK.astype(jnp.float32)
  delta_BHT = jnp.sum(weighted, axis=-1).transpose(0, 2, 1)
  backward = _Residuals(do_BTHK, highest_BHT, total_BHT, delta_BHT)

  def call(kernel: Any, grid: str, *outputs: tuple[str, Any]) -> tuple[Array, ...]:
    return _call(kernel, grid, inputs, backward, outputs, causal, interpret)

  (dq_BTHK,) = call(_query_gradient_kernel, "query", ("bthk", inputs.q.dtype))
  dk_BSHK, dv_BSHK = call(
    _key_gradient_kernel, "key", ("bshk", inputs.k.dtype), ("bshk", inputs.v.dtype)
  )
  dq = dq_BTHK[:, : q_shape[1], :, : q_shape[3]]
  dk, dv = (d[:, : k_shape[1], :, : k_shape[3]] for d in (dk_BSHK, dv_BSHK))
  if bias_1HTS is None:
    return dq, dk, dv, None, None
  (dbias_HTS,) = call(_bias_gradient_kernel, "bias", ("hts", jnp.float32))
  dbias = dbias_HTS[None, :, : q_shape[1], : k_shape[1]].astype(bias_1HTS.dtype)
  return dq, dk, dv, dbias, None


flash_attention.defvjp(_forward, _backward)


def _visible_logits(
  q: Array, k: Array, bias: Array | None, segments: tuple, first: tuple, causal: bool
) -> tuple[Array, Array]:
  """Returns a tile's logits with T5's mask applied, and which of them have a gradient.

  Args:
    q: [t, K].
    k: [s, K].
    bias: [t, s].
    segments: those of the queries, [t], and of the keys, [s].
    first: the positions of the tile's first query and first key.
    causal: whether a query does not see the keys after it.
  """
  logits = plt.dot(q, k, trans_b=True).astype(jnp.float32)
  if bias is not None:
    logits += bias.astype(jnp.float32)
  query, key = segments[0][:, None], segments[1][None, :]
  visible = (query == key) & (key > 0)
  if causal:
    # Triton needs the shape of an iota, so these are not broadcast implicitly.
    t = first[0] + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    s = first[1] + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    visible &= t >= s
  logits = jnp.where(visible, logits, MASKED_LOGIT)
  exists = jnp.broadcast_to(key, logits.shape) != _NO_KEY
  return jnp.where(exists, logits, -jnp.inf), visible


def _key_tile(x: _Inputs, s: Array) -> tuple[Array, Array, Array, Array | None]:
  """Returns the keys, values, segments and bias of tile `s` of the keys."""
  at = pl.ds(s * _BLOCK_S, _BLOCK_S)
  return x.k[at], x.v[at], x.key[at], None if x.bias is None else x.bias[:, at]


def _forward_kernel(x: _Inputs, o_ref: Any, highest_ref: Any, total_ref: Any, causal: bool) -> None:
  """Computes one tile of queries with all keys."""
  t = pl.program_id(0)
  q, query = x.q[...], x.query[...]

  def one_tile(s: Array, carry: tuple) -> tuple:
    o, highest, total = carry
    k, v, key, bias = _key_tile(x, s)
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
  o, highest, total = jax.lax.fori_loop(0, x.k.shape[0] // _BLOCK_S, one_tile, carry)
  o_ref[...] = (o / total[:, None]).astype(o_ref.dtype)
  highest_ref[...], total_ref[...] = highest, total


def _weights_and_logit_gradient(
  logits: Array, visible: Array, v: Array, backward: _Residuals
) -> tuple[Array, Array]:
  """Returns a tile's softmax and the gradient of its logits, both float32."""
  do, highest, total, delta = backward
  weights = jnp.exp(logits - highest[:, None]) / total[:, None]
  dweights = plt.dot(do, v, trans_b=True).astype(jnp.float32)
  return weights, jnp.where(visible, weights * (dweights - delta[:, None]), 0.0)


def _query_gradient_kernel(x: _Inputs, residuals: _Residuals, dq_ref: Any, causal: bool) -> None:
  """Computes the gradient of one tile of queries from all keys."""
  t = pl.program_id(0)
  q, query, backward = x.q[...], x.query[...], _Residuals(*(ref[...] for ref in residuals))

  def one_tile(s: Array, dq: Array) -> Array:
    k, v, key, bias = _key_tile(x, s)
    first = (t * _BLOCK_T, s * _BLOCK_S)
    logits, visible = _visible_logits(q, k, bias, (query, key), first, causal)
    _, dlogits = _weights_and_logit_gradient(logits, visible, v, backward)
    return dq + plt.dot(dlogits.astype(k.dtype), k)

  dq = jnp.zeros(q.shape, jnp.float32)
  dq = jax.lax.fori_loop(0, x.k.shape[0] // _BLOCK_S, one_tile, dq)
  dq_ref[...] = dq.astype(dq_ref.dtype)


def _key_gradient_kernel(
  x: _Inputs, residuals: _Residuals, dk_ref: Any, dv_ref: Any, causal: bool
) -> None:
  """Computes the gradients of one tile of keys and values from all queries."""
  s = pl.program_id(0)
  k, v, key = x.k[...], x.v[...], x.key[...]

  def one_tile(t: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
    dk, dv = carry
    at = pl.ds(t * _BLOCK_T, _BLOCK_T)
    q, query, bias = x.q[at], x.query[at], None if x.bias is None else x.bias[at, :]
    backward = _Residuals(*(ref[at] for ref in residuals))
    first = (t * _BLOCK_T, s * _BLOCK_S)
    logits, visible = _visible_logits(q, k, bias, (query, key), first, causal)
    weights, dlogits = _weights_and_logit_gradient(logits, visible, v, backward)
    dk += plt.dot(dlogits.astype(q.dtype), q, trans_a=True)
    dv += plt.dot(weights.astype(backward.do.dtype), backward.do, trans_a=True)
    return dk, dv

  zeros = jnp.zeros(k.shape, jnp.float32)
  dk, dv = jax.lax.fori_loop(0, x.q.shape[0] // _BLOCK_T, one_tile, (zeros, zeros))
  dk_ref[...], dv_ref[...] = dk.astype(dk_ref.dtype), dv.astype(dv_ref.dtype)


def _bias_gradient_kernel(x: _Inputs, residuals: _Residuals, dbias_ref: Any, causal: bool) -> None:
  """Computes the gradient of one tile of the bias from all examples."""
  first = (pl.program_id(0) * _BLOCK_T, pl.program_id(1) * _BLOCK_S)
  bias = x.bias[...]

  def one_example(b: Array, dbias: Array) -> Array:
    q, k, v, query, key = (ref[b] for ref in (x.q, x.k, x.v, x.query, x.key))
    backward = _Residuals(*(ref[b] for ref in residuals))
    logits, visible = _visible_logits(q, k, bias, (query, key), first, causal)
    return dbias + _weights_and_logit_gradient(logits, visible, v, backward)[1]

  dbias = jnp.zeros(bias.shape, jnp.float32)
  dbias_ref[...] = jax.lax.fori_loop(0, x.q.shape[0], one_example, dbias)


def _call(
  kernel: Any,
  grid: str,
  inputs: _Inputs,
  residuals: _Residuals | None,
  outputs: Any,
  causal: bool,
  interpret: bool,
) -> tuple[Array, ...]:
  """Runs a kernel.

  Args:
    kernel: called with references to the inputs, to the residuals if there are any, and to the outputs.
    grid: the key of `_GRIDS` whose dimensions are distributed over the programs.
    inputs: arrays, padded to whole tiles.
    residuals: the further inputs of backward kernels.
    outputs: the dimensions and the type of each output.
    causal: passed to the kernel.
    interpret: whether to run without a GPU.
  """
  batch, length, heads, size = inputs.q.shape
  sizes = {"b": batch, "t": length, "s": inputs.k.shape[1], "h": heads, "k": size}
  spec = functools.partial(_block_spec, _GRIDS[grid], sizes)
  input_specs = _Inputs(*map(spec, _INPUT_DIMS))
  if inputs.bias is None:
    input_specs = input_specs._replace(bias=None)
  arguments: list[Any] = [inputs]
  in_specs: list[Any] = [input_specs]
  if residuals is not None:
    arguments.append(residuals)
    in_specs.append(_Residuals(*map(spec, _RESIDUAL_DIMS)))
  return pl.pallas_call(
    functools.partial(kernel, causal=causal),
    grid=tuple(sizes[dim] // (_BLOCKS[dim] or 1) for dim in _GRIDS[grid]),
    in_specs=in_specs,
    out_specs=tuple(spec(dims) for dims, _ in outputs),
    out_shape=tuple(
      jax.ShapeDtypeStruct(tuple(sizes[dim] for dim in dims), dtype) for dims, dtype in outputs
    ),
    compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
    interpret=interpret,
    name=kernel.__name__.strip("_"),
  )(*arguments)


def _block_spec(grid: str, sizes: dict[str, int], dims: str) -> pl.BlockSpec:
  """Returns the block of an array with dimensions `dims` that a program of the grid works on."""
  block = tuple(_BLOCKS[dim] if dim in grid else sizes[dim] for dim in dims)

  def index(*program: Any) -> tuple:
    return tuple(program[grid.index(dim)] if dim in grid else 0 for dim in dims)

  return pl.BlockSpec(block, index)


def _pad_to_tiles(
  q: Array, k: Array, v: Array, bias_1HTS: Array | None, segments: Segments
) -> _Inputs:
  batch, length, heads, size = q.shape
  length, keys = pl.cdiv(length, _BLOCK_T) * _BLOCK_T, pl.cdiv(k.shape[1], _BLOCK_S) * _BLOCK_S
  size = max(_SMALLEST, pl.next_power_of_2(size))
  return _Inputs(
    _pad_to(q, (batch, length, heads, size)),
    _pad_to(k, (batch, keys, heads, size)),
    _pad_to(v, (batch, keys, heads, size)),
    None if bias_1HTS is None else _pad_to(bias_1HTS[0], (heads, length, keys)),
    _pad_to(segments.query_BT, (batch, length), _NO_QUERY),
    _pad_to(segments.key_BS, (batch, keys), _NO_KEY),
  )


def _pad_to(x: Array, shape: tuple[int, ...], value: int = 0) -> Array:
  widths = [(0, to - size) for size, to in zip(x.shape, shape, strict=True)]
  return jnp.pad(x, widths, constant_values=value) if any(w for _, w in widths) else x
