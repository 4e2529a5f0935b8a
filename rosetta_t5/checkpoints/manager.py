"""The checkpoint manager, which saves and restores the checkpoints of a run in T5X's Orbax layout."""

import json
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from rosetta_t5.argument_types import NonNegative, Positive
from rosetta_t5.checkpoints import checkpoint_folders, saved_items
from rosetta_t5.checkpoints.restore import RestoreTransformation, restore_train_state
from rosetta_t5.files import files_in, write_checksums
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.training.train_state import TrainState
from rosetta_t5.user_errors import reason_of

# The run fact that names the checkpoint with which a finetuning run began.
STARTED_FROM = "started_from"
# Orbax completes these after the checksums, which therefore omit them.
_COMMIT_FILES = ("_CHECKPOINT_METADATA", "commit_success.txt")
# The folder in MODEL_DIR to which checkpoints are moved before their files are deleted. A process
# that is killed during the deletion then leaves no incomplete checkpoint.
_REMOVED_FOLDER = ".removed"
# Devices that have the same large array write a part of it each. A slice of a small one takes longer than its part.
_ARRAY_HANDLERS = ocp.type_handlers.create_type_handler_registry(
  (jax.Array, ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=1 << 20))
)


class _OrbaxManager(ocp.CheckpointManager):
  """Orbax's manager. It leaves preemptions to the run, whose listener counts calls instead of steps."""

  def reached_preemption(self, step: int) -> bool:
    return False


