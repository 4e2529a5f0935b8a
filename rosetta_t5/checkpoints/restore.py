"""Restoring as RestoreCheckpointConfig specifies, and building the checkpoint manager for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from rosetta_t5.checkpoints.arrays.checksums import ChecksumError
from rosetta_t5.checkpoints.config import (
  RestoreCheckpointConfig,
  SaveCheckpointConfig,
  SetsManagerOptions,
)
from rosetta_t5.checkpoints.formats.hugging_face.folder import local_folder
from rosetta_t5.checkpoints.formats.hugging_face.source_config import check_source_config
from rosetta_t5.checkpoints.manager import OrbaxCheckpointManagerInterface
from rosetta_t5.checkpoints.model_dir import checkpoint_folders
from rosetta_t5.checkpoints.model_dir.checkpoint_folders import CheckpointTypes
from rosetta_t5.checkpoints.reading import UnreadableCheckpointError
from rosetta_t5.checkpoints.restored_state import find_matching_arrays
from rosetta_t5.data import vocabulary_digests
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.training.train_state import TrainState

# The run fact with digests of the vocabularies by side ("input", "output").
VOCABULARIES = "vocabularies"
# Layouts that have no folders of steps, so RestoreCheckpointConfig.mode has no effect on them.
_LAYOUTS_WITHOUT_STEPS = (CheckpointTypes.HUGGING_FACE, CheckpointTypes.T5X_TF)


def get_first_valid_restore_config_and_paths(
  restore_cfgs: Sequence[RestoreCheckpointConfig],
) -> tuple[RestoreCheckpointConfig | None, tuple[str, ...]]:
  """Returns the first config that names a checkpoint, and the checkpoints' paths; (None, ()) if none does.

  With mode 'specific', the path is returned even if nothing is there.
  """
  for cfg in restore_cfgs:
    paths = tuple(path for given in cfg.paths() for path in _checkpoints_at(given, cfg.mode))
    if paths:
      return cfg, paths
  return None, ()


def restore(
  checkpoint_manager: OrbaxCheckpointManagerInterface,
  paths: str | Sequence[str],
  restore_cfg: RestoreCheckpointConfig,
  fallback_state: Mapping[str, Any] | None = None,
) -> Any:
  """Returns the train state of the checkpoint at `paths`, or a list of states for several paths.

  Args:
    checkpoint_manager: the manager, which knows the train state's shapes and sharding.
    paths: one path, or several.
    fallback_state: nested state dict that provides what the checkpoint lacks.
  """
  if not isinstance(paths, str):
    states = [restore(checkpoint_manager, path, restore_cfg, fallback_state) for path in paths]
    return states[0] if len(states) == 1 else states
  options: dict[str, Any] = {}
  restore_one: Callable[..., Any] = checkpoint_manager.restore
  if isinstance(checkpoint_manager, OrbaxCheckpointManagerInterface):
    # Users' own manager classes have only T5X's arguments.
    options = {"restore_dataset": restore_cfg.restore_dataset, "strict": restore_cfg.strict}
    if checkpoint_manager.user_restore is not None:
      restore_one, options = checkpoint_manager.user_restore, {}
  return restore_one(
    path=paths,
    fallback_state=fallback_state,
    state_transformation_fns=restore_cfg.state_transformation_fns,
    **options,
  )


def check_compatibility(
  path: epath.PathLike, expected: Mapping[str, Any], restore_cfg: RestoreCheckpointConfig
) -> None:
  """Checks that the checkpoint at `path` can be restored.

  Args:
    path: a checkpoint of any layout.
    expected: nested state dict of the train state's leaves (`shape`, `dtype`).

  Raises:
    CheckpointMismatchError: the checkpoint does not match.
    UnreadableCheckpointError: files are missing or damaged.
    ValueError: there is no checkpoint.
  """
  find_matching_arrays(
    path,
    expected,
    allow_missing=restore_cfg.fallback_to_scratch,
    allow_unexpected=not restore_cfg.strict,
    transformations=restore_cfg.state_transformation_fns,
  )


def check_vocabularies(model: Any, restore_cfg: RestoreCheckpointConfig | None) -> None:
  """Checks that a model's vocabularies have the contents with which its checkpoints were trained.

  With others of the same size, the parameters would give meaningless texts without an error.

  Args:
    model: the model.
    restore_cfg: the checkpoints. Those of other programs do not have the digests and are not checked.

  Raises:
    ValueError: a vocabulary differs.
  """
  _, paths = get_first_valid_restore_config_and_paths([restore_cfg] if restore_cfg else [])
  for path in paths:
    trained: Mapping[str, str] = {}
    with contextlib.suppress(ChecksumError):  # raised again by the restore
      trained = checkpoint_folders.read_run_facts(path).get(VOCABULARIES) or {}
    digests = vocabulary_digests(model) if trained else {}
    if changed := [side for side in digests if trained.get(side, digests[side]) != digests[side]]:
      raise ValueError(
        f"The model's vocabulary ({', '.join(changed)}) is not the one with which {path} was trained: "
        "its file was replaced, or another was chosen. Use the original file. If you want the other "
        "one, train and infer accept it with verify_matching_vocabs_fn = None"
      )


def check_source_configs(model: Any, restore_cfg: RestoreCheckpointConfig | None) -> None:
  """Checks that a model computes what the config.json of its checkpoints states; see `check_source_config`.

  Args:
    model: the model.
    restore_cfg: the checkpoints. Only those from Hugging Face folders have such a file.

  Raises:
    ValueError: the network has other settings, or the vocabulary another end token.
  """
  cfg, paths = get_first_valid_restore_config_and_paths([restore_cfg] if restore_cfg else [])
  for path in paths:
    check_source_config(model, path, strict=cfg is None or cfg.strict)


def get_fallback_state(
  restore_cfg: RestoreCheckpointConfig | None,
  init_fn: Callable[[jax.Array], TrainState],
  init_rng: jax.Array | None,
) -> dict[str, Any] | None:
  """Returns a newly initialized state dict if `restore_cfg` allows a fallback to one, else None.

  Raises:
    ValueError: a fallback is allowed, but `init_rng` is None.
  """
  if restore_cfg is None or not restore_cfg.fallback_to_scratch:
    return None
  if init_rng is None:
    raise ValueError(
      "RestoreCheckpointConfig.fallback_to_scratch = True needs a random key for the initialization: "
      "give fallback_init_rng (of evaluate or infer), or set fallback_to_scratch to False"
    )
  return init_fn(init_rng).state_dict()


def check_and_init_fallback_state(
  checkpoint_manager: OrbaxCheckpointManagerInterface,
  paths: Sequence[str],
  restore_cfg: RestoreCheckpointConfig,
  expected: TrainState,
  init_fn: Callable[[jax.Array], TrainState],
  init_rng: jax.Array | None,
) -> dict[str, Any] | None:
  """Returns `get_fallback_state` after checking that each of `paths` can be restored with it.

  The check comes first, because the fallback state takes memory.

  Args:
    checkpoint_manager: the manager that will restore. With a user's own class nothing is checked.
    expected: the train state's shapes.

  Raises:
    CheckpointMismatchError: a checkpoint does not match even with the fallback.
    ValueError: a fallback is allowed, but `init_rng` is None.
  """
  is_ours = isinstance(checkpoint_manager, OrbaxCheckpointManagerInterface)
  if restore_cfg.fallback_to_scratch and is_ours:
    for path in paths:
      with contextlib.suppress(UnreadableCheckpointError):  # raised again by the restore
        check_compatibility(path, expected.state_dict(), restore_cfg)
  return get_fallback_state(restore_cfg, init_fn, init_rng)


def create_orbax_checkpoint_manager(
  *,
  save_cfg: SaveCheckpointConfig | None = None,
  restore_cfg: RestoreCheckpointConfig | None = None,
  train_state: TrainState,
  partitioner: BasePartitioner,
  ds_iter: Any = None,
  model_dir: epath.PathLike | None = None,
) -> OrbaxCheckpointManagerInterface:
  """Returns a manager that saves into `model_dir`, restores, or both.

  Args:
    save_cfg: how to save; None for a manager that only restores.
    restore_cfg: how to restore; None for a manager that only saves.
    train_state: the run's train state, or its shapes.
    partitioner: specifies the sharding of restored arrays.
    ds_iter: the training data's iterator.
    model_dir: the folder of checkpoints; None for the path of `restore_cfg`.

  Raises:
    ValueError: there is no config, no folder or no manager class.
  """
  if save_cfg is None and restore_cfg is None:
    raise ValueError("a checkpoint manager needs a SaveCheckpointConfig or RestoreCheckpointConfig")
  save = save_cfg or SaveCheckpointConfig()
  load = restore_cfg or RestoreCheckpointConfig(path=None)
  directory = _checked_folder(save, load, model_dir)
  state: dict[str, Any] = {"train_state": train_state, "partitioner": partitioner}
  saver: Any = None
  if save.checkpointer_cls is not None:
    # It is built even if only its settings are needed: gin applies its bindings when it is called.
    saver = save.checkpointer_cls(**state, checkpoints_dir=os.fspath(directory))
  manager = (save_cfg or load).checkpoint_manager_cls(
    directory=directory,
    **state,
    dataset_iterator=ds_iter if save.save_dataset or load.restore_dataset else None,
    restore_dtype=load.dtype,
    **(_save_options(save, saver) if save_cfg else {}),
  )
  # These are attributes, so that users' own manager classes with T5X's arguments work.
  manager.state_transformation_fns = tuple(save.state_transformation_fns)
  if (user_save := _overridden(saver, "save")) is not None:
    saver.manager, manager.user_save = manager, user_save
  manager.user_restore = _user_restore(load, ds_iter, state)
  return manager


def _checked_folder(
  save: SaveCheckpointConfig, load: RestoreCheckpointConfig, model_dir: epath.PathLike | None
) -> epath.PathLike:
  """Returns the folder of checkpoints, after checking that both configs have a manager class."""
  directory = model_dir or next(iter(load.paths()), None)
  if directory is None:
    raise ValueError("a checkpoint manager needs a folder: set MODEL_DIR or the path to restore")
  for cfg in (save, load):
    if cfg.checkpoint_manager_cls is None:
      raise ValueError(f"{type(cfg).__name__}.checkpoint_manager_cls must be a class, got None")
  return directory


def _save_options(cfg: SaveCheckpointConfig, checkpointer: Any) -> dict[str, Any]:
  """Returns the manager's arguments for saving."""
  return {
    "save_dtype": cfg.dtype,
    "keep": cfg.keep,
    "period": cfg.period,
    "checkpoint_steps": cfg.checkpoint_steps,
    "keep_dataset_checkpoints": cfg.keep_dataset_checkpoints,
    **(checkpointer.manager_options() if isinstance(checkpointer, SetsManagerOptions) else {}),
  }


