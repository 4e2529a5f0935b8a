"""How a training run begins: it finds the checkpoint to start from and restores it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from rosetta_t5.checkpoints.checkpoint_folders import (
  all_steps,
  checkpoint_path,
  older_steps,
  read_run_facts,
  step_of,
)
from rosetta_t5.checkpoints.config import (
  CheckpointConfig,
  RestoreCheckpointConfig,
  SaveCheckpointConfig,
  create_orbax_checkpoint_manager,
  get_first_valid_restore_config_and_paths,
)
from rosetta_t5.checkpoints.manager import STARTED_FROM, OrbaxCheckpointManagerInterface
from rosetta_t5.checkpoints.restore import UnreadableCheckpointError
from rosetta_t5.checkpoints.source_config import check_source_configs
from rosetta_t5.checkpoints.train_state_initializer import TrainStateInitializer, restore
from rosetta_t5.distributed.coordination import allgather_text, broadcast_text
from rosetta_t5.manifest import DamagedFileError
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.training.train_state import TrainState

# The run fact with digests of the vocabularies by side ("input", "output").
VOCABULARIES = "vocabularies"
# How long a process waits for another one that reads more, or from a slower disk.
_TIMEOUT_S = 3600.0

_log = logging.getLogger(__name__)


def find_start_checkpoint(
  checkpoint_cfg: CheckpointConfig, model_dir: epath.PathLike, total_steps: int | None = None
) -> tuple[RestoreCheckpointConfig | None, str | None]:
  """Returns what a training run in `model_dir` restores: a config and the path of one checkpoint.

  The latest checkpoint in `model_dir` is preferred to `checkpoint_cfg.restore`. (None, None) means
  that the run starts from scratch. With `total_steps`, the step at which the run ends, the checkpoint
  must be from before it.

  Raises:
    ValueError: `checkpoint_cfg.restore` names several checkpoints, or none although it does not
      allow a start from scratch, or the run would end before it begins.
  """
  save, given = checkpoint_cfg.save or SaveCheckpointConfig(), checkpoint_cfg.restore
  own = RestoreCheckpointConfig(
    path=os.fspath(model_dir), mode="latest", dtype=save.dtype, restore_dataset=save.save_dataset
  )
  cfg, paths = get_first_valid_restore_config_and_paths([own, given] if given else [own])
  if len(paths) > 1:
    raise ValueError(
      f"RestoreCheckpointConfig names {len(paths)} checkpoints ({', '.join(paths[:3])}, ...), but "
      "training starts from one: set mode = 'latest' or 'specific' and one path"
    )
  ignored_until = save.ignore_dataset_until
  if cfg is own and ignored_until is not None and (step_of(paths[0]) or 0) <= ignored_until:
    own.restore_dataset = False
  if cfg is None and given and given.paths() and not given.fallback_to_scratch:
    raise ValueError(_no_checkpoint_text(given))
  step = step_of(paths[0]) if paths and epath.Path(paths[0]).exists() else None
  # A restart of a run that is complete is allowed.
  if step is not None and total_steps is not None and step >= total_steps + (cfg is own):
    raise ValueError(
      f"TRAIN_STEPS (train.total_steps) must be more than {step}, the step of {paths[0]}, from which the "
      f"run starts, got {total_steps}: it is the step at which the run ends. Set TRAIN_STEPS = "
      f"{step + total_steps}, or TRAIN_STEPS_RELATIVE (train.relative_steps) = {total_steps}, to train "
      f"{total_steps} more steps"
    )
  return cfg, paths[0] if paths else None


def find_base_checkpoint(
  checkpoint_cfg: CheckpointConfig, start_facts: Mapping[str, Any], restore_path: str | None
) -> str | None:
  """Returns the checkpoint with which a finetuning run began, which must not be deleted; else None.

  Args:
    checkpoint_cfg: the run's configuration. Without a checkpoint to restore, the run does not
      finetune.
    start_facts: the result of `read_start_facts`. A restart finds the base checkpoint in them.
    restore_path: the checkpoint that the run, or its restart, restores.
  """
  if restore_path is None or checkpoint_cfg.restore is None or not checkpoint_cfg.restore.paths():
    return None
  return start_facts.get(STARTED_FROM) or os.fspath(restore_path)


def read_start_facts(model_dir: epath.PathLike, restore_path: str | None) -> dict[str, Any]:
  """Returns the run facts with which a run in `model_dir` continues; {} if it starts anew.

  If those of `restore_path` are damaged or missing, they are read from the checkpoints before it, to
  which the run falls back.
  """
  if restore_path is None or epath.Path(restore_path).parent != epath.Path(model_dir):
    return {}
  paths = [checkpoint_path(model_dir, step) for step in reversed(older_steps(restore_path))]
  for path in (restore_path, *paths):
    with contextlib.suppress(ValueError):
      if facts := read_run_facts(path):
        return facts
  return {}


def restored_checkpoint(restore_path: str | None, step: int) -> str | None:
  """Returns the checkpoint that was restored: `restore_path`, or if it was damaged, that of `step`."""
  if restore_path is None or epath.Path(restore_path).exists():
    return restore_path
  return os.fspath(checkpoint_path(epath.Path(restore_path).parent, step))


def check_vocabularies(
  digests: Mapping[str, str], restore_cfg: RestoreCheckpointConfig | None
) -> None:
  """Checks that a model's vocabularies have the contents with which its checkpoints were trained.

  With others of the same size, the parameters would give meaningless texts without an error.

  Args:
    digests: the contents of the model's vocabularies, by side (`data.vocabulary_digests`).
    restore_cfg: the checkpoints. Those of other programs do not have the digests and are not checked.

  Raises:
    ValueError: a vocabulary differs.
  """
  _, paths = get_first_valid_restore_config_and_paths([restore_cfg] if restore_cfg else [])
  for path in paths:
    trained: Mapping[str, str] = {}
    with contextlib.suppress(DamagedFileError):  # raised again by the restore
      trained = read_run_facts(path).get(VOCABULARIES) or {}
    if changed := [side for side in digests if trained.get(side, digests[side]) != digests[side]]:
      raise ValueError(
        f"The model's vocabulary ({', '.join(changed)}) is not the one with which {path} was trained: "
        "its file was replaced, or another was chosen. Use the original file. If you want the other "
        "one, train and infer accept it with verify_matching_vocabs_fn = None"
      )


def restore_for_inference(
  model: Any,
  restore_cfg: RestoreCheckpointConfig,
  partitioner: BasePartitioner,
  task_feature_lengths: Mapping[str, int],
) -> tuple[Any, Any]:
  """Returns an `InferenceState` of one checkpoint, and the same with PartitionSpecs in place of arrays.

  Args:
    model: the model.
    restore_cfg: the checkpoint.
    partitioner: specifies how the parameters are sharded.
    task_feature_lengths: the lengths of the features.

  Raises:
    ValueError: there is no checkpoint, it belongs to another model, or the features are not the model's.
  """
  converter = model.FEATURE_CONVERTER_CLS(pack=False)
  if set(task_feature_lengths or ()) != set(converter.TASK_FEATURES):
    raise ValueError(
      f"The lengths of the training data must be those of {', '.join(converter.TASK_FEATURES)}, got "
      f"{task_feature_lengths} (task_feature_lengths)"
    )
  lengths = converter.get_model_feature_lengths(task_feature_lengths)
  initializer = TrainStateInitializer(
    optimizer_def=None,
    init_fn=model.get_initial_variables,
    input_shapes={name: (1, length) for name, length in lengths.items()},
    partitioner=partitioner,
  )
  check_source_configs(model, restore_cfg)
  state = initializer.from_checkpoint([restore_cfg])
  if state is None:
    raise ValueError(
      f"There is no checkpoint in {restore_cfg.path} (mode = {restore_cfg.mode!r}): give another path "
      "(RestoreCheckpointConfig.path), or train first, with utils.CheckpointConfig.save"
    )
  return state, initializer.train_state_axes


def create_checkpoint_manager_and_restore(
  train_state_initializer: TrainStateInitializer,
  partitioner: BasePartitioner,
  restore_checkpoint_cfg: RestoreCheckpointConfig | None,
  restore_path: str | None,
  fallback_init_rng: jax.Array | None,
  save_checkpoint_cfg: SaveCheckpointConfig | None = None,
  model_dir: epath.PathLike | None = None,
  ds_iter: Any = None,
  use_orbax: bool = False,
) -> tuple[TrainState | None, OrbaxCheckpointManagerInterface | None]:
  """Returns (restored train state or None, manager or None), with which a run begins.

  Args:
    train_state_initializer: knows the train state's shapes.
    partitioner: specifies the sharding of restored arrays.
    restore_checkpoint_cfg: how to restore (`find_start_checkpoint` returns it with the path).
    restore_path: the checkpoint to restore, or None.
    fallback_init_rng: for values that the checkpoint lacks, if the config allows that.
    save_checkpoint_cfg: how to save; None for a manager that only restores.
    model_dir: the folder to save into.
    ds_iter: the training data's iterator.
    use_orbax: T5X's switch between layouts. It has no effect: checkpoints have Orbax's layout.

  Raises:
    CheckpointMismatchError: the checkpoint belongs to another model.
    UnreadableCheckpointError: the checkpoint is damaged.
  """
  del use_orbax
  if save_checkpoint_cfg is None and restore_path is None:
    return None, None
  shapes = train_state_initializer.global_train_state_shape
  manager = create_orbax_checkpoint_manager(
    save_cfg=save_checkpoint_cfg,
    restore_cfg=restore_checkpoint_cfg,
    train_state=shapes,
    partitioner=partitioner,
    ds_iter=ds_iter,
    model_dir=model_dir,
  )
  cfg = restore_checkpoint_cfg
  if restore_path is None or cfg is None:
    return None, manager
  fallback_state = train_state_initializer.fallback_state(
    manager, [restore_path], cfg, fallback_init_rng
  )
  state = _restore_latest_undamaged(manager, restore_path, cfg, fallback_state, model_dir)
  return state, manager


def _restore_latest_undamaged(
  manager: OrbaxCheckpointManagerInterface,
  path: str,
  cfg: RestoreCheckpointConfig,
  fallback_state: Mapping[str, Any] | None,
  model_dir: epath.PathLike | None,
) -> Any:
  """Restores `path`, or if it is MODEL_DIR's latest checkpoint and damaged, the one before it."""
  while True:
    state, failure = None, None
    try:
      state = restore(manager, path, cfg, fallback_state)
    except UnreadableCheckpointError as error:
      failure = error
    # A process sees only damage in its part.
    damages = allgather_text(failure.damage if failure else "", f"restored {path}", _TIMEOUT_S)
    damage = next(filter(None, damages), None)
    if damage is None:
      return state
    is_own = model_dir is not None and epath.Path(path).parent == epath.Path(model_dir)
    if not (is_own and cfg.mode == "latest" and older_steps(path)):
      raise failure or UnreadableCheckpointError(damage)
    path = _rename_damaged(epath.Path(path), damage)
    manager.reload()


