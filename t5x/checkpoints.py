"""T5X's `checkpoints`: managers and checkpointers, what they store, and loading without a model."""

from rosetta_t5.checkpoints import CheckpointSaveError, OrbaxCheckpointManagerInterface
from rosetta_t5.checkpoints.best_metric import populate_metrics_for_steps
from rosetta_t5.checkpoints.dataset_item import DatasetArgs, DatasetCheckpointHandler
from rosetta_t5.checkpoints.folders import all_steps, latest_step
from rosetta_t5.checkpoints.lazy_arrays import LazyArray, LazyAwaitableArray, LazyThreadPoolArray
from rosetta_t5.checkpoints.legacy import (
  Checkpointer,
  SaveBestCheckpointer,
  all_dataset_checkpoint_steps,
)
from rosetta_t5.checkpoints.loading import (
  fake_param_info,
  find_checkpoint,
  get_checkpoint_dir,
  load_t5x_checkpoint,
  register_ts_spec_for_serialization,
)
from rosetta_t5.checkpoints.protocols import (
  CheckpointerConstructor,
  CheckpointManagerConstructor,
  RestoreStateTransformationFn,
  SaveStateTransformationFn,
)
from rosetta_t5.checkpoints.saved_state import get_local_data

__all__ = [
  "CheckpointManagerConstructor",
  "CheckpointSaveError",
  "Checkpointer",
  "CheckpointerConstructor",
  "DatasetArgs",
  "DatasetCheckpointHandler",
  "LazyArray",
  "LazyAwaitableArray",
  "LazyThreadPoolArray",
  "OrbaxCheckpointManagerInterface",
  "RestoreStateTransformationFn",
  "SaveBestCheckpointer",
  "SaveStateTransformationFn",
  "all_dataset_checkpoint_steps",
  "all_steps",
  "fake_param_info",
  "find_checkpoint",
  "get_checkpoint_dir",
  "get_local_data",
  "latest_step",
  "load_t5x_checkpoint",
  "populate_metrics_for_steps",
  "register_ts_spec_for_serialization",
]
