"""T5X's `checkpoint_utils`: pins, removal, and detection of a checkpoint's format."""

from rosetta_t5.checkpoints.checkpoint_folders import CheckpointTypes, detect_checkpoint_type
from rosetta_t5.checkpoints.saved_items import *
