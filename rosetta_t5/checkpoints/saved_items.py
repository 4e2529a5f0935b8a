"""The items of a checkpoint: the train state and the position in the training data, and the errors of saving them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import PartitionSpec

from rosetta_t5.checkpoints.arrays.lazy_arrays import LazyArray
from rosetta_t5.checkpoints.arrays.state_dicts import flatten_state_dict, unflatten_state_dict
from rosetta_t5.checkpoints.checkpoint_folders import all_steps, checkpoint_path, files_matching
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.user_errors import exit_on_user_error, reason_of

PyTree = Any
SaveTransformation = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]

# Messages by which TensorStore's errors about the disk are recognized.
_DISK_MESSAGES = ("No space left", "Permission denied", "Read-only file system", "quota")
DATASET_PREFIX = "train_ds"
# The run fact that stores the shapes of the batches. A position is valid only for these shapes.
BATCH_FACT = "dataset_batch"


class CheckpointSaveError(RuntimeError):
  """A checkpoint could not be written; the run stops instead of training without checkpoints."""


@dataclasses.dataclass(frozen=True)
class ParameterInfo:
  """Describes a leaf for a save-time state transformation.

  Attributes:
    name: the flat name in the train state.
    shape: the shape of the whole array; None if unknown.
    axes: how the array is sharded over the mesh; None if it is not sharded.
    ts_spec: the array's TensorStore spec, if it has one yet.
  """

  name: str
  shape: tuple[int, ...] | None = None
  axes: PartitionSpec | None = None
  ts_spec: Any = None

  @property
  def mesh_axes(self) -> PartitionSpec | None:
    """`axes` under the name that T5X's Orbax manager uses."""
    return self.axes


def get_local_data(x: Any) -> Any:
  """Returns this process's part of `x` as a numpy array if `x` is a jax array, else `x`."""
  return np.asarray(x.addressable_data(0)) if isinstance(x, jax.Array) else x


def step_number(train_state: Any) -> int:
  """Returns the step of a train state as a Python integer."""
  step = train_state.step
  return int(step.get() if isinstance(step, LazyArray) else get_local_data(step))


def apply_save_transformations(
  train_state: Any, partitioner: BasePartitioner, transformations: Sequence[SaveTransformation]
) -> PyTree:
  """Returns the train state's nested dict after T5X's save-time `state_transformation_fns`.

  Args:
    transformations: each `fn(state_dict, parameter_infos)` returns both of them, changed.
  """
  state_dict = train_state.state_dict()
  if not transformations:
    return state_dict
  axes = flatten_state_dict(partitioner.get_mesh_axes(train_state).state_dict())
  flat = flatten_state_dict(state_dict)
  infos = unflatten_state_dict(
    {name: ParameterInfo(name, np.shape(leaf), axes.get(name)) for name, leaf in flat.items()}
  )
  for transform in transformations:
    state_dict, infos = transform(state_dict, infos)
  return state_dict


def leaf_dtype(name: str, dtype: Any, params_dtype: Any) -> Any:
  """Returns the dtype in which a leaf is saved or restored.

  Args:
    name: the flat name in the train state.
    dtype: the leaf's own dtype.
    params_dtype: the dtype of floating-point parameters; None for their own.
  """
  is_converted = name.startswith("target/") and jnp.issubdtype(dtype, jnp.floating)
  return params_dtype if is_converted and params_dtype is not None else dtype


def parse_float_dtype(dtype: Any, field: str) -> Any:
  """Returns `dtype` (a name or a dtype) as a dtype; None stays None.

  Raises:
    ValueError: it is not a floating-point dtype.
  """
  if dtype is None:
    return None
  with contextlib.suppress(TypeError):
    if jnp.issubdtype(found := jnp.dtype(dtype), jnp.floating):
      return found
  raise ValueError(
    f"{field} must be a floating-point dtype, such as 'float32' or 'bfloat16', got {dtype!r}"
  )


@contextlib.contextmanager
def finish_saves_on_error(manager: Any) -> Iterator[None]:
  """Completes the save that runs in the background before an error leaves the `with` statement.

  Otherwise a run that fails just after a save would lose that checkpoint, and Orbax's messages about
  the incomplete save would hide the error.
  """
  try:
    yield
  except Exception:
    if manager is not None:
      with contextlib.suppress(Exception):  # the first error is the one to report
        manager.wait_until_finished()
    raise


def end_run_if_a_write_fails(handler: Any, make_error: Callable[[Exception], Exception]) -> None:
  """Lets a failed write of one process end a run of several processes.

  Otherwise Orbax lets the others wait for ten minutes for that process's part of the checkpoint.

  Args:
    handler: Orbax's handler of the train state, whose `async_save` is replaced.
    make_error: returns the error that the run reports.
  """
  original = handler.async_save

  async def async_save(*args: Any, **options: Any) -> list[Any]:
    return [_Write(write, make_error) for write in await original(*args, **options) or ()]

  if jax.process_count() > 1:
    handler.async_save = async_save