class OrbaxCheckpointManagerInterface:
  """The checkpoints of one folder, `checkpoint_STEP` each (T5X's class of this name).

  A checkpoint contains the item `state`, {"state": {"step", "param_states"}, "target": parameters},
  in Orbax's layout, the item `dataset` if the run saves its position in the data, and run facts.
  Saves run in the background. A folder gets its name only when everything in it is written.

  Attributes:
    directory: the folder of checkpoints.
    run_facts: small JSON values stored with each checkpoint, such as the random seeds.
      `read_run_facts` reads them without restoring the state.
    user_save: the `save` of a user's checkpointer. It is called in place of `save`, which it calls
      in turn to write the checkpoint; None for none.
    user_restore: the `restore` of a user's checkpointer, which restores in place of the manager.
    state_transformation_fns: applied to the saved state if `save` gets none.
    strict: whether names in a checkpoint that the train state does not have are an error.
    restores_dataset: whether `restore` also moves the dataset iterator to its stored position.
    restored_from: the checkpoint that `restore` read last.
    restore_changes: the transformations with which it did.
  """

  user_save: Callable[..., Any] | None = None
  user_restore: Callable[..., Any] | None = None
  state_transformation_fns: Sequence[saved_items.SaveTransformation] = ()
  strict: bool = True
  restores_dataset: bool = True
  restored_from: str | None = None
  restore_changes: Sequence[RestoreTransformation] = ()

  def __init__(
    self,
    directory: epath.PathLike,
    train_state: TrainState,
    partitioner: BasePartitioner,
    dataset_iterator: Any = None,
    save_dtype: Any = None,
    restore_dtype: Any = None,
    keep: Positive | None = None,
    period: NonNegative | None = 1,
    checkpoint_steps: Sequence[NonNegative] | None = None,
    keep_dataset_checkpoints: Positive | None = None,
    force_keep_period: Positive | None = None,
    metric_name_to_monitor: str | None = None,
    metric_mode: str = "max",
    keep_checkpoints_without_metrics: bool = True,
  ):
    """Creates a manager. Nothing is written before the first save, not even the folder.

    Args:
      directory: the folder of checkpoints.
      train_state: the run's train state, or its shapes.
      partitioner: specifies the sharding of restored arrays.
      dataset_iterator: has `save(filename)` and `restore(filename)`; None stores no position.
      save_dtype: the dtype of the stored floating-point parameters; None for their own.
      restore_dtype: the dtype of the restored floating-point parameters; None for their own.
      keep: how many of the latest checkpoints are kept; None for all.
      period: `should_save` returns True at its multiples; None for never.
      checkpoint_steps: more steps at which `should_save` returns True.
      keep_dataset_checkpoints: how many of the latest dataset positions are kept; None for all.
      force_keep_period: checkpoints at its multiples are never deleted.
      metric_name_to_monitor: RUN/TAG, such as 'train/accuracy'. `keep` is then the number of
        checkpoints with the best value in TensorBoard's files under `directory`, and the latest
        checkpoint is kept beside them.
      metric_mode: 'max' if larger values are better, 'min' if smaller values are.
      keep_checkpoints_without_metrics: whether checkpoints without a value of the metric are kept.

    Raises:
      ValueError: metric_name_to_monitor or metric_mode is invalid.
    """
    self.directory = epath.Path(directory)
    self.run_facts: dict[str, Any] = {}
    self._train_state = train_state
    self._partitioner = partitioner
    self._dataset_iterator = dataset_iterator
    self._save_dtype, self._restore_dtype = save_dtype, restore_dtype
    best = (metric_name_to_monitor, metric_mode, keep_checkpoints_without_metrics)
    self._retention = saved_items.Retention(self.directory, keep, force_keep_period, *best)
    self._period = period
    self._checkpoint_steps = frozenset(checkpoint_steps or ())
    self._keep_dataset = keep_dataset_checkpoints
    self._steps = checkpoint_folders.all_steps(self.directory)
    self._orbax: ocp.CheckpointManager | None = None
    self._deleter = futures.ThreadPoolExecutor(1)
    self._saving_step: int | None = None

  def all_steps(self) -> list[int]:
    """Returns the steps that are saved or being saved, in ascending order."""
    return list(self._steps)

  def latest_step(self) -> int | None:
    """Returns the last of `all_steps()`, or None."""
    return self._steps[-1] if self._steps else None

  def reload(self) -> None:
    """Reads the steps from disk again, after something other than this manager changed the folder."""
    self._steps = checkpoint_folders.all_steps(self.directory)

  def begin_run(self, run_facts: Mapping[str, Any]) -> None:
    """Sets `run_facts`, and keeps the checkpoint that they name as the run's start."""
    self.run_facts = dict(run_facts)
    if metric := self._retention.metric:
      self.run_facts[saved_items.COMPARED_BY] = (metric, self._retention.mode)
    if (base := run_facts.get(STARTED_FROM)) is not None:
      self._retention.protected.add(epath.Path(base))

  def should_save(self, step: int) -> bool:
    """Returns whether `step` is due by `period` or `checkpoint_steps` and not yet saved.

    Raises:
      CheckpointSaveError: a save in the background has failed.
    """
    if self._saving_step is not None and not self._orbax_manager().is_saving_in_progress():
      self.wait_until_finished()
    due = step in self._checkpoint_steps or bool(self._period and step % self._period == 0)
    return due and step not in self._steps

  def save(
    self,
    train_state: TrainState,
    state_transformation_fns: Sequence[saved_items.SaveTransformation] = (),
    force: bool = True,
  ) -> bool:
    """Starts to save `train_state`; returns whether it did, once the values are copied from the devices.

    If the previous save is still running, this method waits for it. An existing checkpoint is never
    overwritten.

    Args:
      train_state: the state to save; its step names the folder.
      state_transformation_fns: each `fn(state_dict, parameter_infos)` returns both of them, changed.
      force: save even if `should_save` returns False.

    Raises:
      CheckpointSaveError: this save or the previous one failed.
    """
    step = int(np.asarray(saved_items.get_local_data(train_state.step)))
    if step in self._steps or not (force or self.should_save(step)):
      return False
    if self.user_save is not None:
      # so that the user's `save` can call this method to write the checkpoint
      user_save, self.user_save = self.user_save, None
      try:
        user_save(train_state, state_transformation_fns)
      finally:
        self.user_save = user_save
      return step in self._steps
    self.wait_until_finished()
    fns = state_transformation_fns or self.state_transformation_fns
    omitted = self.run_facts.get(checkpoint_folders.ADAPTER, {}).get("base_parameters", ())
    state = saved_items.state_args(train_state, self._partitioner, fns, self._save_dtype, omitted)
    items: dict[str, Any] = {checkpoint_folders.STATE_ITEM: state}
    if self._dataset_iterator is not None:
      items[checkpoint_folders.DATASET_ITEM] = saved_items.DatasetArgs(self._dataset_iterator)
    self._saving_step = step
    try:
      self._orbax_manager().save(step, args=ocp.args.Composite(**items), force=True)
    except Exception as error:
      raise self._abandon_save(error) from error
    self._steps = sorted({*self._steps, step})
    return True

  def wait_until_finished(self) -> None:
    """Waits until the running save, if any, is complete on disk.

    Raises:
      CheckpointSaveError: the save failed.
    """
    if self._saving_step is None:
      return
    try:
      self._orbax_manager().wait_until_finished()
    except Exception as error:
      raise self._abandon_save(error) from error
    self._saving_step = None
    self.reload()
    if jax.process_index() == 0:
      self._deleter.submit(self._delete_removed)
      for step in self._steps[: -self._keep_dataset] if self._keep_dataset else ():
        folder = checkpoint_folders.checkpoint_path(self.directory, step)
        saved_items.remove_dataset_checkpoint(folder, saved_items.DATASET_PREFIX)

  def close(self) -> None:
    """Waits for the running save and ends the background threads."""
    try:
      self.wait_until_finished()
    finally:
      orbax, self._orbax = self._orbax, None
      if orbax is not None:
        orbax.close()
        self._deleter.submit(self._delete_removed).result()

  def restore(
    self,
    step: int | None = None,
    path: epath.PathLike | None = None,
    fallback_state: Mapping[str, Any] | None = None,
    state_transformation_fns: Sequence[RestoreTransformation] = (),
    lazy_parameters: bool = False,
    *,
    restore_dataset: bool = True,
  ) -> TrainState:
    """Returns the train state of a checkpoint, sharded as the partitioner specifies.

    Args:
      step: a step of this folder; None, without `path`, for the latest.
      path: a checkpoint of any layout in any folder.
      fallback_state: nested state dict that provides what the checkpoint lacks. It also replaces
        optimizer state that does not match.
      state_transformation_fns: each `fn(checkpoint's state dict, this train state's)` returns the
        first one, changed.
      lazy_parameters: T5X's argument. As in T5X, it has no effect on Orbax's layout.
      restore_dataset: False leaves the dataset iterator where it is.

    Raises:
      CheckpointMismatchError: names, shapes or dtypes differ from the train state's.
      UnreadableCheckpointError: the checkpoint is damaged.
      ValueError: there is no such checkpoint.
    """
    folder = epath.Path(path or checkpoint_folders.select_checkpoint(self.directory, step))
    self.restored_from, self.restore_changes = os.fspath(folder), state_transformation_fns
    if self.user_restore is not None:
      return self.user_restore(
        path=self.restored_from,
        fallback_state=fallback_state,
        state_transformation_fns=state_transformation_fns,
      )
    restore_dataset &= self.restores_dataset and self._dataset_iterator is not None
    checkpoint_folders.verify_files(folder, with_dataset=restore_dataset)
    restored = restore_train_state(
      folder,
      self._train_state,
      self._partitioner,
      transformations=state_transformation_fns,
      params_dtype=self._restore_dtype,
      fallback_state=fallback_state,
      allow_unexpected=not self.strict,
    )
    if restore_dataset:
      self._restore_dataset(folder)
    return restored

  def _restore_dataset(self, folder: epath.Path) -> None:
    args = saved_items.DatasetArgs(self._dataset_iterator)
    try:
      self._dataset_handler().restore(folder / checkpoint_folders.DATASET_ITEM, args)
    except (OSError, KeyError) as error:
      raise checkpoint_folders.unreadable_error(folder, error) from error
    except ValueError as error:
      step = checkpoint_folders.step_of(folder)
      own = f"SaveCheckpointConfig.ignore_dataset_until={step}"
      raise ValueError(
        f"{error}. To continue from this checkpoint and start the data from its beginning, set "
        "--gin.utils.RestoreCheckpointConfig.restore_dataset=False"
        + ("" if step is None else f" or, if it is in MODEL_DIR, --gin.utils.{own}")
      ) from error

  def _dataset_handler(self) -> saved_items.DatasetCheckpointHandler:
    layout = self._partitioner.get_data_layout()
    return saved_items.DatasetCheckpointHandler(
      saved_items.dataset_filename(layout.shard_id, layout.num_shards),
      layout.is_first_host_in_replica_set,
    )

  def _orbax_manager(self) -> ocp.CheckpointManager:
    """Returns Orbax's manager. It is created on first use, because it creates the folder."""
    if self._orbax is None:
      # Compression would save 8% of the space, and take three times as long to write and read.
      handler = ocp.PyTreeCheckpointHandler(
        use_compression=False, type_handler_registry=_ARRAY_HANDLERS
      )
      saved_items.end_run_if_a_write_fails(handler, self._abandon_save)
      handlers: dict[str, Any] = {checkpoint_folders.STATE_ITEM: handler}
      if self._dataset_iterator is not None:
        handlers[checkpoint_folders.DATASET_ITEM] = self._dataset_handler()
      options = ocp.CheckpointManagerOptions(
        step_prefix=checkpoint_folders.STEP_PREFIX,
        preservation_policy=self._retention,
        cleanup_tmp_directories=True,
        # If a folder cannot be created in the background, Orbax waits for it for ten minutes.
        async_options=ocp.AsyncOptions(
          create_directories_asynchronously=False,
          post_finalization_callback=self._complete_folder,
        ),
        save_root_metadata=False,
        # Reading the metadata of each old checkpoint takes time, and only the steps are needed.
        lightweight_initialize=True,
        # A rename is atomic, so a run that is killed leaves no incomplete checkpoint.
        todelete_subdir=None if os.fspath(self.directory).startswith("gs://") else _REMOVED_FOLDER,
      )
      self.directory.mkdir(parents=True, exist_ok=True)
      if jax.process_index() == 0:
        self._delete_removed()  # Orbax cannot move a checkpoint to the name of one that was left there.
      self._orbax = _OrbaxManager(
        self.directory.absolute(), item_handlers=handlers, options=options
      )
    return self._orbax

  def _complete_folder(self) -> None:
    """Writes the run facts and the checksums, just before Orbax gives the folder its final name.

    Orbax calls it in the background on process 0, when all processes have written their arrays.
    """
    final = checkpoint_folders.checkpoint_path(self.directory, self._saving_step or 0)
    pattern = f"{final.name}{ocp.path.atomicity.TMP_DIR_SUFFIX}*"
    folder = next(iter(sorted(self.directory.glob(pattern))), final)
    (folder / checkpoint_folders.RUN_FACTS).write_text(json.dumps(self.run_facts))
    # Storage in the cloud has checksums of its own, and reading everything again would take long.
    if "://" not in os.fspath(folder):
      write_checksums(folder, [n for n in files_in(folder) if n not in _COMMIT_FILES])

  def _delete_removed(self) -> None:
    for entry in pathlib.Path(self.directory, _REMOVED_FOLDER).glob("*"):
      # A checkpoint can be a link to a folder elsewhere, which is kept.
      entry.unlink() if entry.is_symlink() else shutil.rmtree(entry, ignore_errors=True)

  def _abandon_save(self, error: Exception) -> saved_items.CheckpointSaveError:
    """Gives up the running save, and returns the error that says so."""
    step, self._saving_step = self._saving_step or 0, None
    self._steps = [saved for saved in self._steps if saved != step]
    complete = ", ".join(map(str, self._steps)) or "none"
    return saved_items.CheckpointSaveError(
      f"checkpoint {checkpoint_folders.checkpoint_path(self.directory, step)} could not be saved: "
      f"{reason_of(error)}. The steps of the complete checkpoints are: {complete}. If the disk "
      "is full or not writable, free some space or set another MODEL_DIR; then start the run again"
    )