def _user_restore(
  cfg: RestoreCheckpointConfig, ds_iter: Any, state: Mapping[str, Any]
) -> Callable[..., Any] | None:
  """Returns the `restore` of a user's checkpointer; None if there is none."""
  if cfg.checkpointer_cls is None:
    return None
  iterator = ds_iter if cfg.restore_dataset else None
  options = {"dataset_iterator": iterator, "restore_dtype": cfg.dtype}
  return _overridden(cfg.checkpointer_cls(**state, checkpoints_dir="", **options), "restore")


def _overridden(checkpointer: Any, name: str) -> Callable[..., Any] | None:
  """Returns a method of a user's checkpointer; None if it is the one of T5X's class."""
  method = getattr(checkpointer, name, None)
  return None if method is None or method.__module__.startswith("rosetta_t5.") else method


def _checkpoints_at(path: str, mode: str) -> list[str]:
  """Returns the checkpoints that a path names in a mode."""
  if mode == "specific":
    return [local_folder(path)]  # It may be the name of a model on Hugging Face's hub.
  if checkpoint_folders.find_checkpoint_type(path) in _LAYOUTS_WITHOUT_STEPS:
    return [path]
  steps = checkpoint_folders.all_steps(path)
  chosen = steps[-1:] if mode == "latest" else steps
  return [os.fspath(checkpoint_folders.checkpoint_path(path, step)) for step in chosen]
