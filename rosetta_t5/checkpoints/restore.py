"""Finds the checkpoint a run starts from and restores it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from etils import epath

from rosetta_t5.checkpoints.config import (
  CheckpointConfig,
  RestoreCheckpointConfig,
  SaveCheckpointConfig,
  SetsManagerOptions,
)
from rosetta_t5.checkpoints.manager import OrbaxCheckpointManagerInterface
from rosetta_t5.checkpoints.model_dir import checkpoint_folders
from rosetta_t5.checkpoints.reading import UnreadableCheckpointError
from rosetta_t5.distributed.coordination import allgather_text, broadcast_text
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.training.train_state import TrainState

_log = logging.getLogger(__name__)

# What one process waits for another that reads more, or from farther away.
_SLOWEST_RESTORE_S = 3600.0

# The run fact that names the checkpoint a finetuning run began with.
STARTED_FROM = "started_from"

if TYPE_CHECKING:
  from rosetta_t5.checkpoints.train_state_initializer import TrainStateInitializer


def get_first_valid_restore_config_and_paths(
  restore_cfgs: Sequence[RestoreCheckpointConfig],
) -> tuple[RestoreCheckpointConfig | None, tuple[str, ...]]:
  """Returns the first config that names a checkpoint, and the checkpoints' paths.

  Returns (None, ()) if none does.
  """
  for cfg in restore_cfgs:
    paths = tuple(path for given in _paths(cfg) for path in _checkpoints_at(given, cfg.mode))
    if paths:
      return cfg, paths
  return None, ()


def find_start_checkpoint(
  checkpoint_cfg: CheckpointConfig, model_dir: str | os.PathLike[str]
) -> tuple[RestoreCheckpointConfig | None, str | None]:
  """Returns what a training run in `model_dir` starts from: a config and one checkpoint's path.

  The latest checkpoint in `model_dir` comes first, then `checkpoint_cfg.restore`; (None, None)
  means from scratch.

  Raises:
    ValueError: `checkpoint_cfg.restore` names a place without a checkpoint (and may not fall back
      to scratch), or more than one checkpoint.
  """
  save, given = checkpoint_cfg.save, checkpoint_cfg.restore
  own = RestoreCheckpointConfig(
    path=os.fspath(model_dir),
    mode="latest",
    dtype=save.dtype if save else "float32",
    restore_dataset=bool(save and save.save_dataset),
  )
  cfg, paths = get_first_valid_restore_config_and_paths([own, given] if given else [own])
  if len(paths) > 1:
    raise ValueError(
      f"RestoreCheckpointConfig names {len(paths)} checkpoints ({', '.join(paths[:3])}, ...), but "
      "training starts from one: set mode = 'latest' or 'specific' and one path"
    )
  if cfg is None and given and _paths(given) and not given.fallback_to_scratch:
    raise ValueError(_nothing_to_restore(given))
  return cfg, paths[0] if paths else None


def restore(
  checkpoint_manager: OrbaxCheckpointManagerInterface,
  paths: str | Sequence[str],
  restore_cfg: RestoreCheckpointConfig,
  fallback_state: Mapping[str, Any] | None = None,
) -> Any:
  """Returns the train state of the checkpoint at `paths`, or a list of them for several paths.

  Args:
    checkpoint_manager: knows the train state's shapes and places its arrays.
    paths: one path, or several.
    restore_cfg: how to restore.
    fallback_state: where what the checkpoint lacks comes from.
  """
  if not isinstance(paths, str):
    states = [restore(checkpoint_manager, path, restore_cfg, fallback_state) for path in paths]
    return states[0] if len(states) == 1 else states
  return checkpoint_manager.restore(
    path=paths,
    fallback_state=fallback_state,
    state_transformation_fns=restore_cfg.state_transformation_fns,
    **_own_arguments(checkpoint_manager, restore_cfg),
  )


def _own_arguments(manager: Any, cfg: RestoreCheckpointConfig) -> dict[str, bool]:
  """Returns what this project's manager is told beyond T5X's arguments; a user's class has its own."""
  if not isinstance(manager, OrbaxCheckpointManagerInterface):
    return {}
  return {"restore_dataset": cfg.restore_dataset, "strict": cfg.strict}


