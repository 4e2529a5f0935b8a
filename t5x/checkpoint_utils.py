"""T5X's `checkpoint_utils`: pins, removal, and detection of a checkpoint's format."""

from rosetta_t5.checkpoints.checkpoint_folders import (
  CheckpointTypes,
  detect_checkpoint_type,
)
from rosetta_t5.checkpoints.model_dir import (
  is_pinned_checkpoint,
  pin_checkpoint,
  pinned_checkpoint_filepath,
  remove_checkpoint_dir,
  remove_dataset_checkpoint,
  unpin_checkpoint,
)
