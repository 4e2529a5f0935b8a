"""T5X's older checkpointers: they write and read its msgpack and zarr layout, at once and in full."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from rosetta_t5.checkpoints.arrays.lazy_arrays import as_stored_array
from rosetta_t5.checkpoints.arrays.state_dicts import (
  flatten_state_dict,
  merge_state,
  unflatten_state_dict,
)
from rosetta_t5.checkpoints.dataset_position import DATASET_PREFIX, dataset_filename
from rosetta_t5.checkpoints.formats import mesh_tf
from rosetta_t5.checkpoints.formats.mesh_tf import CheckpointTranslator
from rosetta_t5.checkpoints.formats.t5x_legacy import LegacyWriter, remove_unfinished
from rosetta_t5.checkpoints.fresh_state import completed
from rosetta_t5.checkpoints.model_dir import checkpoint_folders
from rosetta_t5.checkpoints.model_dir.best_metric import BestMetric
from rosetta_t5.checkpoints.model_dir.pins import remove_checkpoint_dir, remove_dataset_checkpoint
from rosetta_t5.checkpoints.model_dir.removal import Removal
from rosetta_t5.checkpoints.model_dir.retention import Retention
from rosetta_t5.checkpoints.reading import Transformation, read_arrays, read_state
from rosetta_t5.checkpoints.save_errors import save_error
from rosetta_t5.checkpoints.saved_state import (
  SaveTransformation,
  float_dtype,
  step_number,
  stored_dtype,
  transformed_state,
)
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.parallel.partition_specs import partition_specs_of


class Checkpointer:
  """Saves and restores checkpoints in T5X's older layout (T5X's class).

  Attributes:
    checkpoints_dir: the folder of checkpoints.
    keep: how many of the latest stay; None for all.
    keep_dataset_checkpoints: how many of the latest dataset positions stay; None for all.
    restore_dtype: the dtype of restored floating-point parameters; None for their own.
  """

  def __init__(
    self,
    train_state: Any,
    partitioner: BasePartitioner,
    checkpoints_dir: str | os.PathLike[str],
    dataset_iterator: Any = None,
    *,
    keep: int | None = None,
    save_dtype: Any = np.float32,
    restore_dtype: Any = None,
    keep_dataset_checkpoints: int | None = None,
  ):
    """Builds a checkpointer; nothing is written yet.

    Args:
      train_state: the run's train state, or its shapes.
      partitioner: places restored arrays.
      checkpoints_dir: the folder of checkpoints.
      dataset_iterator: with `save(filename)` and `restore(filename)`.
      keep: see the attribute.
      save_dtype: dtype of the stored floating-point parameters.
      restore_dtype: see the attribute.
      keep_dataset_checkpoints: see the attribute.
    """
    self._train_state = train_state
    self._partitioner = partitioner
    self._dataset_iterator = dataset_iterator
    self._save_dtype = float_dtype(save_dtype, "save_dtype")
    self.checkpoints_dir = os.fspath(checkpoints_dir)
    self.keep = keep
    self.keep_dataset_checkpoints = keep_dataset_checkpoints
    self.restore_dtype = float_dtype(restore_dtype, "restore_dtype")

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
    """Writes `train_state`; returns once the folder has its name. One that is there stays as it is.

    Args:
      train_state: what to save; lazy arrays are read one at a time.
      state_transformation_fns: `fn(state_dict, parameter_infos)` returns both, changed; in order.
      concurrent_gb: T5X's limit; one array at a time is in memory here.

    Raises:
      CheckpointSaveError: it could not be written.
    """
    del concurrent_gb
    step = step_number(train_state)
    folder = checkpoint_folders.checkpoint_path(self.checkpoints_dir, step)
    if folder.exists():
      return
    state = transformed_state(train_state, self._partitioner, state_transformation_fns)
    try:
      self._write(folder, flatten_state_dict(state, keep_empty_nodes=True))
    except OSError as error:
      raise save_error(epath.Path(self.checkpoints_dir), step, error) from error
    self._remove_old()

  def _write(self, folder: epath.Path, flat: Mapping[str, Any]) -> None:
    first = jax.process_index() == 0
    if first:
      remove_unfinished(folder.parent)
      Removal(folder.parent).finish()
      writer = LegacyWriter(folder)
    for name, leaf in flat.items():
      if not hasattr(leaf, "shape"):
        continue
      if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
      if first:
        writer.write(name, as_stored_array(leaf).astype(stored_dtype(name, leaf, self._save_dtype)))
    if first:
      if self._dataset_iterator is not None:
        self._dataset_iterator.save(os.fspath(writer.unfinished / self._dataset_file()))
      # An optimizer's empty states keep the structure; None is kept as T5X does.
      writer.finish({n: None for n, leaf in flat.items() if leaf is None})
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices(f"legacy checkpoint {folder.name}")

  def _remove_old(self) -> None:
    if jax.process_index():
      return
    for step in sorted(self._retention().steps_to_delete(self.all_steps())):
      remove_checkpoint_dir(checkpoint_folders.checkpoint_path(self.checkpoints_dir, step))
    if self.keep_dataset_checkpoints:
      for step in self.all_dataset_checkpoint_steps()[: -self.keep_dataset_checkpoints]:
        remove_dataset_checkpoint(
          checkpoint_folders.checkpoint_path(self.checkpoints_dir, step), DATASET_PREFIX
        )

  def _retention(self) -> Retention:
    return Retention(self.checkpoints_dir, self.keep)

  def restore(
    self,
    step: int | None = None,
    path: str | os.PathLike[str] | None = None,
    state_transformation_fns: Sequence[Transformation] = (),
    fallback_state: Mapping[str, Any] | None = None,
    lazy_parameters: bool = False,
  ) -> Any:
    """Returns the train state of a checkpoint.

    Args:
      step: which of this folder's; None, without `path`, for the latest.
      path: a checkpoint anywhere, of any layout.
      state_transformation_fns: `fn(checkpoint's state dict, this train state's)`, in order.
      fallback_state: nested state dict from which what the checkpoint lacks is taken.
      lazy_parameters: leave the values on disk until they are asked for.

    Raises:
      CheckpointMismatchError: names, shapes or dtypes differ from the train state's.
      ValueError: there is no such checkpoint.
    """
    if step is not None and path is not None:
      raise ValueError("At most one of `step` or `path` may be provided.")
    if path is None:
      path = checkpoint_folders.find_step(self.checkpoints_dir, step)
    if lazy_parameters:
      state_dict = _lazy_state(read_arrays(path), self._train_state, state_transformation_fns)
      return self._train_state.restore_state(state_dict)
    restored = self._read(path, fallback_state, transformations=state_transformation_fns)
    if self._dataset_iterator is not None:
      self._dataset_iterator.restore(os.path.join(path, self._dataset_file()))
    return restored

  def _read(self, path: Any, fallback_state: Mapping[str, Any] | None, **reading: Any) -> Any:
    specs = flatten_state_dict(
      partition_specs_of(self._partitioner, self._train_state).state_dict()
    )
    shardings = {name: NamedSharding(self._partitioner.mesh, spec) for name, spec in specs.items()}
    state_dict = read_state(
      path,
      self._train_state.state_dict(),
      shardings,
      params_dtype=self.restore_dtype,
      allow_missing=fallback_state is not None,
      **reading,
    )
    if fallback_state is not None:
      state_dict = merge_state(state_dict, fallback_state)
    state_dict = completed(state_dict, self._train_state, shardings, path)
    return self._train_state.restore_state(state_dict)

  def restore_from_tf_checkpoint(
    self,
    path_or_dir: str | os.PathLike[str],
    strict: bool = True,
    translator: CheckpointTranslator | None = None,
  ) -> Any:
    """Returns the train state of a Mesh TensorFlow checkpoint, its prefix or its folder.

    Args:
      path_or_dir: where it is.
      strict: refuse names that the train state does not have.
      translator: renames its entries; None for the rules of T5 1.0 and 1.1.
    """
    arrays = mesh_tf.read_arrays(path_or_dir, translator)
    return self._read(path_or_dir, None, arrays=arrays, allow_unexpected=not strict)

  def convert_from_tf_checkpoint(
    self,
    path_or_dir: str | os.PathLike[str],
    *,
    state_transformation_fns: Sequence[SaveTransformation] = (),
    concurrent_gb: int = 16,
    translator: CheckpointTranslator | None = None,
  ) -> None:
    """Writes a Mesh TensorFlow checkpoint as one of this folder, one array in memory at a time.

    Args:
      path_or_dir: its prefix or its folder.
      state_transformation_fns: as in `save`.
      concurrent_gb: as in `save`.
      translator: renames its entries; None for the rules of T5 1.0 and 1.1.
    """
    state_dict = mesh_tf.restore_from_t5_checkpoint(
      self._train_state.state_dict(), path_or_dir, lazy_parameters=True, translator=translator
    )
    train_state = self._train_state.restore_state(state_dict)
    self.save(train_state, state_transformation_fns, concurrent_gb=concurrent_gb)

  def _dataset_file(self) -> str:
    layout = self._partitioner.get_data_layout()
    return dataset_filename(layout.shard_id, layout.num_shards)


class SaveBestCheckpointer(Checkpointer):
  """Keeps the checkpoints with the best values of a metric, and the latest (T5X's class).

  Attributes:
    metric_name_to_monitor: RUN/TAG in TensorBoard's files under the folder of checkpoints.
    metric_mode: 'max' or 'min', which values are better.
    keep_checkpoints_without_metrics: whether checkpoints of unknown metric stay.
    force_keep_period: steps that are a multiple of it stay.
  """

  def __init__(
    self,
    train_state: Any,
    partitioner: BasePartitioner,
    checkpoints_dir: str | os.PathLike[str],
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
    """Builds a checkpointer; see the attributes, and Checkpointer for the rest."""
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
    self.metric_name_to_monitor = metric_name_to_monitor
    self.metric_mode = metric_mode
    self.keep_checkpoints_without_metrics = keep_checkpoints_without_metrics
    self.force_keep_period = force_keep_period
    self._best = BestMetric(metric_name_to_monitor, metric_mode, keep_checkpoints_without_metrics)

  def manager_options(self) -> dict[str, Any]:
    """Returns these settings as arguments of `OrbaxCheckpointManagerInterface`."""
    return {
      "metric_name_to_monitor": self.metric_name_to_monitor,
      "metric_mode": self.metric_mode,
      "keep_checkpoints_without_metrics": self.keep_checkpoints_without_metrics,
      "force_keep_period": self.force_keep_period,
    }

  def _retention(self) -> Retention:
    return Retention(self.checkpoints_dir, self.keep, self.force_keep_period, self._best)


def all_dataset_checkpoint_steps(checkpoints_dir: str | os.PathLike[str]) -> list[int]:
  """Returns the steps whose checkpoints have a position in the data, in ascending order."""

  def has_position(step: int) -> bool:
    folder = checkpoint_folders.checkpoint_path(checkpoints_dir, step)
    inside = folder / checkpoint_folders.DATASET_ITEM
    return any(folder.glob(f"{DATASET_PREFIX}-*")) or any(inside.glob(f"{DATASET_PREFIX}-*"))

  return [step for step in checkpoint_folders.all_steps(checkpoints_dir) if has_position(step)]


def _lazy_state(
  arrays: Mapping[str, Any], train_state: Any, transformations: Sequence[Transformation]
) -> dict[str, Any]:
  state: Any = unflatten_state_dict(arrays)
  expected = train_state.state_dict()
  for transform in transformations:
    state = transform(state, expected)
  return dict(state)
