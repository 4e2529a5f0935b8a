"""Checkpoints: written in T5X's Orbax layout in the background, and read from any layout."""

from rosetta_t5.checkpoints.adapter_checkpoints import adapter_facts, add_prompt
from rosetta_t5.checkpoints.checkpoint_folders import (
  UnreadableCheckpointError,
  all_steps,
  checkpoint_path,
  fingerprint,
  latest_step,
  read_run_facts,
)
from rosetta_t5.checkpoints.config import (
  CheckpointConfig,
  RestoreCheckpointConfig,
  SaveCheckpointConfig,
  create_orbax_checkpoint_manager,
  find_checkpoints,
  get_first_valid_restore_config_and_paths,
)
from rosetta_t5.checkpoints.formats.hugging_face.folder import is_hugging_face, local_folder
from rosetta_t5.checkpoints.formats.hugging_face.peft_folder import find_base, is_peft
from rosetta_t5.checkpoints.manager import STARTED_FROM, OrbaxCheckpointManagerInterface
from rosetta_t5.checkpoints.restore import CheckpointMismatchError, find_matching_arrays
from rosetta_t5.checkpoints.run_start import (
  SOURCE_CONFIG,
  VOCABULARIES,
  check_model,
  create_checkpoint_manager_and_restore,
  exclusive_model_dir,
  find_start_checkpoint,
  read_source_config,
  read_start_facts,
  restore_for_inference,
)
from rosetta_t5.checkpoints.saved_items import (
  CheckpointSaveError,
  best_checkpoint,
  checkpoint_to_use,
  finish_saves_on_error,
)
from rosetta_t5.checkpoints.train_state_initializer import TrainStateInitializer, get_fallback_state
