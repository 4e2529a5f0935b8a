"""Where an activation is to lie on the mesh, by the names of its dimensions; work that stays with its part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from flax.linen import partitioning as flax_partitioning

_Result = TypeVar("_Result")


def with_sharding_constraint(x: jax.Array, names: Sequence[str | None]) -> jax.Array:
  """Returns `x`, split as the axis rules say; where there are no rules or no mesh, as it is.

  Flax's function of this name; but a dimension that its mesh axes do not divide stays whole, such as
  the one position of a decoding step where positions are split.

  Args:
    x: an activation.
    names: the logical axis of each dimension, or None.
  """
  rules, mesh = flax_partitioning.get_axis_rules(), jax.sharding.get_abstract_mesh()
  if not rules or mesh.empty:
    return x
  spec = flax_partitioning.logical_to_mesh_axes(tuple(names), rules) or ()
  whole = [size % _parts(axes, mesh.shape) != 0 for size, axes in zip(x.shape, spec, strict=True)]
  if not any(whole):
    return flax_partitioning.with_sharding_constraint(x, tuple(names))
  kept = [None if is_whole else axes for is_whole, axes in zip(whole, spec, strict=True)]
  return jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(*kept))


def map_over_batch(fn: Callable[[jax.Array], _Result], x: jax.Array) -> _Result:
  """Returns fn(x), which each device computes of its own rows of the batch.

  For what XLA would first bring together on every device, since it cannot split it: top-k. Where there
  are no rules or no mesh, or these do not split the batch, it is called as it is.

  Args:
    fn: takes each row by itself; gives arrays whose first dimension is the batch.
    x: [batch, ...].
  """
  rules, mesh = flax_partitioning.get_axis_rules(), jax.sharding.get_abstract_mesh()
  if not rules or mesh.empty:
    return fn(x)
  (axes,) = flax_partitioning.logical_to_mesh_axes(("batch",), rules) or (None,)
  if axes is None or x.shape[0] % _parts(axes, mesh.shape) != 0:
    return fn(x)
  rows = jax.sharding.PartitionSpec(axes)
  mapped: _Result = jax.shard_map(fn, in_specs=rows, out_specs=rows)(x)
  return mapped


def _parts(axes: Any, sizes: Any) -> int:
  return math.prod(sizes[axis] for axis in (axes if isinstance(axes, tuple) else (axes,)) if axis)
