"""T5X's `checkpoints`: managers, checkpointers, their data, and loading without a model."""

from rosetta_t5.checkpoints import CheckpointSaveError, OrbaxCheckpointManagerInterface
from rosetta_t5.checkpoints.arrays.lazy_arrays import LazyArray, LazyThreadPoolArray
from rosetta_t5.checkpoints.checkpoint_folders import all_steps, latest_step
from rosetta_t5.checkpoints.formats.t5x_layouts import VERSION
from rosetta_t5.checkpoints.model_dir import populate_metrics_for_steps
from rosetta_t5.checkpoints.saved_items import DatasetArgs, DatasetCheckpointHandler, get_local_data
from rosetta_t5.checkpoints.saved_items import ParameterInfo as _ParameterInfo
from rosetta_t5.compat.checkpoints.checkpoint_loading import (
  LazyAwaitableArray,
  fake_param_info,
  find_checkpoint,
  get_checkpoint_dir,
  load_t5x_checkpoint,
)
from rosetta_t5.compat.checkpoints.legacy_checkpointer import (
  Checkpointer,
  SaveBestCheckpointer,
  all_dataset_checkpoint_steps,
)
