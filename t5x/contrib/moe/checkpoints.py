"""T5X's `contrib.moe.checkpoints`: sparse upcycling."""

from typing import Any

from rosetta_t5.checkpoints.arrays.state_dicts import upcycle
from t5x.checkpoints import Checkpointer


class UpcycleCheckpointer(Checkpointer):
  """Restores a dense block as each of a layer's experts (T5X; Komatsuzaki et al. 2022, arXiv:2212.05055).

  `RestoreCheckpointConfig` uses `transform_restored_state` for checkpoints of any layout.
  """

  transform_restored_state = staticmethod(upcycle)

  def __init__(self, *arguments: Any, num_experts: int, **options: Any):
    """Creates a `Checkpointer` with its arguments; the train state's shapes give the number of experts."""
    super().__init__(*arguments, **options)
