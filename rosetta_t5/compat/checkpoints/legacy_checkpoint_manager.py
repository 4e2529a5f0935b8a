"""T5X's checkpoint manager of two configs, and the checkpointer that it uses."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from rosetta_t5.checkpoints.config import RestoreCheckpointConfig, SaveCheckpointConfig
from rosetta_t5.checkpoints.saved_state import SaveTransformation
from rosetta_t5.compat.checkpoints.legacy_checkpointer import Checkpointer
from rosetta_t5.parallel import BasePartitioner


class LegacyCheckpointer(ocp.Checkpointer):
  """Combines one checkpointer that saves with one that restores (T5X's class)."""

  def __init__(
    self,
    *,
    save_checkpointer: Checkpointer | None = None,
    restore_checkpointer: Checkpointer,
    strict: bool | None = False,
  ):
    """Creates a checkpointer.

    Args:
      save_checkpointer: saves; None for a checkpointer that only restores.
      restore_checkpointer: restores.
      strict: raise an error for names in a TensorFlow checkpoint that the train state does not have.
    """
    self._save_checkpointer = save_checkpointer
    self._restore_checkpointer = restore_checkpointer
    self._strict = bool(strict)

  def save(
    self,
    path: epath.PathLike,
    item: Any,
    force: bool = False,
    custom_metadata: Any = None,
    state_transformation_fns: Sequence[SaveTransformation] = (),
    *,
    concurrent_gb: int = 128,
  ) -> None:
    """Saves the train state `item`, whose step names the folder; see `Checkpointer.save`.

    `path`, `force` and `custom_metadata` exist for Orbax's callers and have no effect.

    Raises:
      ValueError: there is no save checkpointer.
    """
    del path, force, custom_metadata, concurrent_gb
    if self._save_checkpointer is None:
      raise ValueError("LegacyCheckpointer has no save_checkpointer: it can only restore")
    self._save_checkpointer.save(item, state_transformation_fns)

  def restore(self, path: epath.PathLike, item: Any = None, **options: Any) -> Any:
    """Returns the train state of the checkpoint at `path`, which may be a TensorFlow prefix.

    `item` has no effect. The others are the arguments of `Checkpointer.restore`.
    """
    del item
    if os.path.exists(f"{os.fspath(path)}.index"):
      return self._restore_checkpointer.restore_from_tf_checkpoint(path, strict=self._strict)
    return self._restore_checkpointer.restore(path=path, **options)


class LegacyCheckpointManager(ocp.CheckpointManager):
  """Saves and restores as two configs specify (T5X's class)."""

  def __init__(
    self,
    *,
    save_cfg: SaveCheckpointConfig | None,
    restore_cfg: RestoreCheckpointConfig | None,
    train_state_shape: Any,
    partitioner: BasePartitioner,
    ds_iter: Any = None,
    model_dir: epath.PathLike | None = None,
  ):
    """Creates a manager without writing anything.

    Args:
      save_cfg: how to save; None for a manager that only restores.
      restore_cfg: how to restore; None for a manager that only saves.
      train_state_shape: the train state's shapes.
      partitioner: specifies the sharding of restored arrays.
      ds_iter: the training data's iterator.
      model_dir: the folder of checkpoints to save into.
    """
    shared: dict[str, Any] = {"train_state": train_state_shape, "partitioner": partitioner}
    saver: Checkpointer | None = None
    restorer: Any = None
    if save_cfg is not None:
      saver = (save_cfg.checkpointer_cls or Checkpointer)(
        **shared,
        checkpoints_dir=model_dir or "",
        dataset_iterator=ds_iter if save_cfg.save_dataset else None,
        save_dtype=save_cfg.dtype,
        keep=save_cfg.keep,
        keep_dataset_checkpoints=save_cfg.keep_dataset_checkpoints,
      )
    if restore_cfg is not None:
      restorer = (restore_cfg.checkpointer_cls or Checkpointer)(
        **shared,
        checkpoints_dir="",
        dataset_iterator=ds_iter if restore_cfg.restore_dataset else None,
        restore_dtype=restore_cfg.dtype,
      )
    self._checkpointer = LegacyCheckpointer(
      save_checkpointer=saver,
      restore_checkpointer=restorer,
      strict=restore_cfg.strict if restore_cfg else False,
    )

  def wait_until_finished(self) -> None:
    """Does nothing, because `save` returns when everything is written."""

  def close(self) -> None:
    """Does nothing, because there are no background threads."""

  def save(
    self, train_state: Any, state_transformation_fns: Sequence[SaveTransformation] = ()
  ) -> None:
    """Saves `train_state`, whose step names the folder."""
    self._checkpointer.save("", train_state, state_transformation_fns=state_transformation_fns)

  def restore(
    self,
    paths: Sequence[str],
    restore_cfg: RestoreCheckpointConfig | None = None,
    fallback_state: Mapping[str, Any] | None = None,
  ) -> Any:
    """Returns the train state of the checkpoint in `paths`, or a list of states for several.

    Args:
      paths: checkpoints.
      restore_cfg: how to restore; None restores nothing and returns None.
      fallback_state: nested state dict that provides what a checkpoint lacks.
    """
    if restore_cfg is None or paths is None:
      return None
    restored = [
      self._checkpointer.restore(
        path,
        state_transformation_fns=restore_cfg.state_transformation_fns,
        fallback_state=fallback_state,
      )
      for path in paths
    ]
    return restored[0] if len(restored) == 1 else restored
