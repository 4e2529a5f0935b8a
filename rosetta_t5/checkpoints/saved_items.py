"""The items of a checkpoint: the train state, and the position in the training data."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from rosetta_t5.checkpoints.arrays.state_dicts import (
  flatten_arrays,
  flatten_state_dict,
  unflatten_state_dict,
)
from rosetta_t5.checkpoints.checkpoint_folders import files_matching
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.user_errors import exit_on_user_error

PyTree = Any
SaveTransformation = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]

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


def state_args(
  train_state: Any,
  partitioner: BasePartitioner,
  transformations: Sequence[SaveTransformation],
  params_dtype: Any,
) -> ocp.args.PyTreeSave:
  """Returns Orbax's arguments that save a train state.

  Args:
    train_state: the state.
    partitioner: specifies the mesh.
    transformations: T5X's `state_transformation_fns`: each `fn(state_dict, parameter_infos)` returns
      both of them, changed.
    params_dtype: the dtype of floating-point parameters; None for their own.
  """
  state_dict = train_state.state_dict()
  if transformations:
    axes = flatten_state_dict(partitioner.get_mesh_axes(train_state).state_dict())
    flat = flatten_state_dict(state_dict)
    infos: Any = unflatten_state_dict(
      {name: ParameterInfo(name, np.shape(leaf), axes.get(name)) for name, leaf in flat.items()}
    )
    for transform in transformations:
      state_dict, infos = transform(state_dict, infos)
  replicated = NamedSharding(partitioner.mesh, PartitionSpec())
  leaves = {
    name: leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf, replicated)
    for name, leaf in flatten_arrays(state_dict).items()
  }
  save_args = {
    name: ocp.SaveArgs(dtype=leaf_dtype(name, leaf.dtype, params_dtype))
    for name, leaf in leaves.items()
  }
  return ocp.args.PyTreeSave(
    item=unflatten_state_dict(leaves), save_args=unflatten_state_dict(save_args)
  )


def leaf_dtype(name: str, dtype: Any, params_dtype: Any) -> Any:
  """Returns the dtype in which a leaf is saved or restored.

  Args:
    name: the flat name in the train state.
    dtype: the leaf's own dtype.
    params_dtype: the dtype of floating-point parameters; None for their own.
  """
  is_converted = name.startswith("target/") and jnp.issubdtype(dtype, jnp.floating)
  return jnp.dtype(params_dtype) if is_converted and params_dtype is not None else dtype


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

  def finish(write: Any, timeout: float | None = None) -> Any:
    try:
      return write.result(timeout)
    except Exception as error:
      with contextlib.suppress(SystemExit), exit_on_user_error():
        raise make_error(error) from error
      raise

  async def async_save(*args: Any, **options: Any) -> list[Any]:
    writes = await original(*args, **options) or ()
    return [types.SimpleNamespace(result=functools.partial(finish, write)) for write in writes]

  if jax.process_count() > 1:
    handler.async_save = async_save


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
