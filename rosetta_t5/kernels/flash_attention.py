"""Fused attention with a learned bias, segments and causality (Pallas, Triton).

No library kernel supports a learned bias together with packed segments, which T5 trains with. The
logits are never stored: the backward pass recomputes each tile (Dao et al., 2022). Tiles that
causality or segments rule out are neither read nor computed. The gradient of the bias, which is shared
by the batch, has a kernel of its own that sums over the batch in registers: sums between programs
would need atomic additions, whose order, and with it the result, differs from run to run.

Padding has segment 0. As in the XLA reference, a query that sees no key attends to all keys equally.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float

from rosetta_t5.kernels import flash_kernels
from rosetta_t5.kernels.flash_kernels import (
  FlashOptions,
  Inputs,
  Residuals,
  Segments,
  Setting,
  TileRange,
)
from rosetta_t5.telemetry.gpus import gpu_of

# Tensor cores need at least 16 of every dimension.
_SMALLEST = 16
# The lengths are padded to a multiple of this, which all tiles divide.
_LONGEST_TILE = 64
# The segments of padding inside the kernels, which differ because no query sees padding.
_NO_KEY = -1
_NO_QUERY = -2

# The dimensions that a kernel's programs are distributed over. The letters are those of shapes in
# names: b batch, t query, s key, h head, g head of keys, k head size; T and S count tiles of queries and of keys.
_GRIDS = {"forward": "tbh", "query_gradient": "tbh", "key_gradient": "sbh", "bias_gradient": "tsh"}
_INPUT_DIMS = Inputs("bthk", "bsgk", "bsgk", "hts", "bt", "bs", "t")
_RESIDUAL_DIMS = Residuals("bthk", "bht", "bht")


class Tile(NamedTuple):
  """The logits that a program computes at a time.

  Attributes:
    block_t: the number of queries.
    block_s: the number of keys.
  """

  block_t: int
  block_s: int


# The warps (of 32 threads) of a program, and how many tiles of its loop are in shared memory at once.
_WARPS, _STAGES = 4, 2
# The tiles of key_gradient and of the other kernels, by head size, up to which a row applies, and by whether
# the tensor cores take their operands from shared memory (Hopper and Blackwell data-center GPUs). Others, and
# key_gradient everywhere, hold operands or two sums in registers, so that a loop with tiles of 64 would leave
# room for one program or would spill. benchmarks/results/2026-11-22-flash-kernel.md has the figures.
_TILES = {
  (64, False): (Tile(32, 64), Tile(64, 32)),
  (64, True): (Tile(32, 64), Tile(64, 64)),
  (128, False): (Tile(32, 32), Tile(64, 32)),
  (128, True): (Tile(32, 64), Tile(64, 32)),
  (256, False): (Tile(32, 16), Tile(32, 32)),
  (256, True): (Tile(32, 32), Tile(64, 32)),
}


def _tile_of(kernel: str, size: int, device_kind: str | None) -> Tile:
  """Returns the tile of a kernel for a head size on a GPU; see `FlashOptions.gpu`."""
  gpu = gpu_of(device_kind or "")
  reads_shared_memory = gpu is not None and gpu.capability[0] in (9, 10)
  row = next((limit for limit in (64, 128) if size <= limit), 256)
  of_key_gradient, of_others = _TILES[row, reads_shared_memory]
  return of_key_gradient if kernel == "key_gradient" else of_others


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def flash_attention(
  q_BTHK: Float[Array, "B T H K"],
  k_BSGK: Float[Array, "B S G K"],
  v_BSGK: Float[Array, "B S G K"],
  bias_1HTS: Float[Array, "1 H T S"] | None,
  segments: Segments,
  options: FlashOptions,
) -> Float[Array, "B T H K"]:
  """Returns softmax(q·k + bias)·v over the keys of each query's segment, in the type of q.

  Logits and softmax are float32; the operands of matmuls keep their type.

  Args:
    q_BTHK: queries, not scaled.
    k_BSGK: keys. G divides H; consecutive heads of queries share a head of keys (grouped queries).
    v_BSGK: values.
    bias_1HTS: added to the logits; its gradient is [1, H, T, S].
    segments: which query sees which key.
    options: what else is computed.
  """
  return forward(q_BTHK, k_BSGK, v_BSGK, bias_1HTS, segments, options)[0]


def forward(
  q_BTHK: Array,
  k_BSGK: Array,
  v_BSGK: Array,
  bias_1HTS: Array | None,
  segments: Segments,
  options: FlashOptions,
) -> tuple[Array, tuple]:
  """Returns `flash_attention`, and what `backward` needs: padded inputs, outputs, and the shapes."""
  inputs = _pad_to_tiles(q_BTHK, k_BSGK, v_BSGK, bias_1HTS, segments)
  outputs = [("bthk", q_BTHK.dtype), ("bht", jnp.float32)]
  o_BTHK, log2_total_BHT = _call("forward", (inputs,), outputs, k_BSGK.shape[1], options)
  residuals = (inputs, o_BTHK, log2_total_BHT, (q_BTHK.shape, k_BSGK.shape, bias_1HTS))
  return o_BTHK[:, : q_BTHK.shape[1], :, : q_BTHK.shape[3]], residuals


def backward(options: FlashOptions, residuals: tuple, do: Array) -> tuple:
  """Returns the gradients of `flash_attention`'s arguments."""
  inputs, o_BTHK, log2_total_BHT, (q_shape, k_shape, bias_1HTS) = residuals
  do_BTHK = pad_to(do, o_BTHK.shape)
  weighted = o_BTHK.astype(jnp.float32) * do_BTHK.astype(jnp.float32)
  delta_BHT = jnp.sum(weighted, axis=-1).transpose(0, 2, 1)
  arguments = (inputs, Residuals(do_BTHK, log2_total_BHT, delta_BHT))
  run = functools.partial(_call, arguments=arguments, keys=k_shape[1], options=options)

  (dq_BTHK,) = run("query_gradient", outputs=[("bthk", inputs.q.dtype)])
  # Each head of queries has a gradient of its keys; those of a group are added.
  outputs = [("bshk", inputs.k.dtype), ("bshk", inputs.v.dtype)]
  dk_BSHK, dv_BSHK = run("key_gradient", outputs=outputs)
  dq = dq_BTHK[:, : q_shape[1], :, : q_shape[3]]
  dk, dv = (
    _sum_groups(d[:, : k_shape[1], :, : k_shape[3]], k_shape[2]) for d in (dk_BSHK, dv_BSHK)
  )
  if bias_1HTS is None:
    return dq, dk, dv, None, None
  (dbias_HTS,) = run("bias_gradient", outputs=[("hts", bias_1HTS.dtype)])
  return dq, dk, dv, dbias_HTS[None, :, : q_shape[1], : k_shape[1]], None


