"""T5X's `checkpoints`: the manager that saves and restores, and what it stores."""

from rosetta_t5.checkpoints import CheckpointSaveError, OrbaxCheckpointManagerInterface
from rosetta_t5.checkpoints.dataset_item import DatasetArgs, DatasetCheckpointHandler
from rosetta_t5.checkpoints.folders import all_steps, latest_step
from rosetta_t5.checkpoints.legacy import Checkpointer, SaveBestCheckpointer
from rosetta_t5.checkpoints.manager import get_local_data

__all__ = [
  "CheckpointSaveError",
  "Checkpointer",
  "DatasetArgs",
  "DatasetCheckpointHandler",
  "OrbaxCheckpointManagerInterface",
  "SaveBestCheckpointer",
  "all_steps",
  "get_local_data",
  "latest_step",
]