def get_fallback_state(
  restore_cfg: RestoreCheckpointConfig | None,
  init_fn: Callable[[jax.Array], TrainState],
  init_rng: jax.Array | None,
) -> dict[str, Any] | None:
  """Returns a fresh state dict if `restore_cfg` lets a restore fall back to one, else None.

  Raises:
    ValueError: it does, but there is no `init_rng`.
  """
  if restore_cfg is None or not restore_cfg.fallback_to_scratch:
    return None
  if init_rng is None:
    raise ValueError(
      "RestoreCheckpointConfig.fallback_to_scratch = True needs a random key to initialise with: "
      "give fallback_init_rng (of evaluate or infer), or set it to False"
    )
  return init_fn(init_rng).state_dict()


def check_before_fallback(manager: Any, paths: Sequence[str], cfg: RestoreCheckpointConfig) -> None:
  """Compares what may fall back to scratch before a state from scratch takes memory.

  Raises:
    CheckpointMismatchError: a checkpoint does not fit, be it with what falls back.
  """
  if not (cfg.fallback_to_scratch and isinstance(manager, OrbaxCheckpointManagerInterface)):
    return
  for path in paths:
    with contextlib.suppress(UnreadableCheckpointError):  # met again where it can be dealt with
      manager.check_fits(
        path,
        allow_missing=True,
        allow_unexpected=not cfg.strict,
        transformations=cfg.state_transformation_fns,
      )


def create_orbax_checkpoint_manager(
  *,
  save_cfg: SaveCheckpointConfig | None = None,
  restore_cfg: RestoreCheckpointConfig | None = None,
  train_state: TrainState,
  partitioner: BasePartitioner,
  ds_iter: Any = None,
  model_dir: str | os.PathLike[str] | None = None,
  run_facts: Mapping[str, Any] | None = None,
) -> OrbaxCheckpointManagerInterface:
  """Returns a manager for saving into `model_dir`, restoring, or both.

  Args:
    save_cfg: None for a manager that only restores.
    restore_cfg: gives the dtype of restored parameters.
    train_state: the run's train state, or its shapes.
    partitioner: places restored arrays.
    ds_iter: the training data's iterator.
    model_dir: the folder of checkpoints; None for that of `restore_cfg`.
    run_facts: stored with each checkpoint.

  Raises:
    ValueError: neither config is given, or no folder.
  """
  cfg = save_cfg or restore_cfg
  if cfg is None:
    raise ValueError("a checkpoint manager needs a SaveCheckpointConfig or RestoreCheckpointConfig")
  directory = model_dir or next(iter(_paths(restore_cfg)), None)
  if directory is None:
    raise ValueError("a checkpoint manager needs a folder: give MODEL_DIR")
  saving: dict[str, Any] = {}
  if save_cfg is not None:
    saving = {
      "save_dtype": save_cfg.dtype,
      "keep": save_cfg.keep,
      "period": save_cfg.period,
      "checkpoint_steps": save_cfg.checkpoint_steps,
      "keep_dataset_checkpoints": save_cfg.keep_dataset_checkpoints,
    }
    saving |= _checkpointer_options(save_cfg, train_state, partitioner, directory)
  uses_dataset = (save_cfg and save_cfg.save_dataset) or (
    restore_cfg and restore_cfg.restore_dataset
  )
  manager = cfg.checkpoint_manager_cls(
    directory=directory,
    train_state=train_state,
    partitioner=partitioner,
    dataset_iterator=ds_iter if uses_dataset else None,
    restore_dtype=restore_cfg.dtype if restore_cfg else None,
    **saving,
  )
  # Attributes, so that users' own manager classes with T5X's arguments work.
  manager.run_facts = dict(run_facts or {})
  manager.state_transformation_fns = tuple(save_cfg.state_transformation_fns if save_cfg else ())
  _protect_start(manager)
  return manager


