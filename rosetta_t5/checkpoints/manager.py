"""Saves and restores the checkpoints of a run, in T5X's Orbax layout."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding

from rosetta_t5.checkpoints.arrays.state_dicts import (
  flatten_state_dict,
  merge_state,
  unflatten_state_dict,
)
from rosetta_t5.checkpoints.dataset_position import (
  BATCH_FACT,
  DATASET_PREFIX,
  DatasetArgs,
  DatasetCheckpointHandler,
  batch_fact,
  check_same_batches,
  dataset_filename,
)
from rosetta_t5.checkpoints.formats import mesh_tf
from rosetta_t5.checkpoints.formats.mesh_tf import CheckpointTranslator
from rosetta_t5.checkpoints.fresh_state import completed
from rosetta_t5.checkpoints.model_dir import checkpoint_folders
from rosetta_t5.checkpoints.model_dir.best_metric import BestMetric
from rosetta_t5.checkpoints.model_dir.lock import check_still_held
from rosetta_t5.checkpoints.model_dir.removal import REMOVED, Removal
from rosetta_t5.checkpoints.model_dir.retention import Retention, drop_old_dataset_positions
from rosetta_t5.checkpoints.reading import Transformation, check_fits, read_state, unreadable
from rosetta_t5.checkpoints.save_errors import save_error
from rosetta_t5.checkpoints.saved_state import (
  SaveTransformation,
  float_dtype,
  step_number,
  stored_dtype,
  stored_leaves,
  transformed_state,
)
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.parallel.partition_specs import partition_specs_of
from rosetta_t5.training.train_state import TrainState

PyTree = Any


class OrbaxCheckpointManagerInterface:
  """The checkpoints of one folder, `checkpoint_STEP` each (T5X's class of this name).

  A checkpoint holds the item `state`, {"state": {"step", "param_states"}, "target": parameters} as
  Orbax writes it, the item `dataset` if the run saves its position in the data, and run facts.
  Saves run in the background; a folder gets its name only when everything in it is written.

  Attributes:
    run_facts: small JSON facts stored with each checkpoint, such as the seeds that were drawn; read
      them with `read_run_facts` before anything is restored.
    state_transformation_fns: applied to what is saved where `save` is given none.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    train_state: TrainState,
    partitioner: BasePartitioner,
    dataset_iterator: Any = None,
    save_dtype: Any = None,
    restore_dtype: Any = None,
    keep: int | None = None,
    period: int | None = 1,
    checkpoint_steps: Sequence[int] | None = None,
    keep_dataset_checkpoints: int | None = None,
    force_keep_period: int | None = None,
    metric_name_to_monitor: str | None = None,
    metric_mode: str = "max",
    keep_checkpoints_without_metrics: bool = True,
    *,
    run_facts: Mapping[str, Any] | None = None,
  ):
    """Builds a manager. Nothing is written, not even the folder, before the first save.

    Args:
      directory: the folder of checkpoints.
      train_state: the run's train state, or its shapes.
      partitioner: places restored arrays.
      dataset_iterator: with `save(filename)` and `restore(filename)`; None stores no position.
      save_dtype: dtype of the stored floating-point parameters; None for their own.
      restore_dtype: the same for restored ones.
      keep: how many of the latest checkpoints stay; None for all.
      period: `should_save` says yes at multiples of it; None for never.
      checkpoint_steps: more steps at which `should_save` says yes.
      keep_dataset_checkpoints: how many of the latest dataset positions stay; None for all.
      force_keep_period: steps that are a multiple of it are never deleted.
      metric_name_to_monitor: RUN/TAG, such as 'train/accuracy': `keep` then counts the best by this
        metric of TensorBoard's files under `directory`, and the latest stays beside them.
      metric_mode: 'max' or 'min', which values are better.
      keep_checkpoints_without_metrics: whether checkpoints of unknown metric stay.
      run_facts: see the attribute.

    Raises:
      ValueError: `keep` is below 1, a dtype is none of floating point, or metric_name_to_monitor or
        metric_mode is none.
    """
    best = None
    if metric_name_to_monitor is not None:
      best = BestMetric(metric_name_to_monitor, metric_mode, keep_checkpoints_without_metrics)
    self._directory = epath.Path(directory)
    self._train_state = train_state
    self._partitioner = partitioner
    self._dataset_iterator = dataset_iterator
    self._save_dtype = float_dtype(save_dtype, "save_dtype (SaveCheckpointConfig.dtype)")
    self._restore_dtype = float_dtype(
      restore_dtype, "restore_dtype (RestoreCheckpointConfig.dtype)"
    )
    self._retention = Retention(self._directory, keep, force_keep_period, best)
    self._period = period
    self._checkpoint_steps = frozenset(checkpoint_steps or ())
    self._keep_dataset = keep_dataset_checkpoints
    self.run_facts = dict(run_facts or {})
    self.state_transformation_fns: Sequence[SaveTransformation] = ()
    self._steps = checkpoint_folders.all_steps(self._directory)
    self._writer: ocp.CheckpointManager | None = None
    self._removal = Removal(directory)
    self._pending: int | None = None

  @property
  def directory(self) -> epath.Path:
    """The folder of checkpoints."""
    return self._directory

  def all_steps(self) -> list[int]:
    """Returns the steps that are saved or being saved, in ascending order."""
    return list(self._steps)

  def reload(self) -> None:
    """Looks again which steps are there, after something else than this manager changed the folder."""
    self._steps = checkpoint_folders.all_steps(self._directory)

  def latest_step(self) -> int | None:
    """Returns the last of `all_steps()`, or None."""
    return self._steps[-1] if self._steps else None

  def should_save(self, step: int) -> bool:
    """Returns whether `step` is due by `period` or `checkpoint_steps` and not there yet.

    Raises:
      CheckpointSaveError: a save in the background has failed.
    """
    self.check_for_errors()
    due = step in self._checkpoint_steps or (bool(self._period) and step % self._period == 0)  # type: ignore[operator]
    return due and step not in self._steps

  def save(
    self,
    train_state: TrainState,
    state_transformation_fns: Sequence[SaveTransformation] = (),
    force: bool = True,
  ) -> bool:
    """Starts saving `train_state` and returns once its values are copied from the devices.

    Waits for the save before it, if that still runs.

    Args:
      train_state: what to save; its step names the folder.
      state_transformation_fns: `fn(state_dict, parameter_infos)` returns both, changed; in order.
      force: save though `should_save` says no. A checkpoint that is there is never overwritten.

    Returns:
      Whether a save was started.

    Raises:
      CheckpointSaveError: this save or the one before it failed.
      ModelDirInUseError: another run has taken the folder over.
    """
    step = step_number(train_state)
    if step in self._steps or not (force or self.should_save(step)):
      return False
    self.wait_until_finished()
    check_still_held(self._directory)
    items: dict[str, Any] = {
      checkpoint_folders.STATE_ITEM: self._state_args(
        transformed_state(
          train_state, self._partitioner, state_transformation_fns or self.state_transformation_fns
        )
      )
    }
    if self._dataset_iterator is not None:
      items[checkpoint_folders.DATASET_ITEM] = DatasetArgs(self._dataset_iterator)
    try:
      self._orbax().save(
        step, args=ocp.args.Composite(**items), force=True, custom_metadata=self._facts()
      )
    except Exception as error:
      raise save_error(self._directory, step, error) from error
    self._pending = step
    self._steps = sorted({*self._steps, step})
    return True

  def wait_until_finished(self) -> None:
    """Waits until the running save, if there is one, is complete on disk.

    Raises:
      CheckpointSaveError: it failed.
    """
    if self._pending is None:
      return
    step, self._pending = self._pending, None
    try:
      self._orbax().wait_until_finished()
    except Exception as error:
      raise save_error(self._directory, step, error) from error
    self.reload()
    self._removal.start()
    if self._keep_dataset is not None and jax.process_index() == 0:
      drop_old_dataset_positions(self._directory, self._keep_dataset, DATASET_PREFIX)

  def check_for_errors(self) -> None:
    """Raises CheckpointSaveError if the last save has failed; never waits for one that runs."""
    if self._pending is not None and not self._orbax().is_saving_in_progress():
      self.wait_until_finished()

  def close(self) -> None:
    """Waits for the running save and ends the background threads."""
    try:
      self.wait_until_finished()
    finally:
      writer, self._writer = self._writer, None
      if writer is not None:
        writer.close()
        self._removal.finish()

  def restore(
    self,
    step: int | None = None,
    path: str | os.PathLike[str] | None = None,
    fallback_state: Mapping[str, Any] | None = None,
    state_transformation_fns: Sequence[Transformation] = (),
    lazy_parameters: bool = False,
    *,
    restore_dataset: bool = True,
    strict: bool = True,
  ) -> TrainState:
    """Returns the train state of a checkpoint, each array placed on its devices by the partitioner.

    Args:
      step: which of this folder's; None, without `path`, for the latest.
      path: a checkpoint anywhere, of any layout (see `reading.read_arrays`).
      fallback_state: nested state dict from which what the checkpoint lacks is taken; optimizer
        state that does not fit is taken from it too.
      state_transformation_fns: `fn(checkpoint's state dict, this train state's)` returns the former
        changed; in order.
      lazy_parameters: T5X's argument; as in T5X, Orbax's manager reads everything at once.
      restore_dataset: move the dataset iterator, if there is one, to its stored position too.
      strict: refuse names in the checkpoint that the train state does not have.

    Raises:
      CheckpointMismatchError: names, shapes or dtypes differ from the train state's.
      UnreadableCheckpointError: the checkpoint is damaged.
      ValueError: there is no such checkpoint.
    """
    del lazy_parameters
    folder = self._checkpoint_to_restore(step, path)
    restored = self._restored(
      folder, fallback_state, strict=strict, transformations=state_transformation_fns
    )
    if restore_dataset and self._dataset_iterator is not None:
      self._restore_dataset(folder)
    return restored

  def restore_from_tf_checkpoint(
    self,
    path_or_dir: str | os.PathLike[str],
    strict: bool = True,
    translator: CheckpointTranslator | None = None,
  ) -> TrainState:
    """Returns the train state of a Mesh TensorFlow checkpoint.

    Args:
      path_or_dir: its prefix, or the folder.
      strict: refuse names that the train state does not have.
      translator: renames its entries; None for the rules of T5 1.0 and 1.1.

    Raises:
      CheckpointMismatchError: names or shapes differ.
    """
    arrays = mesh_tf.read_arrays(path_or_dir, translator)
    return self._restored(epath.Path(path_or_dir), None, strict=strict, arrays=arrays)

  def _restored(
    self,
    folder: epath.Path,
    fallback_state: Mapping[str, Any] | None,
    *,
    strict: bool,
    **reading: Any,
  ) -> TrainState:
    shardings = self._flat_shardings()
    state_dict = read_state(
      folder,
      self._train_state.state_dict(),
      shardings,
      params_dtype=self._restore_dtype,
      allow_missing=fallback_state is not None,
      allow_unexpected=not strict,
      **reading,
    )
    if fallback_state is not None:
      merged = flatten_state_dict(merge_state(state_dict, fallback_state))
      placed = {name: jax.device_put(merged[name], shardings[name]) for name in shardings}
      state_dict = merge_state(unflatten_state_dict(placed), state_dict)
    return self._train_state.restore_state(
      completed(state_dict, self._train_state, shardings, folder)
    )

  def check_fits(self, path: str | os.PathLike[str], **options: Any) -> None:
    """Raises CheckpointMismatchError unless the checkpoint at `path` is of this train state.

    Args:
      path: a checkpoint of any layout.
      **options: of `reading.check_fits`.
    """
    check_fits(path, self._train_state.state_dict(), **options)

  def protect(self, step: int) -> None:
    """Keeps the checkpoint of `step` whatever `keep` says, such as the one a run started from."""
    self._retention.protected.add(step)

  def _checkpoint_to_restore(
    self, step: int | None, path: str | os.PathLike[str] | None
  ) -> epath.Path:
    if step is not None and path is not None:
      raise ValueError(f"restore was given both step = {step} and path = {path}: leave one out")
    if path is not None:
      return epath.Path(path)
    return checkpoint_folders.find_step(self._directory, step)

  def _facts(self) -> dict[str, Any]:
    batch = {} if self._dataset_iterator is None else batch_fact(self._dataset_iterator)
    return {**self.run_facts, **({BATCH_FACT: batch} if batch else {})}

  def _restore_dataset(self, folder: epath.Path) -> None:
    stored = checkpoint_folders.read_run_facts(folder).get(BATCH_FACT)
    check_same_batches(folder, stored, self._dataset_iterator)
    args = DatasetArgs(self._dataset_iterator)
    try:
      self._dataset_handler().restore(folder / checkpoint_folders.DATASET_ITEM, args)
    except (OSError, KeyError) as error:
      raise unreadable(folder, error) from error

  def _flat_shardings(self) -> dict[str, NamedSharding]:
    specs = flatten_state_dict(
      partition_specs_of(self._partitioner, self._train_state).state_dict()
    )
    return {name: NamedSharding(self._partitioner.mesh, spec) for name, spec in specs.items()}

  def _state_args(self, state_dict: PyTree) -> ocp.args.PyTreeSave:
    leaves = stored_leaves(state_dict)
    save_args = {
      name: ocp.SaveArgs(dtype=stored_dtype(name, leaf, self._save_dtype))
      for name, leaf in leaves.items()
    }
    return ocp.args.PyTreeSave(
      item=unflatten_state_dict(leaves), save_args=unflatten_state_dict(save_args)
    )

  def _dataset_handler(self) -> DatasetCheckpointHandler:
    layout = self._partitioner.get_data_layout()
    return DatasetCheckpointHandler(
      dataset_filename(layout.shard_id, layout.num_shards), layout.is_first_host_in_replica_set
    )

  def _orbax(self) -> ocp.CheckpointManager:
    """Returns the manager that writes, made on first use: it creates the folder and cleans up."""
    if self._writer is None:
      handlers: dict[str, Any] = {
        # Compressed, parameters would be 8% smaller, and take three times as long to write and read.
        checkpoint_folders.STATE_ITEM: ocp.PyTreeCheckpointHandler(use_compression=False)
      }
      if self._dataset_iterator is not None:
        handlers[checkpoint_folders.DATASET_ITEM] = self._dataset_handler()
      options = ocp.CheckpointManagerOptions(
        step_prefix=checkpoint_folders.STEP_PREFIX,
        preservation_policy=self._retention,
        cleanup_tmp_directories=True,
        save_root_metadata=False,
        # Only steps matter here; reading the metadata of each old checkpoint takes time.
        lightweight_initialize=True,
        # A rename is whole: a run that is killed then leaves no half of a checkpoint.
        todelete_subdir=None if os.fspath(self._directory).startswith("gs://") else REMOVED,
      )
      self._removal.start()
      self._writer = ocp.CheckpointManager(
        epath.Path(self._directory).absolute(), item_handlers=handlers, options=options
      )
    return self._writer