flash_attention.defvjp(forward, backward)


def _sum_groups(d_BSHK: Array, groups: int) -> Array:
  """Returns [B, S, G, K], the sums over the consecutive heads that share a head of keys."""
  batch, keys, heads, size = d_BSHK.shape
  return d_BSHK.reshape(batch, keys, groups, heads // groups, size).sum(axis=3)


def _call(
  name: str, arguments: tuple, outputs: Any, keys: int, options: FlashOptions
) -> tuple[Array, ...]:
  """Runs a kernel.

  Args:
    name: of the kernel, without `_kernel`.
    arguments: `Inputs` and, for the backward kernels, `Residuals`, padded to whole tiles.
    outputs: the dimensions and the type of each output.
    keys: the number of keys, without padding.
    options: what is computed.
  """
  inputs, grid = arguments[0], _GRIDS[name]
  tile = _tile_of(name, inputs.q.shape[3], options.gpu)
  kernel = getattr(flash_kernels, f"{name}_kernel")
  work, work_dims = _work(grid[:2], arguments, tile, options)
  absent = {name: None for name, array in inputs._asdict().items() if array is None}
  dims = (_INPUT_DIMS._replace(**absent), _RESIDUAL_DIMS)[: len(arguments)] + work_dims
  batch, length, heads, size = inputs.q.shape
  sizes = {"b": batch, "t": length, "s": inputs.k.shape[1], "h": heads, "k": size}
  sizes["g"] = inputs.k.shape[2]
  blocks = {"t": tile.block_t, "s": tile.block_s}
  spec = functools.partial(_block_spec, grid, sizes, blocks)
  setting = Setting(*tile, keys, options)
  return pl.pallas_call(
    functools.partial(kernel, setting=setting),
    grid=tuple(sizes[dim] // blocks.get(dim, 1) for dim in grid),
    in_specs=jax.tree.map(spec, dims),
    out_specs=tuple(spec(dims) for dims, _ in outputs),
    out_shape=tuple(
      jax.ShapeDtypeStruct(tuple(sizes[dim] for dim in dims), dtype) for dims, dtype in outputs
    ),
    compiler_params=plt.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
    interpret=options.gpu is None,
    name=kernel.__name__,
  )(*arguments, *work)


def _work(grid: str, arguments: tuple, tile: Tile, options: FlashOptions) -> tuple[tuple, tuple]:
  """Returns the arrays that state which tiles each program of a kernel computes, and their dimensions."""
  inputs = arguments[0]
  segments = Segments(inputs.query_segments, inputs.key_segments, inputs.query_positions)
  visible_BTS = visible_tiles(segments, *tile, options)
  if grid == "tb":
    return (tile_range(visible_BTS),), (TileRange("bT", "bT"),)
  if grid == "sb":
    # All heads have the same mask.
    sees_nothing_BT = jnp.isinf(arguments[1].log2_total[:, 0])
    work = (tile_range(visible_BTS.transpose(0, 2, 1)), tile_range(sees_nothing_BT))
    return work, (TileRange("bS", "bS"), TileRange("b", "b"))
  examples_TSB = jnp.argsort(~visible_BTS, axis=0).astype(jnp.int32).transpose(1, 2, 0)
  return (examples_TSB, jnp.sum(visible_BTS, axis=0, dtype=jnp.int32)), ("TSb", "TS")


def visible_tiles(
  segments: Segments, block_t: int, block_s: int, options: FlashOptions
) -> Bool[Array, "B queries keys"]:
  """Returns which tiles of `block_t` queries and `block_s` keys must be computed.

  The others have no visible pair. A tile is assumed to contain all segments between its lowest and its
  highest, which is exact for packed rows, whose segments increase. Padding sees nothing.

  Args:
    segments: of whole tiles; padding is 0 or less.
    block_t: the number of queries in a tile.
    block_s: the number of keys in a tile.
    options: causality and the window.
  """
  lowest_q, highest_q = _segment_bounds(segments.query_BT, block_t)
  lowest_k, highest_k = _segment_bounds(segments.key_BS, block_s)
  visible = lowest_q[:, :, None] <= highest_k[:, None]
  visible &= lowest_k[:, None] <= highest_q[:, :, None]
  position_T = segments.query_position_T
  if position_T is None:
    position_T = jnp.arange(visible.shape[1] * block_t)
  position_TX = position_T.reshape(-1, block_t)
  first_query, last_query = (f(position_TX, axis=1)[None, :, None] for f in (jnp.min, jnp.max))
  first_key = (jnp.arange(visible.shape[2]) * block_s)[None, None]
  if options.causal:
    visible &= last_query >= first_key
  if options.window is not None:
    before, after = options.window
    visible &= first_query - (first_key + block_s - 1) < before
    visible &= first_key - last_query < after
  return visible


def tile_range(chosen: Bool[Array, "*batch tiles"]) -> TileRange:
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


def _block_spec(
  grid: str, sizes: dict[str, int], blocks: dict[str, int], dims: str
) -> pl.BlockSpec:
  """Returns the block of an array with dimensions `dims` that a program of the grid works on."""

  def size(dim: str) -> int | None:
    # A program has one example, one head and, along T and S, which count tiles, one tile.
    return blocks.get(dim) if dim.lower() in f"{grid}g" else sizes[dim]

  def position(dim: str, program: tuple) -> Any:
    if dim == "g":
      return program[grid.index("h")] // (sizes["h"] // sizes["g"])
    return program[grid.index(dim.lower())] if dim.lower() in grid else 0

  def index(*program: Any) -> tuple:
    return tuple(position(dim, program) for dim in dims)

  return pl.BlockSpec(tuple(size(dim) for dim in dims), index)


def _pad_to_tiles(
  q: Array, k: Array, v: Array, bias_1HTS: Array | None, segments: Segments
) -> Inputs:
  batch, length, heads, size = q.shape
  length, keys = (pl.cdiv(n, _LONGEST_TILE) * _LONGEST_TILE for n in (length, k.shape[1]))
  size = max(_SMALLEST, pl.next_power_of_2(size))
  query_BT = jnp.where(segments.query_BT > 0, segments.query_BT, _NO_QUERY)
  key_BS = jnp.where(segments.key_BS > 0, segments.key_BS, _NO_KEY)
  position_T = segments.query_position_T
  return Inputs(
    pad_to(q, (batch, length, heads, size)),
    pad_to(k, (batch, keys, k.shape[2], size)),
    pad_to(v, (batch, keys, k.shape[2], size)),
    None if bias_1HTS is None else pad_to(bias_1HTS[0], (heads, length, keys)),
    pad_to(query_BT, (batch, length), _NO_QUERY),
    pad_to(key_BS, (batch, keys), _NO_KEY),
    None if position_T is None else pad_to(position_T, (length,)),
  )


def pad_to(x: Array, shape: tuple[int, ...], value: int = 0) -> Array:
  """Returns `x` with `value` appended in each dimension up to `shape`."""
  widths = [(0, to - size) for size, to in zip(x.shape, shape, strict=True)]
  return jnp.pad(x, widths, constant_values=value) if any(w for _, w in widths) else x
