"""T5X's `checkpoints`: managers, checkpointers, their data, and loading without a model."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from rosetta_t5.checkpoints import OrbaxCheckpointManagerInterface, checkpoint_folders, saved_items
from rosetta_t5.checkpoints.arrays.lazy_arrays import LazyArray
from rosetta_t5.checkpoints.arrays.lazy_arrays import LazyArray as LazyThreadPoolArray
from rosetta_t5.checkpoints.arrays.state_dicts import flatten_state_dict, unflatten_state_dict
from rosetta_t5.checkpoints.checkpoint_folders import all_steps, latest_step, read_arrays
from rosetta_t5.checkpoints.config import RestoreCheckpointConfig, SaveCheckpointConfig
from rosetta_t5.checkpoints.formats.t5x_layouts import VERSION
from rosetta_t5.checkpoints.restore import RestoreTransformation
from rosetta_t5.checkpoints.saved_items import *
from rosetta_t5.checkpoints.saved_items import ParameterInfo as _ParameterInfo
from rosetta_t5.checkpoints.train_state_initializer import restore
from rosetta_t5.parallel import BasePartitioner


def get_checkpoint_dir(
  checkpoints_dir: epath.PathLike, step: int, step_prefix: str = checkpoint_folders.STEP_PREFIX
) -> str:
  """Returns the path of a step's folder."""
  return os.path.join(os.fspath(checkpoints_dir), f"{step_prefix}_{step}")


def load_t5x_checkpoint(
  path: epath.PathLike,
  step: int | None = None,
  state_transformation_fns: Sequence[RestoreTransformation] = (),
  remap: bool = True,
  restore_dtype: Any = None,
  lazy_parameters: bool = False,
) -> Any:
  """Returns a checkpoint's nested state dict as numpy arrays, without a model.

  Args:
    path: a checkpoint of any layout, or a folder of checkpoints.
    step: which checkpoint of a folder of checkpoints; None for the latest.
    state_transformation_fns: each `fn(state dict, {})` returns the state dict, changed.
    remap: whether to apply them.
    restore_dtype: the dtype of the floating-point parameters; None for the stored dtype.
    lazy_parameters: leave the arrays on disk, as LazyArrays.
  """
  state: Any = unflatten_state_dict(read_arrays(checkpoint_folders.resolve_checkpoint(path, step)))
  for transform in state_transformation_fns if remap else ():
    state = transform(state, {})
  flat = flatten_state_dict(state, keep_empty_nodes=True)
  for name, leaf in flat.items():
    if restore_dtype is not None and hasattr(leaf, "dtype"):
      leaf = leaf.astype(saved_items.leaf_dtype(name, leaf.dtype, restore_dtype))
    flat[name] = leaf.get() if isinstance(leaf, LazyArray) and not lazy_parameters else leaf
  return unflatten_state_dict(flat)


def get_name_tree(state_dict: Mapping[str, Any], keep_empty_nodes: bool = False) -> dict[str, Any]:
  """Returns the same nested dict with each leaf, or kept empty node, replaced by its flat name."""
  return unflatten_state_dict({n: n for n in flatten_state_dict(state_dict, keep_empty_nodes)})


