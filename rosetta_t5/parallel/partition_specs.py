"""The PartitionSpecs of a train state, checked against the shapes of its arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from rosetta_t5.parallel.mesh import EXPERT_AXIS, MODEL_AXIS, PIPELINE_AXIS, axis_names
from rosetta_t5.parallel.partitioner import BasePartitioner

_MAX_SUGGESTIONS = 12


def partition_specs_of(
  partitioner: BasePartitioner, train_state: Any, axis_sizes: Mapping[str, int] | None = None
) -> Any:
  """Returns the train state with a valid PartitionSpec in place of each array.

  Args:
    partitioner: the partitioner.
    train_state: the state, or its shapes.
    axis_sizes: the size of each mesh axis; None for those of the partitioner's mesh.

  Raises:
    ValueError: an array cannot be split like this, or there is a PartitionSpec where the state has no
      array.
  """
  specs = complete_specs(partitioner, train_state)
  check_partition_specs(train_state, specs, axis_sizes or partitioner.mesh.shape)
  return specs


def complete_specs(partitioner: BasePartitioner, train_state: Any) -> Any:
  """Returns the train state with a PartitionSpec in place of each array.

  A partitioner may return None for a replicated array or for parts without arrays, as T5X's did.

  Raises:
    ValueError: there is a PartitionSpec where the state has no array.
  """
  given = dict(jax.tree_util.tree_flatten_with_path(partitioner.get_mesh_axes(train_state))[0])
  specs = jax.tree_util.tree_map_with_path(
    lambda path, _: given.pop(path, None) or PartitionSpec(), train_state
  )
  if given:
    raise ValueError(
      f"{type(partitioner).__name__}.get_mesh_axes must return a tree like the train state, but the "
      f"state has no array {', '.join(map(jax.tree_util.keystr, given))}"
    )
  return specs


def check_partition_specs(train_state: Any, specs: Any, axis_sizes: Mapping[str, int]) -> None:
  """Raises ValueError unless the mesh axes divide every dimension that is split over them.

  It also raises if the mesh has a pipeline and no array has the layers that its stages would share.

  Args:
    train_state: the shapes of the state.
    specs: the same tree with a PartitionSpec for each array.
    axis_sizes: the size of each mesh axis.
  """

  def check(path: Any, array: Any, spec: PartitionSpec) -> None:
    for size, axes in zip(array.shape, spec, strict=False):
      names = axis_names(axes)
      parts = math.prod(axis_sizes[name] for name in names)
      if size % parts:
        raise ValueError(_indivisible_text(path, array.shape, size, names, parts))

  jax.tree_util.tree_map_with_path(check, train_state, specs)
  stages = axis_sizes.get(PIPELINE_AXIS)
  all_specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
  is_split = any(PIPELINE_AXIS in axis_names(axes) for spec in all_specs for axes in spec)
  if isinstance(stages, int) and stages > 1 and not is_split:
    raise ValueError(
      f"partitioning.PjitPartitioner.mesh has a pipeline of {stages} stages, but the layers are not "
      "stacked: set network.TransformerConfig.scan_layers = True, or for T5 import "
      "t5x.examples.scalable_t5.network in place of t5x.examples.t5.network, or set 'pipeline' to 1"
    )


def _indivisible_text(
  path: Any, shape: tuple[int, ...], size: int, names: tuple[str, ...], parts: int
) -> str:
  name = "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
  divisors = [str(n) for n in range(1, min(size, 4096) + 1) if size % n == 0]
  suggestions = ", ".join(divisors[:_MAX_SUGGESTIONS]) + ", …" * (len(divisors) > _MAX_SUGGESTIONS)
  settings: dict[tuple[str, ...], str] = {
    (MODEL_AXIS,): "PjitPartitioner.num_partitions (or mesh's 'tensor')",
    (PIPELINE_AXIS,): "PjitPartitioner.mesh's 'pipeline'",
    (EXPERT_AXIS,): "PjitPartitioner.mesh's 'expert' (NUM_EXPERT_PARTITIONS in T5X's runs)",
  }
  setting = settings.get(names, "PjitPartitioner.mesh")
  return (
    f"{name} of shape {tuple(shape)} cannot be split over {' and '.join(names)} into {parts} parts, "
    f"because {size} is not a multiple of {parts}. Set partitioning.{setting} so that "
    f"the number of parts is one of {suggestions}."
  )
