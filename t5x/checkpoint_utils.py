"""T5X's `checkpoint_utils`: pins, removal, and what layout a checkpoint has."""

from rosetta_t5.checkpoints.folders import CheckpointTypes, detect_checkpoint_type
from rosetta_t5.checkpoints.loading import get_restore_parameters
from rosetta_t5.checkpoints.pins import (
  is_pinned_checkpoint,
  pin_checkpoint,
  pinned_checkpoint_filepath,
  remove_checkpoint_dir,
  remove_dataset_checkpoint,
  unpin_checkpoint,
)

__all__ = [
  "CheckpointTypes",
  "detect_checkpoint_type",
  "get_restore_parameters",
  "is_pinned_checkpoint",
  "pin_checkpoint",
  "pinned_checkpoint_filepath",
  "remove_checkpoint_dir",
  "remove_dataset_checkpoint",
  "unpin_checkpoint",
]
