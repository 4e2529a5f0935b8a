"""T5X's `utils`: dataset and checkpoint configurations, schedules, the train-state initializer."""

from rosetta_t5.checkpoints import (
  CheckpointConfig,
  RestoreCheckpointConfig,
  SaveCheckpointConfig,
  TrainStateInitializer,
  create_checkpoint_manager_and_restore,
  create_orbax_checkpoint_manager,
  get_fallback_state,
  get_first_valid_restore_config_and_paths,
)
from rosetta_t5.checkpoints.saved_items import get_local_data
from rosetta_t5.checkpoints.train_state_initializer import restore
from rosetta_t5.compat.checkpoints.legacy_checkpointer import LegacyCheckpointManager
from rosetta_t5.compat.deterministic_data import get_deterministic_dataset
from rosetta_t5.compat.param_axes import flatten_dict_string_keys, override_params_axes_names
from rosetta_t5.compat.script_functions import (
  find_first_checkpoint_step,
  find_next_checkpoint_step,
  multihost_assert_equal,
  set_hardware_rng_ops,
  sync_global_devices,
)
from rosetta_t5.config.command_line import run_main
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
from rosetta_t5.inference.infer_fn import get_infer_fn
from rosetta_t5.telemetry.run_files import log_model_info
from rosetta_t5.training.schedules import create_learning_rate_scheduler
