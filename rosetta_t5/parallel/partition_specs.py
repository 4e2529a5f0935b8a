"""How a train state is split, whatever partitioner says so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from rosetta_t5.parallel.mesh_axes import MODEL_AXIS
from rosetta_t5.parallel.partitioner import BasePartitioner


def partition_specs_of(partitioner: BasePartitioner, train_state: Any) -> Any:
  """Returns the train state with a PartitionSpec in place of each array.

  A partitioner of one's own may, as T5X's did, leave None where an array lies whole on every device.

  Raises:
    ValueError: an array cannot be split so.
  """
  splits = jax.tree.map(
    lambda _, spec: PartitionSpec() if spec is None else spec,
    train_state,
    partitioner.get_mesh_axes(train_state),
  )
  check_partition_specs(train_state, splits, partitioner.mesh.shape)
  return splits


def check_partition_specs(train_state: Any, splits: Any, mesh: Mapping[str, int]) -> None:
  """Raises ValueError unless every array's dimensions are multiples of the axes they are split over.

  Args:
    train_state: the state's shapes.
    splits: the same tree with a PartitionSpec for each array.
    mesh: the size of each mesh axis.
  """

  def check(path: Any, array: Any, spec: PartitionSpec) -> None:
    for at, axes in enumerate(spec or ()):
      names = axes if isinstance(axes, tuple) else (axes,) if axes else ()
      parts = math.prod(mesh[name] for name in names)
      if array.shape[at] % parts:
        raise ValueError(_indivisible(path, array.shape, at, names, parts))

  jax.tree_util.tree_map_with_path(check, train_state, splits)


def _indivisible(
  path: Any, shape: tuple[int, ...], at: int, names: tuple[str, ...], parts: int
) -> str:
  name = "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
  size = shape[at]
  possible = [n for n in range(1, min(size, 4096) + 1) if size % n == 0]
  shown = ", ".join(map(str, possible[:12])) + (", …" if len(possible) > 12 else "")
  setting = "num_partitions (or mesh's 'tensor')" if names == (MODEL_AXIS,) else "mesh"
  return (
    f"{name} of shape {tuple(shape)} cannot be split over {' and '.join(names)} in {parts} parts: "
    f"{size} is no multiple of {parts}. It would go in {shown}: set "
    f"partitioning.PjitPartitioner.{setting} accordingly"
  )