def _checkpointer_options(
  cfg: SaveCheckpointConfig, train_state: Any, partitioner: BasePartitioner, directory: Any
) -> Mapping[str, Any]:
  """Returns the manager's arguments that `cfg.checkpointer_cls` sets.

  The checkpointer is built for this, because gin applies its bindings when the class is called.
  """
  if cfg.checkpointer_cls is None:
    return {}
  checkpointer = cfg.checkpointer_cls(
    train_state=train_state, partitioner=partitioner, checkpoints_dir=os.fspath(directory)
  )
  return checkpointer.manager_options() if isinstance(checkpointer, SetsManagerOptions) else {}


def find_base_checkpoint(
  checkpoint_cfg: CheckpointConfig, model_dir: str | os.PathLike[str], restore_path: str | None
) -> str | None:
  """Returns the checkpoint that a finetuning run began with, which nothing may delete; else None.

  Args:
    checkpoint_cfg: what the run is told; without something to restore it is no finetuning.
    model_dir: where it saves. A checkpoint there that remembers its run's start tells it again.
    restore_path: what the run, perhaps a restart, goes on from.
  """
  if restore_path is None or not _paths(checkpoint_cfg.restore):
    return None
  own = epath.Path(restore_path).parent == epath.Path(model_dir)
  facts = checkpoint_folders.read_run_facts(restore_path) if own else {}
  return facts.get(STARTED_FROM) or os.fspath(restore_path)


def _protect_start(manager: Any) -> None:
  """Keeps the checkpoint the run began with, if it lies among those the manager may delete."""
  start = manager.run_facts.get(STARTED_FROM)
  step = None if start is None else checkpoint_folders.step_of(start)
  if step is not None and epath.Path(start).parent == epath.Path(manager.directory):
    manager.protect(step)


def create_checkpoint_manager_and_restore(
  train_state_initializer: TrainStateInitializer,
  partitioner: BasePartitioner,
  restore_checkpoint_cfg: RestoreCheckpointConfig | None,
  restore_path: str | None,
  fallback_init_rng: jax.Array | None,
  save_checkpoint_cfg: SaveCheckpointConfig | None = None,
  model_dir: str | os.PathLike[str] | None = None,
  ds_iter: Any = None,
  use_orbax: bool = False,
  run_facts: Mapping[str, Any] | None = None,
) -> tuple[TrainState | None, OrbaxCheckpointManagerInterface | None]:
  """Returns (restored train state or None, manager or None): how a run begins.

  Args:
    train_state_initializer: knows the train state's shapes.
    partitioner: places restored arrays.
    restore_checkpoint_cfg: how to restore (`find_start_checkpoint` returns it with the path).
    restore_path: the checkpoint to restore; None for none.
    fallback_init_rng: for names that the checkpoint lacks, if the config allows that.
    save_checkpoint_cfg: None for a manager that only restores.
    model_dir: the folder to save into.
    ds_iter: the training data's iterator.
    use_orbax: T5X's switch between layouts; checkpoints are Orbax's either way.
    run_facts: stored with each checkpoint.

  Raises:
    CheckpointMismatchError: the checkpoint is of another model.
    UnreadableCheckpointError: it is damaged.
  """
  del use_orbax
  if save_checkpoint_cfg is None and restore_path is None:
    return None, None
  manager = create_orbax_checkpoint_manager(
    save_cfg=save_checkpoint_cfg,
    restore_cfg=restore_checkpoint_cfg,
    train_state=train_state_initializer.global_train_state_shape,
    partitioner=partitioner,
    ds_iter=ds_iter,
    model_dir=model_dir,
    run_facts=run_facts,
  )
  if restore_path is None or restore_checkpoint_cfg is None:
    return None, manager
  check_before_fallback(manager, [restore_path], restore_checkpoint_cfg)
  fallback_state = get_fallback_state(
    restore_checkpoint_cfg, train_state_initializer.from_scratch, fallback_init_rng
  )
  state = _restore_whole(manager, restore_path, restore_checkpoint_cfg, fallback_state, model_dir)
  return state, manager