@dataclasses.dataclass(frozen=True)
class _Write:
  """A write of Orbax in the background."""

  write: Any
  make_error: Callable[[Exception], Exception]

  def result(self, timeout: float | None = None) -> Any:
    try:
      return self.write.result(timeout)
    except Exception as error:
      with contextlib.suppress(SystemExit), exit_on_user_error():
        raise self.make_error(error) from error
      raise


def save_error(directory: epath.Path, step: int, error: Exception) -> CheckpointSaveError:
  """Returns the error for the checkpoint of `step` that could not be saved in `directory`."""
  complete = [s for s in all_steps(directory) if s != step]
  last = f"the last complete one is step {complete[-1]}" if complete else "there is no complete one"
  purpose = " to resume from there" if complete else ""
  is_disk_error = isinstance(error, OSError) or any(m in str(error) for m in _DISK_MESSAGES)
  advice = "free some space or set a writable MODEL_DIR, then " if is_disk_error else ""
  disk = next(
    (folder for folder in (directory, *directory.parents) if os.path.exists(folder)), None
  )
  free = f"{shutil.disk_usage(disk).free / 1e9:.1f} GB are free on that disk. " if disk else ""
  return CheckpointSaveError(
    f"checkpoint {checkpoint_path(directory, step)} could not be saved: {reason_of(error)}. {free}In this "
    f"folder {last}; {advice}start the run again{purpose}."
  )


def dataset_filename(shard_id: int, num_shards: int) -> str:
  """Returns the file in which the reader of one data shard stores its position (T5X's name)."""
  return f"{DATASET_PREFIX}-{shard_id:03}-of-{num_shards:03}"


@dataclasses.dataclass
class DatasetArgs(ocp.args.CheckpointArgs):
  """Orbax's arguments of DatasetCheckpointHandler.

  Attributes:
    item: an iterator with `save` and `restore`.
  """

  item: Any = None


class DatasetCheckpointHandler(ocp.CheckpointHandler):
  """Stores and restores the position of an iterator with `save(filename)` and `restore(filename)`.

  The iterator may also have `is_shard_independent` (default False), which states that every shard has
  the same position, and `element_spec`, the shapes and dtypes of its batches by feature.
  """

  def __init__(self, checkpoint_filename: str, should_write_dataset_ckpt: bool = True):
    """Creates a handler.

    Args:
      checkpoint_filename: this process's file in the item's folder.
      should_write_dataset_ckpt: whether this process writes it. One of the processes that read the
        same shard does.
    """
    self._filename = checkpoint_filename
    self._should_write = should_write_dataset_ckpt

  def save(self, directory: epath.Path, args: DatasetArgs) -> None:
    """Writes the position of `args.item` immediately, before the iterator advances."""
    if self._should_write:
      args.item.save(os.fspath(epath.Path(directory) / self._filename))

  def restore(self, directory: epath.Path, args: DatasetArgs) -> Any:
    """Moves `args.item` to the stored position and returns it.

    Raises:
      ValueError: there is no stored position for this process in `directory`.
    """
    folder, filename = epath.Path(directory), self._filename
    found = [file.name for file in files_matching(folder, f"{DATASET_PREFIX}-*")]
    if not any(name.startswith(filename) for name in found):
      # A position that is only a step number is the same in every shard.
      if not (found and getattr(args.item, "is_shard_independent", False)):
        raise ValueError(
          f"checkpoint {folder.parent} contains no dataset position {filename!r} for this process (it has "
          f"{', '.join(found) or 'none'}): the run that wrote it did not save its dataset, or read it in "
          "another number of shards (hosts)"
        )
      filename = found[0]
    args.item.restore(os.fspath(folder / filename))
    return args.item


ocp.args.register_with_handler(DatasetCheckpointHandler, for_save=True, for_restore=True)(
  DatasetArgs
)


def batch_shapes(iterator: Any) -> dict[str, list[int]]:
  """Returns {feature: shape of a batch} of an iterator; {} if it does not provide them."""
  spec = getattr(iterator, "element_spec", None) or {}
  return {name: list(map(int, leaf.shape)) for name, leaf in sorted(spec.items())}


def check_batch_shapes(folder: epath.Path, stored: Any, iterator: Any) -> None:
  """Raises ValueError if the position in `folder` was stored for batches of other shapes.

  Args:
    stored: `batch_shapes` of the run that wrote it; None if that run stored none.
  """
  current = batch_shapes(iterator)
  if not stored or not current or stored == current:
    return
  differences = [
    f"{name}: {stored.get(name, 'none')} stored, {current.get(name, 'none')} now"
    for name in sorted({*stored, *current})
    if stored.get(name) != current.get(name)
  ]
  raise ValueError(
    f"checkpoint {folder} contains a position in data with other batches "
    f"({'; '.join(differences[:4])}). BATCH_SIZE, TASK_FEATURE_LENGTHS or packing differ, so the "
    "position refers to other examples. Restore these settings"
  )
