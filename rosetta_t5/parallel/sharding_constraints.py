"""Shardings of activations inside a program, given by the logical names of their dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from flax.linen import partitioning as flax_partitioning
from jax.sharding import PartitionSpec

from rosetta_t5.parallel.mesh import CONTEXT_AXIS, axis_names

_Result = TypeVar("_Result")


def with_sharding_constraint(x: jax.Array, names: Sequence[str | None]) -> jax.Array:
  """Returns `x`, split as the axis rules specify; without rules or a mesh, returns it unchanged.

  It differs from flax's function of the same name in one case: a dimension that its mesh axes do not
  divide is not split, such as the single position of a decoding step under sequence parallelism.

  Args:
    x: an activation.
    names: the logical axis of each dimension, or None.
  """
  rules, mesh = flax_partitioning.get_axis_rules(), jax.sharding.get_abstract_mesh()
  if not rules or mesh.empty:
    return x
  spec = flax_partitioning.logical_to_mesh_axes(tuple(names), rules) or ()
  kept = [
    axes if size % _count_parts(axes, mesh.shape) == 0 else None
    for size, axes in zip(x.shape, spec, strict=True)
  ]
  if kept == list(spec):
    return flax_partitioning.with_sharding_constraint(x, tuple(names))
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*kept))


def dividing_axes(names: Sequence[str | None], shape: Sequence[int]) -> tuple[Any, ...]:
  """Returns the mesh axes over which the axis rules split each dimension, as in a PartitionSpec.

  It is None for a dimension that is not split, also because its mesh axes do not divide it.

  Args:
    names: the logical axis of each dimension of an activation or a matmul, or None.
    shape: its sizes.
  """
  rules, mesh = flax_partitioning.get_axis_rules(), jax.sharding.get_abstract_mesh()
  if not rules or mesh.empty:
    return (None,) * len(shape)
  spec = flax_partitioning.logical_to_mesh_axes(tuple(names), rules) or ()
  counts = [_count_parts(axes, mesh.shape) for axes in spec]
  return tuple(
    axes if count > 1 and size % count == 0 else None
    for axes, size, count in zip(spec, shape, counts, strict=True)
  )


def map_over_batch(fn: Callable[[jax.Array], _Result], x: jax.Array) -> _Result:
  """Returns fn(x), where each device computes its own rows of the batch.

  Use it for operations that XLA cannot partition, such as top-k, and would otherwise compute on every
  device after an all-gather. Without axis rules or a mesh, or if these do not split the batch, it
  just calls `fn`.

  Args:
    fn: treats each row independently; returns arrays whose first dimension is the batch.
    x: [batch, ...].
  """
  (axes,) = dividing_axes(("batch",), x.shape[:1])
  if axes is None:
    return fn(x)
  rows = PartitionSpec(axes)
  mapped: _Result = jax.shard_map(fn, in_specs=rows, out_specs=rows)(x)
  return mapped


def count_shards(name: str) -> int:
  """Returns into how many parts the axis rules split the logical axis `name`; 1 without a mesh."""
  (axes,) = dividing_axes((name,), (0,))
  return _count_parts(axes, jax.sharding.get_abstract_mesh().shape)


def context_shards(*lengths: int) -> int:
  """Returns into how many parts the mesh axis `context` splits rows; 1 without a mesh.

  Rows of lengths that it does not divide are not split. Training refuses such lengths.
  """
  mesh = jax.sharding.get_abstract_mesh()
  shards = 1 if mesh.empty else mesh.shape.get(CONTEXT_AXIS, 1)
  return 1 if any(length % shards for length in lengths) else int(shards)


def _count_parts(axes: Any, axis_sizes: Any) -> int:
  return math.prod(axis_sizes[name] for name in axis_names(axes))


def target_device() -> Any:
  """Returns a device of the mesh in use (`jax.set_mesh`), or else jax's first device.

  The result has a `platform`, such as "gpu", and a `device_kind`. Code that asks for jax's default
  backend instead is wrong when it traces a GPU program on a machine without a GPU.
  """
  return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