def _restore_whole(
  manager: OrbaxCheckpointManagerInterface,
  path: str,
  cfg: RestoreCheckpointConfig,
  fallback_state: Mapping[str, Any] | None,
  model_dir: str | os.PathLike[str] | None,
) -> Any:
  """Restores a run's own latest checkpoint, or where that is damaged, loudly, the one before it."""
  folder = epath.Path(path)
  state, failure = None, None
  try:
    state = restore(manager, path, cfg, fallback_state)
  except ValueError as error:
    failure = error
  if (reason := _damage_found_by_any(folder, failure)) is None:
    return state
  older = [
    s
    for s in checkpoint_folders.all_steps(folder.parent)
    if s < (checkpoint_folders.step_of(folder) or 0)
  ]
  own = model_dir is not None and folder.parent == epath.Path(model_dir)
  if not (own and older and cfg.mode == "latest"):
    raise UnreadableCheckpointError(reason) from failure
  aside = folder.parent / f"damaged_{folder.name}"
  if jax.process_index() == 0:
    folder.rename(aside)
  before = checkpoint_folders.checkpoint_path(folder.parent, older[-1])
  before = broadcast_text(os.fspath(before), f"set aside {folder.name}", _SLOWEST_RESTORE_S)
  _log.error("%s It is kept as %s; the run goes on from %s", reason, aside, before)
  manager.reload()
  return _restore_whole(manager, before, cfg, fallback_state, model_dir)


def _damage_found_by_any(folder: epath.Path, failure: ValueError | None) -> str | None:
  """Returns what any process found damaged in its part of a checkpoint; all processes go the same way.

  Raises:
    ValueError: one of them could not restore for another reason.
  """
  kind = "damage" if isinstance(failure, UnreadableCheckpointError) else "refusal"
  text = "" if failure is None else f"{kind} {failure}"
  told = allgather_text(text, f"restored {folder.name}", _SLOWEST_RESTORE_S)
  if failure is not None and kind == "refusal":
    raise failure
  for number, text in enumerate(told):
    if text.startswith("refusal "):
      raise ValueError(f"process {number}: {text.removeprefix('refusal ')}")
  return next((text.removeprefix("damage ") for text in told if text), None)


def _paths(cfg: RestoreCheckpointConfig | None) -> list[str]:
  """Returns the config's path or paths as a list, without empty ones."""
  if cfg is None:
    return []
  given = [cfg.path] if isinstance(cfg.path, str | os.PathLike) else list(cfg.path or ())
  return [os.fspath(path) for path in given if os.fspath(path)]


def _checkpoints_at(path: str, mode: str) -> list[str]:
  """Returns the checkpoints that a path means in a mode."""
  if mode == "specific" or _has_no_steps(path):
    return [path]
  steps = checkpoint_folders.all_steps(path)
  chosen = steps[-1:] if mode == "latest" else steps
  return [os.fspath(checkpoint_folders.checkpoint_path(path, step)) for step in chosen]


def _has_no_steps(path: str) -> bool:
  """Returns whether a path is of a layout that knows no folder of steps: then the mode says nothing."""
  try:
    found = checkpoint_folders.detect_checkpoint_type(path)
  except checkpoint_folders.UnreachableError:
    raise
  except ValueError:
    return False
  return found in (
    checkpoint_folders.CheckpointTypes.HUGGING_FACE,
    checkpoint_folders.CheckpointTypes.T5X_TF,
  )


def _nothing_to_restore(cfg: RestoreCheckpointConfig) -> str:
  places = ", ".join(_paths(cfg))
  itself = [path for path in _paths(cfg) if checkpoint_folders.step_of(path) is not None]
  advice = (
    f"{itself[0]} is a checkpoint itself: set RestoreCheckpointConfig.mode = 'specific'"
    if itself
    else "set RestoreCheckpointConfig.path (INITIAL_CHECKPOINT_PATH) to a folder that holds "
    "checkpoint_STEP folders, or mode = 'specific' and the path of one checkpoint; "
    "fallback_to_scratch = True starts from scratch where there is none"
  )
  return f"there is no checkpoint to restore in {places} (mode = {cfg.mode!r}): {advice}"
