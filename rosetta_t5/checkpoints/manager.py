"""Saves and restores the checkpoints of a run, in T5X's Orbax layout."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding

from rosetta_t5.checkpoints import folders
from rosetta_t5.checkpoints.dataset_item import (
  DATASET_PREFIX,
  DatasetArgs,
  DatasetCheckpointHandler,
  dataset_filename,
)
from rosetta_t5.checkpoints.reading import check_fit, read_shapes, read_state, unreadable
from rosetta_t5.checkpoints.retention import Retention, drop_old_dataset_positions
from rosetta_t5.checkpoints.state_dicts import (
  flatten_state_dict,
  merge_state,
  unflatten_state_dict,
)
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.training.train_state import TrainState

PyTree = Any

_log = logging.getLogger(__name__)


class CheckpointSaveError(RuntimeError):
  """A checkpoint could not be written, so the run stops rather than train on without one."""


class OrbaxCheckpointManagerInterface:
  """The checkpoints of one folder, `checkpoint_STEP` each (T5X's class of this name).

  A checkpoint holds the item `state`, {"state": {"step", "param_states"}, "target": parameters} as
  Orbax writes it, the item `dataset` if the run saves its position in the data, and run facts.
  Saves run in the background; a folder gets its name only when everything in it is written.

  Attributes:
    run_facts: small JSON facts stored with each checkpoint, such as the seeds that were drawn; read
      them with `read_run_facts` before anything is restored.
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
      metric_name_to_monitor: keeping the best checkpoints by a metric is not supported yet.
      metric_mode: goes with metric_name_to_monitor.
      keep_checkpoints_without_metrics: goes with metric_name_to_monitor.
      run_facts: see the attribute.

    Raises:
      ValueError: `keep` is below 1, a dtype is none of floating point, or metric_name_to_monitor is
        given.
    """
    del metric_mode, keep_checkpoints_without_metrics
    if metric_name_to_monitor is not None:
      raise ValueError(
        f"metric_name_to_monitor = {metric_name_to_monitor!r}: keeping the best checkpoints by a "
        "metric is not supported yet; remove that binding, `keep` then counts the latest ones"
      )
    self._directory = epath.Path(directory)
    self._train_state = train_state
    self._partitioner = partitioner
    self._dataset_iterator = dataset_iterator
    self._save_dtype = _float_dtype(save_dtype, "save_dtype (SaveCheckpointConfig.dtype)")
    self._restore_dtype = _float_dtype(
      restore_dtype, "restore_dtype (RestoreCheckpointConfig.dtype)"
    )
    self._retention = Retention(self._directory, keep, force_keep_period)
    self._period = period
    self._checkpoint_steps = frozenset(checkpoint_steps or ())
    self._keep_dataset = keep_dataset_checkpoints
    self.run_facts = dict(run_facts or {})
    self._steps = folders.all_steps(self._directory)
    self._writer: ocp.CheckpointManager | None = None
    self._pending: int | None = None

  @property
  def directory(self) -> epath.Path:
    """The folder of checkpoints."""
    return self._directory

  def all_steps(self) -> list[int]:
    """Returns the steps that are saved or being saved, in ascending order."""
    return list(self._steps)

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
    state_transformation_fns: Sequence[Callable[..., Any]] = (),
    force: bool = True,
  ) -> bool:
    """Starts saving `train_state` and returns once its values are copied from the devices.

    Waits for the save before it, if that still runs.

    Args:
      train_state: what to save; its step names the folder.
      state_transformation_fns: not supported yet.
      force: save though `should_save` says no. A checkpoint that is there is never overwritten.

    Returns:
      Whether a save was started.

    Raises:
      CheckpointSaveError: this save or the one before it failed.
    """
    _refuse_transformations(state_transformation_fns)
    step = int(get_local_data(train_state.step))
    if step in self._steps or not (force or self.should_save(step)):
      return False
    self.wait_until_finished()
    items: dict[str, Any] = {folders.STATE_ITEM: self._state_args(train_state)}
    if self._dataset_iterator is not None:
      items[folders.DATASET_ITEM] = DatasetArgs(self._dataset_iterator)
    try:
      self._orbax().save(
        step, args=ocp.args.Composite(**items), force=True, custom_metadata=dict(self.run_facts)
      )
    except Exception as error:
      raise self._save_error(step, error) from error
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
      raise self._save_error(step, error) from error
    self._steps = folders.all_steps(self._directory)
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

  def restore(
    self,
    step: int | None = None,
    path: str | os.PathLike[str] | None = None,
    fallback_state: Mapping[str, Any] | None = None,
    state_transformation_fns: Sequence[Callable[..., Any]] = (),
    lazy_parameters: bool = False,
    *,
    restore_dataset: bool = True,
    strict: bool = True,
  ) -> TrainState:
    """Returns the train state of a checkpoint, each array placed on its devices by the partitioner.

    Args:
      step: which of this folder's; None, without `path`, for the latest.
      path: a checkpoint's folder anywhere.
      fallback_state: nested state dict from which names that the checkpoint lacks are taken.
      state_transformation_fns: not supported yet.
      lazy_parameters: not supported yet.
      restore_dataset: move the dataset iterator, if there is one, to its stored position too.
      strict: refuse names in the checkpoint that the train state does not have.

    Raises:
      CheckpointMismatchError: names, shapes or dtypes differ from the train state's.
      UnreadableCheckpointError: the checkpoint is damaged.
      ValueError: there is no such checkpoint.
    """
    _refuse_transformations(state_transformation_fns)
    if lazy_parameters:
      raise ValueError("lazy_parameters = True is not supported yet: leave it out")
    folder = self._checkpoint_to_restore(step, path)
    shardings = self._flat_shardings()
    state_dict = read_state(
      folder,
      self._train_state.state_dict(),
      shardings,
      params_dtype=self._restore_dtype,
      allow_missing=fallback_state is not None,
      allow_unexpected=not strict,
    )
    if fallback_state is not None:
      merged = flatten_state_dict(merge_state(state_dict, fallback_state))
      placed = {name: jax.device_put(merged[name], shardings[name]) for name in shardings}
      state_dict = merge_state(unflatten_state_dict(placed), state_dict)
    if restore_dataset and self._dataset_iterator is not None:
      self._restore_dataset(folder)
    return self._train_state.restore_state(state_dict)

  def check_fits(self, path: str | os.PathLike[str]) -> None:
    """Raises CheckpointMismatchError unless the checkpoint at `path` is of this train state."""
    check_fit(path, read_shapes(path), self._train_state.state_dict())

  def _checkpoint_to_restore(
    self, step: int | None, path: str | os.PathLike[str] | None
  ) -> epath.Path:
    if step is not None and path is not None:
      raise ValueError(f"restore was given both step = {step} and path = {path}: leave one out")
    if path is not None:
      return epath.Path(path)
    steps = folders.all_steps(self._directory)
    step = steps[-1] if step is None and steps else step
    if step not in steps:
      there = f"there are steps {', '.join(map(str, steps))}" if steps else "there are none"
      wanted = "any step" if step is None else f"step {step}"
      raise ValueError(f"no checkpoint of {wanted} in {self._directory}: {there}")
    return folders.checkpoint_path(self._directory, step)

  def _restore_dataset(self, folder: epath.Path) -> None:
    args = DatasetArgs(self._dataset_iterator)
    try:
      self._dataset_handler().restore(folder / folders.DATASET_ITEM, args)
    except (OSError, KeyError) as error:
      raise unreadable(folder, error) from error

  def _flat_shardings(self) -> dict[str, NamedSharding]:
    specs = flatten_state_dict(self._partitioner.get_mesh_axes(self._train_state).state_dict())
    return {name: NamedSharding(self._partitioner.mesh, spec) for name, spec in specs.items()}

  def _state_args(self, train_state: TrainState) -> ocp.args.PyTreeSave:
    flat = flatten_state_dict(train_state.state_dict())
    # As in T5X, what holds no array (None, an optimizer's empty state) is not stored.
    state_dict = unflatten_state_dict(
      {k: leaf for k, leaf in flat.items() if hasattr(leaf, "shape")}
    )
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(), state_dict)
    save_args["target"] = jax.tree.map(self._param_save_args, state_dict["target"])
    return ocp.args.PyTreeSave(item=state_dict, save_args=save_args)

  def _param_save_args(self, leaf: Any) -> ocp.SaveArgs:
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    return ocp.SaveArgs(dtype=self._save_dtype if is_float else None)

  def _dataset_handler(self) -> DatasetCheckpointHandler:
    layout = self._partitioner.get_data_layout()
    return DatasetCheckpointHandler(
      dataset_filename(layout.shard_id, layout.num_shards), layout.is_first_host_in_replica_set
    )

  def _orbax(self) -> ocp.CheckpointManager:
    """Returns the manager that writes, made on first use: it creates the folder and cleans up."""
    if self._writer is None:
      handlers: dict[str, Any] = {folders.STATE_ITEM: ocp.PyTreeCheckpointHandler()}
      if self._dataset_iterator is not None:
        handlers[folders.DATASET_ITEM] = self._dataset_handler()
      options = ocp.CheckpointManagerOptions(
        step_prefix=folders.STEP_PREFIX,
        preservation_policy=self._retention,
        cleanup_tmp_directories=True,
        save_root_metadata=False,
        # Only steps matter here; reading the metadata of each old checkpoint takes time.
        lightweight_initialize=True,
      )
      self._writer = ocp.CheckpointManager(
        epath.Path(self._directory).absolute(), item_handlers=handlers, options=options
      )
    return self._writer

  def _save_error(self, step: int, error: Exception) -> CheckpointSaveError:
    good = [s for s in folders.all_steps(self._directory) if s != step]
    last = f"the last complete one is step {good[-1]}" if good else "there is no complete one yet"
    room = "make room or give a MODEL_DIR that can be written to, then " if _is_disk(error) else ""
    return CheckpointSaveError(
      f"checkpoint {folders.checkpoint_path(self._directory, step)} could not be saved: "
      f"{type(error).__name__}: {error}. {_free_space(self._directory)}In this folder {last}; "
      f"{room}start again to resume from there."
    )


def get_local_data(x: Any) -> Any:
  """Returns the part of `x` that this process holds, as a numpy array if `x` is a jax array."""
  return np.asarray(x.addressable_data(0)) if isinstance(x, jax.Array) else x


def _float_dtype(dtype: Any, field: str) -> Any:
  """Returns `dtype` (a name or a dtype) as a dtype; None stays None."""
  if dtype is None:
    return None
  try:
    found = jnp.dtype(dtype)
  except TypeError:
    found = None
  if found is None or not jnp.issubdtype(found, jnp.floating):
    raise ValueError(f"{field} = {dtype!r} is no floating-point dtype: set 'float32' or 'bfloat16'")
  return found


def _is_disk(error: Exception) -> bool:
  """Whether a save failed for want of room or of the right to write; TensorStore says so in words."""
  words = ("No space left", "Permission denied", "Read-only file system", "quota")
  return isinstance(error, OSError) or any(word in str(error) for word in words)


def _free_space(directory: epath.Path) -> str:
  for folder in (directory, *directory.parents):
    if folder.exists() and not os.fspath(folder).startswith("gs://"):
      return f"{shutil.disk_usage(folder).free / 1e9:.1f} GB are free there. "
  return ""


def _refuse_transformations(functions: Sequence[Any]) -> None:
  if functions:
    raise ValueError(
      "state_transformation_fns are not supported yet: remove them from SaveCheckpointConfig and "
      "RestoreCheckpointConfig"
    )
