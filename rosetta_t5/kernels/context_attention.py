"""Fused attention of rows whose positions are split over devices ("context parallelism").

Devices exchange positions for heads: each computes the attention of whole rows for some of the heads
(DeepSpeed-Ulysses, arXiv:2309.14509).

If they cannot split the heads of keys, each device computes its own queries. It gathers the keys and values of
the whole row for the forward pass, and again for the backward pass; in between it holds only its own part. With
causality, the last queries of a row see the most keys. The devices therefore exchange queries, and hand the
results back: device i of n computes the parts i and 2n − 1 − i of the row's 2n parts (Llama 3, arXiv:2407.21783,
section 3.3.2).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rosetta_t5.kernels import flash_attention
from rosetta_t5.kernels.flash_kernels import FlashOptions, Segments


def context_attention(
  q_BTHK: Float[Array, "B T H K"],
  k_BSGK: Float[Array, "B S G K"],
  v_BSGK: Float[Array, "B S G K"],
  bias_1HTS: Float[Array, "1 _ _ _"] | None,
  segments: Segments,
  axis: str,
  options: FlashOptions,
) -> Float[Array, "B T H K"]:
  """Returns `flash_attention` of this device's part of the queries and the keys of the whole rows.

  Call it inside `jax.shard_map`.

  Args:
    q_BTHK: this device's queries.
    k_BSGK: this device's keys.
    v_BSGK: this device's values.
    bias_1HTS: the bias of this device's queries for all keys; if heads are split, of all queries for its heads.
    segments: those of all queries and all keys.
    axis: the mesh axis that splits the positions.
    options: what else is computed.
  """
  devices, length = jax.lax.axis_size(axis), q_BTHK.shape[1]
  if splits_heads(k_BSGK.shape[2], devices):
    exchange = functools.partial(jax.lax.all_to_all, axis_name=axis, tiled=True)
    of_heads = (exchange(x, split_axis=2, concat_axis=1) for x in (q_BTHK, k_BSGK, v_BSGK))
    o_BTHK = flash_attention.flash_attention(*of_heads, bias_1HTS, segments, options)
    return exchange(o_BTHK, split_axis=1, concat_axis=2)
  # A bias is as large as the logits and would have to be exchanged too.
  is_balanced = options.causal and bias_1HTS is None and length % 2 == 0
  if is_balanced:
    parts, own = 2 * devices, jnp.asarray(parts_of_devices(devices))[jax.lax.axis_index(axis)]
    q_BTHK = _exchange(q_BTHK, axis)
  else:
    parts, own = devices, jax.lax.axis_index(axis)[None]
  segments_BPT = segments.query_BT.reshape(q_BTHK.shape[0], parts, -1)
  position_PT = jnp.arange(devices * length, dtype=jnp.int32).reshape(parts, -1)
  query_BT = segments_BPT[:, own].reshape(-1, length)
  position_T = position_PT[own].reshape(-1) if options.causal or options.window else None
  of_device = Segments(query_BT, segments.key_BS, position_T)
  o_BTHK = _attend(axis, options, q_BTHK, k_BSGK, v_BSGK, bias_1HTS, of_device)
  return _exchange(o_BTHK, axis, back=True) if is_balanced else o_BTHK


def splits_heads(kv_heads: int, devices: int) -> bool:
  """Returns whether each of the devices that share a row computes all its positions for some of the heads."""
  return kv_heads % devices == 0


def parts_of_devices(devices: int) -> np.ndarray:
  """Returns the two parts of a row that each device computes: one with an even, one with an odd number.

  Before the exchange, device i has the parts 2i and 2i + 1.
  """
  parts = np.arange(2 * devices)
  owner = np.minimum(parts, 2 * devices - 1 - parts)
  halves = [parts[start::2][np.argsort(owner[start::2])] for start in (0, 1)]
  return np.stack(halves, axis=1)


def _exchange(x_BTHK: Array, axis: str, back: bool = False) -> Array:
  """Returns the parts of `parts_of_devices` from each device's part of the row, or the reverse."""
  owned = parts_of_devices(jax.lax.axis_size(axis))
  received = []
  for half, x in enumerate(jnp.split(x_BTHK, 2, axis=1)):
    pairs = [(part // 2, device) for device, part in enumerate(owned[:, half].tolist())]
    pairs = [(to, start) for start, to in pairs] if back else pairs
    received.append(jax.lax.ppermute(x, axis, pairs))
  return jnp.concatenate(received, axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(axis: str, options: FlashOptions, *operands: Any) -> Array:
  return _forward(axis, options, *operands)[0]


def _forward(
  axis: str, options: FlashOptions, q: Array, k: Array, v: Array, bias: Any, segments: Segments
) -> tuple[Array, tuple]:
  whole = _gather(k, axis), _gather(v, axis)
  out, saved = flash_attention.forward(q, *whole, bias, segments, options)
  inputs, *others = saved
  return out, (inputs._replace(k=k, v=v), *others)


def _backward(axis: str, options: FlashOptions, saved: tuple, do: Array) -> tuple:
  inputs, *others = saved
  shape = (*inputs.key_segments.shape, inputs.k.shape[2], inputs.q.shape[3])
  # Without the barrier XLA would keep the keys and values that the forward pass gathered.
  k, v, do = jax.lax.optimization_barrier((inputs.k, inputs.v, do))
  k, v = (flash_attention.pad_to(_gather(x, axis), shape) for x in (k, v))
  saved = (inputs._replace(k=k, v=v), *others)
  dq, dk, dv, dbias, _ = flash_attention.backward(options, saved, do)
  dk, dv = (jax.lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True) for x in (dk, dv))
  return dq, dk, dv, dbias, None


_attend.defvjp(_forward, _backward)


def _gather(x_BSHK: Array, axis: str) -> Array:
  return jax.lax.all_gather(x_BSHK, axis, axis=1, tiled=True)