def _rename_damaged(folder: epath.Path, damage: str) -> str:
  """Renames a damaged checkpoint and returns the path of the one before it."""
  older = os.fspath(checkpoint_path(folder.parent, older_steps(folder)[-1]))
  if jax.process_index() == 0:
    # A checkpoint of this step may have been damaged, and written again, before.
    suffixes = itertools.chain([""], (f"_{n}" for n in itertools.count(2)))
    names = (folder.with_name(f"damaged_{folder.name}{suffix}") for suffix in suffixes)
    renamed = next(name for name in names if not name.exists())
    folder.rename(renamed)
    _log.error("%s It is renamed to %s; the run continues from %s", damage, renamed, older)
  # The other processes wait for the rename.
  return broadcast_text(older, f"renamed {folder.name}", _TIMEOUT_S)


def _no_checkpoint_text(cfg: RestoreCheckpointConfig) -> str:
  paths = cfg.paths()
  missing = next((path for path in paths if not epath.Path(path).exists()), None)
  checkpoint = next((path for path in paths if step_of(path) is not None), None)
  if missing is None and checkpoint is not None:
    advice = f"{checkpoint} is a checkpoint itself: set RestoreCheckpointConfig.mode = 'specific'"
  else:
    steps = all_steps(epath.Path(missing).parent) if missing else []
    beside = f" (its folder has the steps {', '.join(map(str, steps))})" if steps else ""
    advice = (
      f"{f'{missing} does not exist{beside}: ' if missing else ''}"
      "set RestoreCheckpointConfig.path (INITIAL_CHECKPOINT_PATH) to a folder that contains "
      "checkpoint_STEP folders, or mode = 'specific' and the path of one checkpoint; "
      "fallback_to_scratch = True starts from scratch if there is none"
    )
  return f"there is no checkpoint to restore in {', '.join(paths)} (mode = {cfg.mode!r}): {advice}"
