"""Checkpoints: written in T5X's Orbax layout in the background, and read from any layout."""

from rosetta_t5.checkpoints.config import (
  CheckpointConfig,
  RestoreCheckpointConfig,
  SaveCheckpointConfig,
)
from rosetta_t5.checkpoints.formats.hugging_face.folder import is_hugging_face, local_folder
from rosetta_t5.checkpoints.formats.hugging_face.source_config import source_fact
from rosetta_t5.checkpoints.manager import STARTED_FROM, OrbaxCheckpointManagerInterface
from rosetta_t5.checkpoints.mismatch import CheckpointMismatchError
from rosetta_t5.checkpoints.model_dir.checkpoint_folders import (
  all_steps,
  check_checkpoints_exist,
  checkpoint_path,
  latest_step,
  read_run_facts,
  resolve_checkpoint,
)
from rosetta_t5.checkpoints.model_dir.lock import ModelDirInUseError, exclusive_model_dir
from rosetta_t5.checkpoints.reading import UnreadableCheckpointError, values_checksum
from rosetta_t5.checkpoints.restore import (
  VOCABULARIES,
  check_compatibility,
  check_source_configs,
  check_vocabularies,
  create_orbax_checkpoint_manager,
  get_fallback_state,
  get_first_valid_restore_config_and_paths,
  restore,
)
from rosetta_t5.checkpoints.run_start import (
  create_checkpoint_manager_and_restore,
  find_base_checkpoint,
  find_start_checkpoint,
  read_start_facts,
  restored_checkpoint,
)
from rosetta_t5.checkpoints.saved_state import CheckpointSaveError, finish_saves_on_error
from rosetta_t5.checkpoints.train_state_initializer import (
  TrainStateInitializer,
  restore_for_inference,
)
