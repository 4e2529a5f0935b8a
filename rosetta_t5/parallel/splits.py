"""How a train state is split, whatever partitioner says so."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec

from rosetta_t5.parallel.partitioner import BasePartitioner


def splits_of(partitioner: BasePartitioner, train_state: Any) -> Any:
  """Returns the train state with a PartitionSpec in place of each array.

  A partitioner of one's own may, as T5X's did, leave None where an array lies whole on every device.
  """
  return jax.tree.map(
    lambda _, spec: PartitionSpec() if spec is None else spec,
    train_state,
    partitioner.get_mesh_axes(train_state),
  )
