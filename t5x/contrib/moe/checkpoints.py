"""T5X's `contrib.moe.checkpoints`: sparse upcycling."""

from __future__ import annotations

from typing import Any

from etils import epath

from rosetta_t5.checkpoints.arrays.state_dicts import upcycle
from rosetta_t5.parallel import BasePartitioner
from t5x.checkpoints import Checkpointer


class UpcycleCheckpointer(Checkpointer):
  """Restores a dense block as each of a layer's experts (T5X; Komatsuzaki et al. 2022, arXiv:2212.05055).

  `RestoreCheckpointConfig` uses `transform_restored_state` for checkpoints of any layout.
  """

  transform_restored_state = staticmethod(upcycle)

  def __init__(
    self,
    train_state: Any,
    partitioner: BasePartitioner,
    checkpoints_dir: epath.PathLike,
    num_experts: int,
    dataset_iterator: Any = None,
    **options: Any,
  ):
    """Creates a checkpointer; see `Checkpointer`.

    Args:
      train_state: the run's train state, whose shapes give the number of experts.
      partitioner: specifies the sharding of restored arrays.
      checkpoints_dir: the folder of checkpoints.
      num_experts: ignored; T5X's callers pass it.
      dataset_iterator: has `save(filename)` and `restore(filename)`.
      **options: further arguments of `Checkpointer`.
    """
    del num_experts
    super().__init__(train_state, partitioner, checkpoints_dir, dataset_iterator, **options)
