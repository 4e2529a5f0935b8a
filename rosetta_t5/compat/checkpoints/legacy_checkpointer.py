"""T5X's older checkpointers, which write its msgpack and zarr layout synchronously."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from rosetta_t5.checkpoints import saved_state
from rosetta_t5.checkpoints.arrays.lazy_arrays import as_stored_array
from rosetta_t5.checkpoints.arrays.state_dicts import flatten_state_dict, unflatten_state_dict
from rosetta_t5.checkpoints.dataset_position import DATASET_PREFIX, dataset_filename
from rosetta_t5.checkpoints.formats import mesh_tf, t5x_legacy
from rosetta_t5.checkpoints.formats.mesh_tf import CheckpointTranslator
from rosetta_t5.checkpoints.manager import OrbaxCheckpointManagerInterface
from rosetta_t5.checkpoints.model_dir import checkpoint_folders, retention
from rosetta_t5.checkpoints.model_dir.best_metric import BestMetric
from rosetta_t5.checkpoints.reading import read_arrays
from rosetta_t5.checkpoints.restored_state import RestoreTransformation
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.telemetry.atomic_files import complete_folder


class Checkpointer:
  """Saves and restores checkpoints in T5X's older layout (T5X's class).

  Attributes:
    checkpoints_dir: the folder of checkpoints.
    keep: how many of the latest checkpoints are kept; None for all.
    keep_dataset_checkpoints: how many of the latest dataset positions are kept; None for all.
    restore_dtype: the dtype of restored floating-point parameters; None for their own.
    manager: the manager of the run that calls `save`, which then writes in the manager's layout.
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
    self._save_dtype = saved_state.parse_float_dtype(save_dtype, "save_dtype")
    self._retention = retention.Retention(checkpoints_dir, keep)
    self.checkpoints_dir = os.fspath(checkpoints_dir)
    self.keep = keep
    self.keep_dataset_checkpoints = keep_dataset_checkpoints
    self.restore_dtype = saved_state.parse_float_dtype(restore_dtype, "restore_dtype")

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
    state_transformation_fns: Sequence[saved_state.SaveTransformation] = (),
    *,
    concurrent_gb: int = 128,
  ) -> None:
    """Writes `train_state`, and returns once the checkpoint is complete.

    An existing checkpoint is never overwritten.

    Args:
      train_state: the state to save. Lazy arrays are read one at a time.
      state_transformation_fns: each `fn(state_dict, parameter_infos)` returns both of them, changed.
      concurrent_gb: T5X's limit. It has no effect: one array at a time is in memory.

    Raises:
      CheckpointSaveError: the checkpoint could not be written.
    """
    del concurrent_gb
    if self.manager is not None:
      self.manager.save(train_state, state_transformation_fns)
      return
    step = saved_state.step_number(train_state)
    folder = checkpoint_folders.checkpoint_path(self.checkpoints_dir, step)
    if folder.exists():
      return
    state = saved_state.apply_save_transformations(
      train_state, self._partitioner, state_transformation_fns
    )
    try:
      self._write(folder, state)
    except OSError as error:
      raise saved_state.save_error(epath.Path(self.checkpoints_dir), step, error) from error
    if jax.process_index() == 0:
      self._remove_old()

  def restore(
    self,
    step: int | None = None,
    path: epath.PathLike | None = None,
    state_transformation_fns: Sequence[RestoreTransformation] = (),
    fallback_state: Mapping[str, Any] | None = None,
    lazy_parameters: bool = False,
  ) -> Any:
    """Returns the train state of a checkpoint.

    Args:
      step: a step of this folder; None, without `path`, for the latest.
      path: a checkpoint of any layout in any folder.
      state_transformation_fns: each `fn(checkpoint's state dict, this train state's)` returns the
        first one, changed.
      fallback_state: nested state dict that provides what the checkpoint lacks.
      lazy_parameters: leave the values on disk until they are read.

    Raises:
      CheckpointMismatchError: names, shapes or dtypes differ from the train state's.
      ValueError: there is no such checkpoint.
    """
    folder = checkpoint_folders.select_checkpoint(self.checkpoints_dir, step, path)
    if lazy_parameters:
      state: Any = unflatten_state_dict(read_arrays(folder))
      for transform in state_transformation_fns:
        state = transform(state, self._train_state.state_dict())
      return self._train_state.restore_state(state)
    restored = self._reader().restore(
      path=folder, fallback_state=fallback_state, state_transformation_fns=state_transformation_fns
    )
    if self._dataset_iterator is not None:
      self._dataset_iterator.restore(os.fspath(folder / self._dataset_file()))
    return restored

  def restore_from_tf_checkpoint(
    self,
    path_or_dir: epath.PathLike,
    strict: bool = True,
    translator: CheckpointTranslator | None = None,
  ) -> Any:
    """Returns the train state of a Mesh TensorFlow checkpoint.

    Args:
      path_or_dir: the checkpoint's prefix or folder.
      strict: raise an error for names that the train state does not have.
      translator: renames the checkpoint's entries; None for the rules of T5 1.0 and 1.1.
    """
    return self._reader().restore_from_tf_checkpoint(path_or_dir, strict, translator)

  def convert_from_tf_checkpoint(
    self,
    path_or_dir: epath.PathLike,
    *,
    state_transformation_fns: Sequence[saved_state.SaveTransformation] = (),
    concurrent_gb: int = 16,
    translator: CheckpointTranslator | None = None,
  ) -> None:
    """Writes a Mesh TensorFlow checkpoint into this folder, with one array in memory at a time.

    Args:
      path_or_dir: the checkpoint's prefix or folder.
      state_transformation_fns: as in `save`.
      concurrent_gb: as in `save`.
      translator: renames the checkpoint's entries; None for the rules of T5 1.0 and 1.1.
    """
    state_dict = mesh_tf.restore_from_t5_checkpoint(
      self._train_state.state_dict(), path_or_dir, lazy_parameters=True, translator=translator
    )
    train_state = self._train_state.restore_state(state_dict)
    self.save(train_state, state_transformation_fns, concurrent_gb=concurrent_gb)

  def _reader(self) -> OrbaxCheckpointManagerInterface:
    """Returns a manager of the same folder, which restores any layout."""
    return OrbaxCheckpointManagerInterface(
      self.checkpoints_dir, self._train_state, self._partitioner, restore_dtype=self.restore_dtype
    )

  def _write(self, folder: epath.Path, state: Mapping[str, Any]) -> None:
    arrays = self._arrays_to_write(state)
    if jax.process_index() == 0:
      for entry in checkpoint_folders.files_matching(folder.parent, "checkpoint_*.unfinished"):
        entry.rmtree()  # A killed process has left it.
      retention.BackgroundRemover(folder.parent).finish()
      with complete_folder(folder) as unfinished:
        t5x_legacy.write(unfinished, arrays)
        if self._dataset_iterator is not None:
          self._dataset_iterator.save(os.fspath(unfinished / self._dataset_file()))
    if jax.process_count() > 1:
      collections.deque(arrays, maxlen=0)  # The other processes take part in gathering the arrays.
      multihost_utils.sync_global_devices(f"legacy checkpoint {folder.name}")

  def _arrays_to_write(self, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (flat name, array) pairs, and pairs with None, which T5X stores too."""
    for name, leaf in flatten_state_dict(state).items():
      if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
      if leaf is None:
        yield name, None
      elif hasattr(leaf, "shape"):
        dtype = saved_state.leaf_dtype(name, leaf.dtype, self._save_dtype)
        yield name, as_stored_array(leaf).astype(dtype)

  def _remove_old(self) -> None:
    root = self.checkpoints_dir
    for step in sorted(self._retention.steps_to_delete(self.all_steps())):
      retention.remove_checkpoint_dir(checkpoint_folders.checkpoint_path(root, step))
    if self.keep_dataset_checkpoints:
      retention.remove_old_dataset_positions(root, self.keep_dataset_checkpoints)

  def _dataset_file(self) -> str:
    layout = self._partitioner.get_data_layout()
    return dataset_filename(layout.shard_id, layout.num_shards)


class SaveBestCheckpointer(Checkpointer):
  """Keeps the checkpoints with the best values of a metric, and the latest one (T5X's class)."""

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
    metric_name_to_monitor: str = "train/accuracy",
    metric_mode: str = "max",
    keep_checkpoints_without_metrics: bool = True,
    force_keep_period: int | None = None,
    keep_dataset_checkpoints: int | None = None,
  ):
    """Creates a checkpointer.

    Args:
      train_state: see Checkpointer.
      partitioner: see Checkpointer.
      checkpoints_dir: see Checkpointer.
      dataset_iterator: see Checkpointer.
      keep: the number of checkpoints with the best values that are kept; None for all checkpoints.
      save_dtype: see Checkpointer.
      restore_dtype: see Checkpointer.
      metric_name_to_monitor: RUN/TAG in TensorBoard's files under the folder of checkpoints.
      metric_mode: 'max' if larger values are better, 'min' if smaller values are.
      keep_checkpoints_without_metrics: whether checkpoints without a value of the metric are kept.
      force_keep_period: checkpoints at its multiples are kept.
      keep_dataset_checkpoints: see Checkpointer.
    """
    super().__init__(
      train_state,
      partitioner,
      checkpoints_dir,
      dataset_iterator,
      keep=keep,
      save_dtype=save_dtype,
      restore_dtype=restore_dtype,
      keep_dataset_checkpoints=keep_dataset_checkpoints,
    )
    self._manager_options = {
      "metric_name_to_monitor": metric_name_to_monitor,
      "metric_mode": metric_mode,
      "keep_checkpoints_without_metrics": keep_checkpoints_without_metrics,
      "force_keep_period": force_keep_period,
    }
    best = BestMetric(metric_name_to_monitor, metric_mode, keep_checkpoints_without_metrics)
    self._retention = retention.Retention(checkpoints_dir, keep, force_keep_period, best)

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