def intersect_state(
  state_dict: Mapping[str, Any], intersect_state_dict: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the part of `state_dict` whose names `intersect_state_dict` also has."""
  kept = flatten_state_dict(intersect_state_dict, keep_empty_nodes=True)
  flat = flatten_state_dict(state_dict, keep_empty_nodes=True)
  return unflatten_state_dict({name: leaf for name, leaf in flat.items() if name in kept})


class Checkpointer(OrbaxCheckpointManagerInterface):
  """Saves in Orbax's layout, and restores any layout (T5X's class).

  Attributes:
    checkpoints_dir: the folder of checkpoints.
    manager: the manager of a run, which saves instead if the run calls `save`.
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
    **manager_options: Any,
  ):
    """Creates a checkpointer; see `OrbaxCheckpointManagerInterface` for the arguments."""
    place = (checkpoints_dir, train_state, partitioner, dataset_iterator)
    manager_options["keep_dataset_checkpoints"] = keep_dataset_checkpoints
    super().__init__(*place, save_dtype, restore_dtype, keep, **manager_options)
    self.checkpoints_dir = os.fspath(checkpoints_dir)

  def save(  # type: ignore[override]
    self,
    train_state: Any,
    state_transformation_fns: Sequence[saved_items.SaveTransformation] = (),
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
    if self.manager is not None:
      self.manager.save(train_state, state_transformation_fns)
      return
    super().save(train_state, state_transformation_fns)
    self.close()

  def restore(  # type: ignore[override]
    self,
    step: int | None = None,
    path: epath.PathLike | None = None,
    state_transformation_fns: Sequence[RestoreTransformation] = (),
    fallback_state: Mapping[str, Any] | None = None,
    lazy_parameters: bool = False,
  ) -> Any:
    """Returns the train state of a checkpoint; the manager's method has these arguments in another order."""
    return super().restore(step, path, fallback_state, state_transformation_fns, lazy_parameters)


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
    """Creates a checkpointer; see `Checkpointer` for the other arguments.

    Args:
      metric_name_to_monitor: RUN/TAG in TensorBoard's files under the folder of checkpoints.
      metric_mode: 'max' if larger values are better, 'min' if smaller values are.
      keep_checkpoints_without_metrics: whether checkpoints without a value of the metric are kept.
      force_keep_period: checkpoints at its multiples are kept.
    """
    self._manager_options: dict[str, Any] = {
      "metric_name_to_monitor": metric_name_to_monitor,
      "metric_mode": metric_mode,
      "keep_checkpoints_without_metrics": keep_checkpoints_without_metrics,
      "force_keep_period": force_keep_period,
    }
    options: dict[str, Any] = {"save_dtype": save_dtype, "restore_dtype": restore_dtype}
    options |= {"keep": keep, "keep_dataset_checkpoints": keep_dataset_checkpoints}
    options |= self._manager_options
    super().__init__(train_state, partitioner, checkpoints_dir, dataset_iterator, **options)

  def manager_options(self) -> dict[str, Any]:
    """Returns these settings as arguments of `OrbaxCheckpointManagerInterface`."""
    return self._manager_options


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
    if save_cfg is not None:
      self._saver: Any = (save_cfg.checkpointer_cls or Checkpointer)(
        **shared,
        checkpoints_dir=model_dir or "",
        dataset_iterator=ds_iter if save_cfg.save_dataset else None,
        save_dtype=save_cfg.dtype,
        keep=save_cfg.keep,
        keep_dataset_checkpoints=save_cfg.keep_dataset_checkpoints,
      )
    if restore_cfg is not None:
      self._restorer: Any = (restore_cfg.checkpointer_cls or Checkpointer)(
        **shared,
        checkpoints_dir="",
        dataset_iterator=ds_iter if restore_cfg.restore_dataset else None,
        restore_dtype=restore_cfg.dtype,
      )

  def wait_until_finished(self) -> None:
    """Does nothing, because `save` returns when everything is written."""

  def close(self) -> None:
    """Does nothing, because there are no background threads."""

  def save(
    self, train_state: Any, state_transformation_fns: Sequence[saved_items.SaveTransformation] = ()
  ) -> None:
    """Saves `train_state`, whose step names the folder."""
    self._saver.save(train_state, state_transformation_fns)

  def restore(
    self,
    paths: Sequence[str],
    restore_cfg: RestoreCheckpointConfig | None = None,
    fallback_state: Mapping[str, Any] | None = None,
  ) -> Any:
    """Returns the train state of the checkpoint in `paths`, or a list of states for several.

    Args:
      paths: checkpoints, which may be TensorFlow's.
      restore_cfg: how to restore; None restores nothing and returns None.
      fallback_state: nested state dict that provides what a checkpoint lacks.
    """
    if restore_cfg is None or paths is None:
      return None
    self._restorer.strict = restore_cfg.strict
    return restore(self._restorer, paths, restore_cfg, fallback_state)
