"""T5X's older checkpointers, which are the manager of checkpoints under T5X's names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from rosetta_t5.checkpoints.dataset_position import DATASET_PREFIX
from rosetta_t5.checkpoints.formats.mesh_tf import CheckpointTranslator
from rosetta_t5.checkpoints.manager import OrbaxCheckpointManagerInterface
from rosetta_t5.checkpoints.model_dir import checkpoint_folders
from rosetta_t5.checkpoints.restored_state import RestoreTransformation
from rosetta_t5.checkpoints.saved_state import SaveTransformation
from rosetta_t5.parallel import BasePartitioner


class Checkpointer:
  """Saves in Orbax's layout, and restores any layout (T5X's class).

  Attributes:
    checkpoints_dir: the folder of checkpoints.
    keep: how many of the latest checkpoints are kept; None for all.
    keep_dataset_checkpoints: how many of the latest dataset positions are kept; None for all.
    restore_dtype: the dtype of restored floating-point parameters; None for their own.
    manager: what saves: the manager of the run that calls `save`, or else one of its own.
  """

  manager: Any = None

  def __init__(
    self,
    train_state: Any,
    partitioner: BasePartitioner,
    checkpoints_dir: epath.PathLike,
    dataset_iterator: Any = None,
    *,
    keep: int | None = None,
    save_dtype: Any = np.float32,
    restore_dtype: Any = None,
    keep_dataset_checkpoints: int | None = None,
  ):
    """Creates a checkpointer without writing anything.

    Args:
      train_state: the run's train state, or its shapes.
      partitioner: specifies the sharding of restored arrays.
      checkpoints_dir: the folder of checkpoints.
      dataset_iterator: has `save(filename)` and `restore(filename)`.
      keep: see the attribute.
      save_dtype: the dtype of the stored floating-point parameters.
      restore_dtype: see the attribute.
      keep_dataset_checkpoints: see the attribute.
    """
    self._train_state = train_state
    self._partitioner = partitioner
    self._dataset_iterator = dataset_iterator
    self._save_dtype = save_dtype
    self.checkpoints_dir = os.fspath(checkpoints_dir)
    self.keep = keep
    self.keep_dataset_checkpoints = keep_dataset_checkpoints
    self.restore_dtype = restore_dtype

  def manager_options(self) -> dict[str, Any]:
    """Returns further arguments of `OrbaxCheckpointManagerInterface`."""
    return {}

  def all_steps(self) -> list[int]:
    """Returns the steps of complete checkpoints in ascending order."""
    return checkpoint_folders.all_steps(self.checkpoints_dir)

  def all_dataset_checkpoint_steps(self) -> list[int]:
    """Returns the steps whose checkpoints have a position in the data, in ascending order."""
    return all_dataset_checkpoint_steps(self.checkpoints_dir)

  def latest_step(self) -> int | None:
    """Returns the last of `all_steps()`, or None."""
    return checkpoint_folders.latest_step(self.checkpoints_dir)

  def save(
    self,
    train_state: Any,
    state_transformation_fns: Sequence[SaveTransformation] = (),
    *,
    concurrent_gb: int = 128,
  ) -> None:
    """Writes `train_state`, and without a run returns once the checkpoint is complete.

    An existing checkpoint is never overwritten.

    Args:
      train_state: the state to save.
      state_transformation_fns: each `fn(state_dict, parameter_infos)` returns both of them, changed.
      concurrent_gb: T5X's limit, which has no effect.

    Raises:
      CheckpointSaveError: the checkpoint could not be written.
    """
    del concurrent_gb
    manager = self.manager or self._own_manager()
    manager.save(train_state, state_transformation_fns)
    if manager is not self.manager:
      manager.close()

  def restore(
    self,
    step: int | None = None,
    path: epath.PathLike | None = None,
    state_transformation_fns: Sequence[RestoreTransformation] = (),
    fallback_state: Mapping[str, Any] | None = None,
    lazy_parameters: bool = False,
  ) -> Any:
    """Returns the train state of a checkpoint; see `OrbaxCheckpointManagerInterface.restore`."""
    return self._own_manager().restore(
      step, path, fallback_state, state_transformation_fns, lazy_parameters
    )

  def restore_from_tf_checkpoint(
    self,
    path_or_dir: epath.PathLike,
    strict: bool = True,
    translator: CheckpointTranslator | None = None,
  ) -> Any:
    """Returns the train state of a Mesh TensorFlow checkpoint; see the manager's method."""
    return self._own_manager().restore_from_tf_checkpoint(path_or_dir, strict, translator)

  def convert_from_tf_checkpoint(
    self,
    path_or_dir: epath.PathLike,
    *,
    state_transformation_fns: Sequence[SaveTransformation] = (),
    concurrent_gb: int = 16,
    translator: CheckpointTranslator | None = None,
  ) -> None:
    """Writes a Mesh TensorFlow checkpoint into this folder; see the two methods above."""
    del concurrent_gb
    state = self.restore_from_tf_checkpoint(path_or_dir, translator=translator)
    self.save(state, state_transformation_fns)

  def _own_manager(self) -> OrbaxCheckpointManagerInterface:
    return OrbaxCheckpointManagerInterface(
      self.checkpoints_dir,
      self._train_state,
      self._partitioner,
      self._dataset_iterator,
      self._save_dtype,
      self.restore_dtype,
      self.keep,
      keep_dataset_checkpoints=self.keep_dataset_checkpoints,
      **self.manager_options(),
    )


class SaveBestCheckpointer(Checkpointer):
  """Keeps the checkpoints with the best values of a metric, and the latest one (T5X's class)."""

  def __init__(
    self,
    *args: Any,
    metric_name_to_monitor: str = "train/accuracy",
    metric_mode: str = "max",
    keep_checkpoints_without_metrics: bool = True,
    force_keep_period: int | None = None,
    **options: Any,
  ):
    """Creates a checkpointer.

    Args:
      *args: the arguments of `Checkpointer`.
      metric_name_to_monitor: RUN/TAG in TensorBoard's files under the folder of checkpoints.
      metric_mode: 'max' if larger values are better, 'min' if smaller values are.
      keep_checkpoints_without_metrics: whether checkpoints without a value of the metric are kept.
      force_keep_period: checkpoints at its multiples are kept.
      **options: further arguments of `Checkpointer`.
    """
    super().__init__(*args, **options)
    self._manager_options = {
      "metric_name_to_monitor": metric_name_to_monitor,
      "metric_mode": metric_mode,
      "keep_checkpoints_without_metrics": keep_checkpoints_without_metrics,
      "force_keep_period": force_keep_period,
    }

  def manager_options(self) -> dict[str, Any]:
    """Returns these settings as arguments of `OrbaxCheckpointManagerInterface`."""
    return self._manager_options


def all_dataset_checkpoint_steps(checkpoints_dir: epath.PathLike) -> list[int]:
  """Returns the steps whose checkpoints have a position in the data, in ascending order."""

  def has_position(step: int) -> bool:
    folder = checkpoint_folders.checkpoint_path(checkpoints_dir, step)
    inside = folder / checkpoint_folders.DATASET_ITEM
    return any(folder.glob(f"{DATASET_PREFIX}-*")) or any(inside.glob(f"{DATASET_PREFIX}-*"))

  return [step for step in checkpoint_folders.all_steps(checkpoints_dir) if has_position(step)]
