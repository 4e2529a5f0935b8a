"""Layers and functions of parameters written so that XLA for GPUs fuses their operations into few kernels.

The numbers are the same but for rounding. XLA fuses the addition of one array into a matmul, and a norm into
one kernel, only if the program has the form for it (benchmarks/results/2026-11-23-fusion-bytes.md).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from rosetta_t5.networks.layers.matmuls import flat_row_axes
from rosetta_t5.parallel.placement import current, target_device


def computes_on_gpu(module: nn.Module) -> bool:
  """Returns whether a program for a GPU is traced; False for initial values, which need no device."""
  return not module.is_initializing() and target_device().platform == "gpu"


def with_common_factor(tree: Any) -> Any:
  """Returns the arrays, unchanged in value; a GPU then computes what is done with each of them in fewer kernels.

  XLA fuses the same operation on several arrays of one shape into one kernel only if all of them also read one array
  that is not a scalar. So each array is multiplied by an element of an array of ones, which a barrier hides from XLA:
  it cannot remove the factor.
  """
  if target_device().platform != "gpu":
    return tree
  factors = jax.lax.optimization_barrier(jnp.ones(2))
  return jax.tree.map(lambda x: x * factors[0].astype(x.dtype), tree)


def cast_parameter(x: jax.Array, dtype: Any) -> jax.Array:
  """Returns a parameter in the type of its layer; a GPU casts several parameters of one shape in one kernel."""
  return x if x.dtype == dtype else with_common_factor(x).astype(dtype)


def square_sums(tree: Any) -> list[jax.Array]:
  """Returns the sum of squares of each array, computed in float32."""
  arrays = [jnp.atleast_1d(x).astype(jnp.float32) for x in jax.tree.leaves(tree)]
  if target_device().platform != "gpu":
    return [jnp.sum(jnp.square(x)) for x in arrays]
  sums: dict[int, jax.Array] = {}
  for shape in dict.fromkeys(x.shape for x in arrays):
    same = [index for index, x in enumerate(arrays) if x.shape == shape]
    total = sums_of_squares([arrays[index] for index in same], range(len(shape)))
    sums |= zip(same, total.ravel(), strict=True)
  return [sums[index] for index in range(len(arrays))]


def sums_of_squares(arrays: Sequence[jax.Array], axis: Sequence[int]) -> jax.Array:
  """Returns the sum of squares of each of N arrays of one shape over `axis`, whose dimensions become 1: [N, ...].

  A GPU first adds up the part of each row that a device has or, where rows are kept, groups of up to 16 rows. XLA
  needs two kernels for the sum of a large array, and fuses only the first of them with those of other arrays; sums
  over long columns it does not fuse at all.
  """
  if target_device().platform != "gpu" or not axis:
    return jnp.stack([jnp.sum(jnp.square(x), axis=tuple(axis), keepdims=True) for x in arrays])
  shape, dim = arrays[0].shape, max(axis)
  is_row = dim == len(shape) - 1
  # However the dimension is split over devices, each part of it is on one device.
  shards = math.gcd(shape[dim], max(1, current().mesh.size))
  parts = (shards, -1) if is_row else (-1, math.gcd(shape[dim] // shards, 16))
  split = (*shape[:dim], *parts, *shape[dim + 1 :])
  sums = jnp.stack([jnp.sum(jnp.square(x.reshape(split)), axis=dim + 1) for x in arrays])
  if not is_row:  # or XLA would transpose the sums of each array
    sums = with_layout_constraint(sums, Layout(major_to_minor=tuple(range(sums.ndim))))
  return jnp.sum(sums, axis=[dim + 1 for dim in axis], keepdims=True)


def global_norm(tree: Any) -> jax.Array:
  """Returns the L2 norm over all arrays in float32."""
  return jnp.sqrt(sum(square_sums(tree), start=jnp.float32(0)))


def separate_from_matmul(module: nn.Module, x: jax.Array) -> jax.Array:
  """Returns a matmul's result such that XLA does not make what follows a part of the matmul on a GPU.

  XLA would have the matmul write a gelu's input and output, which costs more than the elementwise
  kernel that reads the result anyway.
  """
  return jax.lax.optimization_barrier(x) if computes_on_gpu(module) else x


def add_residual(
  module: nn.Module, x: jax.Array, residual: jax.Array, row_axes: tuple[str, str]
) -> jax.Array:
  """Returns the sum of a matmul's result and the input of its block, both [..., D].

  On a GPU the rows are added before they get their leading dimensions again. XLA then adds them inside
  the matmul; otherwise it would copy the residual first.
  """
  if not _has_flat_rows(module, row_axes):
    return x + residual
  rows = (-1, x.shape[-1])
  return (x.reshape(rows) + residual.reshape(rows)).reshape(x.shape)


def store_rows(module: nn.Module, x: jax.Array, row_axes: tuple[str, str]) -> jax.Array:
  """Returns the input of the first layer, [..., D], such that a GPU computes it once.

  XLA would look up the tokens' vectors again for the first norm, and copy them for the first residual.
  """
  if not _has_flat_rows(module, row_axes):
    return x
  return jax.lax.optimization_barrier(x.reshape(-1, x.shape[-1])).reshape(x.shape)


def _has_flat_rows(module: nn.Module, row_axes: tuple[str, str]) -> bool:
  """Returns whether a program for a GPU is traced, whose matmuls flatten rows."""
  return computes_on_gpu(module) and len(flat_row_axes(row_axes)) == 1


def projection_inputs(
  module: nn.Module, inputs_q: jax.Array, inputs_kv: jax.Array
) -> tuple[jax.Array, ...]:
  """Returns the inputs of the query, key and value projections.

  On a GPU, the sum of their gradients is computed in the matmuls.
  """
  if not computes_on_gpu(module):
    return inputs_q, inputs_kv, inputs_kv
  if inputs_q is inputs_kv:
    return _share(inputs_kv, 3)
  return inputs_q, *_share(inputs_kv, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _share(x: jax.Array, number: int) -> tuple[jax.Array, ...]:
  """Returns x `number` times. In its gradient, each matmul can add the sum of those after it."""
  return (x,) * number


def _share_backward(number: int, _: None, grads: tuple[jax.Array, ...]) -> tuple[jax.Array]:
  del number
  # XLA makes a sum a part of its first operand's matmul, unless that matmul already adds something.
  return (functools.reduce(lambda total, grad: grad + total, reversed(grads)),)


_share.defvjp(lambda x, number: ((x,) * number, None), _share_backward)
