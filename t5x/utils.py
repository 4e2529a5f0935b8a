"""T5X's `utils`: dataset and checkpoint configurations, schedules, the train state's initialiser."""

from rosetta_t5.checkpoints import (
  CheckpointConfig,
  RestoreCheckpointConfig,
  SaveCheckpointConfig,
  TrainStateInitializer,
  create_checkpoint_manager_and_restore,
  create_orbax_checkpoint_manager,
  get_fallback_state,
  get_first_valid_restore_config_and_paths,
  restore,
)
from rosetta_t5.checkpoints.legacy_manager import LegacyCheckpointer, LegacyCheckpointManager
from rosetta_t5.data import (
  DatasetConfig,
  ShardedDatasetIterator,
  get_dataset,
  get_dataset_inner,
  get_training_eval_datasets,
  get_vocabulary,
  get_zeros_batch_like_dataset,
  get_zeros_batch_like_spec,
  import_module,
  prepare_train_iter,
  round_vocab_size_to_multiple,
  verify_matching_vocabs,
)
from rosetta_t5.telemetry.model_info import (
  log_model_info,
)
from rosetta_t5.training.schedules import (
  create_learning_rate_scheduler,
)

__all__ = [
  "CheckpointConfig",
  "DatasetConfig",
  "LegacyCheckpointManager",
  "LegacyCheckpointer",
  "RestoreCheckpointConfig",
  "SaveCheckpointConfig",
  "ShardedDatasetIterator",
  "TrainStateInitializer",
  "create_checkpoint_manager_and_restore",
  "create_learning_rate_scheduler",
  "create_orbax_checkpoint_manager",
  "get_dataset",
  "get_dataset_inner",
  "get_fallback_state",
  "get_first_valid_restore_config_and_paths",
  "get_training_eval_datasets",
  "get_vocabulary",
  "get_zeros_batch_like_dataset",
  "get_zeros_batch_like_spec",
  "import_module",
  "log_model_info",
  "prepare_train_iter",
  "restore",
  "round_vocab_size_to_multiple",
  "verify_matching_vocabs",
]
