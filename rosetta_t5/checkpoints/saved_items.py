"""What is saved and kept: the train state, the position in the training data, and which checkpoints are kept."""

import contextlib
import dataclasses
import functools
import logging
import math
import os
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from rosetta_t5.argument_types import check_one_of
from rosetta_t5.checkpoints import checkpoint_folders
from rosetta_t5.checkpoints.arrays import state_dicts
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.telemetry.event_files import read_event_file
from rosetta_t5.user_errors import exit_on_user_error

PyTree = Any
SaveTransformation = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]

DATASET_PREFIX = "train_ds"
PIN_FILE = "PINNED"
# The run fact of a run that compares its checkpoints: the metric and the mode of `Retention`.
COMPARED_BY = "compared_by"

_log = logging.getLogger(__name__)


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
  omitted: Collection[str] = (),
) -> ocp.args.PyTreeSave:
  """Returns Orbax's arguments that save a train state.

  Args:
    train_state: the state.
    partitioner: specifies the mesh.
    transformations: T5X's `state_transformation_fns`: each `fn(state_dict, parameter_infos)` returns
      both of them, changed.
    params_dtype: the dtype of floating-point parameters; None for their own.
    omitted: the flat names of leaves that are not saved.
  """
  state_dict = train_state.state_dict()
  if transformations:
    axes = state_dicts.flatten_state_dict(partitioner.get_mesh_axes(train_state).state_dict())
    flat = state_dicts.flatten_state_dict(state_dict)
    infos: Any = state_dicts.unflatten_state_dict(
      {name: ParameterInfo(name, np.shape(leaf), axes.get(name)) for name, leaf in flat.items()}
    )
    for transform in transformations:
      state_dict, infos = transform(state_dict, infos)
  replicated = NamedSharding(partitioner.mesh, PartitionSpec())
  leaves = {
    name: leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf, replicated)
    for name, leaf in state_dicts.flatten_arrays(state_dict).items()
    if name not in omitted
  }
  save_args = {
    name: ocp.SaveArgs(dtype=leaf_dtype(name, leaf.dtype, params_dtype))
    for name, leaf in leaves.items()
  }
  return ocp.args.PyTreeSave(
    item=state_dicts.unflatten_state_dict(leaves),
    save_args=state_dicts.unflatten_state_dict(save_args),
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


class DatasetCheckpointHandler(ocp.CheckpointHandler):
  """Stores and restores the position of an iterator with `save(filename)` and `restore(filename)`.

  The iterator may also have `is_shard_independent` (default False), which states that every shard has
  the same position.
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

  def save(self, directory: epath.Path, args: "DatasetArgs") -> None:
    """Writes the position of `args.item` immediately, before the iterator advances."""
    if self._should_write:
      args.item.save(os.fspath(epath.Path(directory) / self._filename))

  def restore(self, directory: epath.Path, args: "DatasetArgs") -> Any:
    """Moves `args.item` to the stored position and returns it.

    Raises:
      ValueError: there is no stored position for this process in `directory`.
    """
    folder, filename = epath.Path(directory), self._filename
    found = sorted(file.name for file in folder.glob(f"{DATASET_PREFIX}-*"))
    if not any(name.startswith(filename) for name in found):
      # A position that is only a step number is the same in every shard.
      if not (found and getattr(args.item, "is_shard_independent", False)):
        raise ValueError(
          f"checkpoint {folder.parent} contains no dataset position {filename!r} for this process (it has "
          f"{', '.join(found) or 'none'}): its run saved none, or had another number of hosts"
        )
      filename = found[0]
    args.item.restore(os.fspath(folder / filename))
    return args.item


@ocp.args.register_with_handler(DatasetCheckpointHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class DatasetArgs(ocp.args.CheckpointArgs):
  """Orbax's arguments of DatasetCheckpointHandler.

  Attributes:
    item: an iterator with `save` and `restore`.
  """

  item: Any = None


@dataclasses.dataclass
class Retention:
  """Orbax's preservation policy with T5X's rules.

  Attributes:
    directory: the folder of checkpoints.
    keep: how many of the latest checkpoints are kept; with `metric`, how many of the best beside the
      latest; None for all.
    force_keep_period: multiples of this step are kept too.
    metric: RUN/TAG of the metric that decides which checkpoints are best, such as 'train/accuracy' or
      'inference_eval/glue_cola_v002/eval/accuracy'.
    mode: 'max' if larger values are better, 'min' if smaller values are.
    keep_unknown: whether checkpoints without a value of the metric are kept.
    protected: checkpoints that are always kept, such as the one that a run started from.
  """

  directory: epath.PathLike
  keep: int | None = None
  force_keep_period: int | None = None
  metric: str | None = None
  mode: str = "max"
  keep_unknown: bool = True
  protected: set[epath.Path] = dataclasses.field(default_factory=set)

  def __post_init__(self) -> None:
    check_one_of("metric_mode", self.mode, ("max", "min"))
    if self.metric is not None and "/" not in self.metric:
      raise ValueError(
        "metric_name_to_monitor must be RUN/TAG, a folder of TensorBoard's files under MODEL_DIR and a "
        f"metric in them, such as 'train/accuracy', got {self.metric!r}"
      )

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    """Returns whether each checkpoint is kept; they have an attribute `step`, in ascending order."""
    steps = [checkpoint.step for checkpoint in checkpoints]
    deleted = self.steps_to_delete(steps)
    return [step not in deleted for step in steps]

  def steps_to_delete(self, steps: Sequence[int]) -> set[int]:
    """Returns which of `steps`, in ascending order, are to be deleted."""
    if self.keep is None:
      return set()
    if self.metric is None:
      return {step for step in steps[: -self.keep] if not self._is_always_kept(step)}
    # As in T5X, checkpoints that are always kept do not count. The latest is kept in any case.
    older = [step for step in steps[:-1] if not self._is_always_kept(step)]
    if len(older) <= self.keep:
      return set()
    values = populate_metrics_for_steps(self.directory, self.metric, older)
    if not values:
      _log.warning("metric_name_to_monitor: no checkpoint has a value of %r", self.metric)
    if self.keep_unknown:
      older = [step for step in older if step in values]
    goodness = _goodness(values, self.mode)
    # The sort is stable, so the oldest of equal checkpoints come first.
    worst_first = sorted(older, key=lambda step: goodness.get(step, -math.inf))
    return set(worst_first[: max(0, len(older) - self.keep)])

  def _is_always_kept(self, step: int) -> bool:
    folder = checkpoint_folders.checkpoint_path(self.directory, step)
    is_multiple = bool(self.force_keep_period and step % self.force_keep_period == 0)
    return is_multiple or folder in self.protected or is_pinned_checkpoint(folder)


def _goodness(values: Mapping[int, float], mode: str) -> dict[int, float]:
  """Returns the values that are numbers, with the sign with which larger ones are better."""
  sign = 1 if mode == "max" else -1
  return {step: sign * value for step, value in values.items() if not math.isnan(value)}


def best_checkpoint(directory: epath.PathLike) -> tuple[epath.Path | None, str]:
  """Returns a run's best checkpoint, and the value by which it is the best, such as "f1 91.2".

  Of equal ones it is the last. The result is (None, "") if the run does not compare its checkpoints.
  """
  steps = checkpoint_folders.all_steps(directory)
  facts = checkpoint_folders.read_run_facts(directory) if steps else {}
  metric, mode = facts.get(COMPARED_BY, ("", "max"))
  values = populate_metrics_for_steps(directory, metric, steps)
  goodness = _goodness(values, mode)
  if not goodness:
    return None, ""
  best = max(goodness, key=lambda step: (goodness[step], step))
  folder = checkpoint_folders.checkpoint_path(directory, best)
  return folder, f"{metric.rpartition('/')[2]} {values[best]:.4g}"


def checkpoint_to_use(path: epath.PathLike) -> epath.Path:
  """Returns the checkpoint of a run that is not continued: the best, or else as `resolve_checkpoint` does."""
  return best_checkpoint(path)[0] or checkpoint_folders.resolve_checkpoint(path)


def pinned_checkpoint_filepath(ckpt_dir: epath.PathLike) -> str:
  """Returns the path of the file whose existence pins the checkpoint in `ckpt_dir`."""
  return os.fspath(epath.Path(ckpt_dir) / PIN_FILE)


def is_pinned_checkpoint(ckpt_dir: epath.PathLike) -> bool:
  """Returns whether the checkpoint in `ckpt_dir` is kept regardless of `keep`."""
  return epath.Path(pinned_checkpoint_filepath(ckpt_dir)).exists()


def pin_checkpoint(ckpt_dir: epath.PathLike, txt: str = "1") -> None:
  """Pins the checkpoint in `ckpt_dir` and stores the note `txt`."""
  epath.Path(pinned_checkpoint_filepath(ckpt_dir)).write_text(txt)


def unpin_checkpoint(ckpt_dir: epath.PathLike) -> None:
  """Allows `keep` to delete the checkpoint in `ckpt_dir` again."""
  epath.Path(pinned_checkpoint_filepath(ckpt_dir)).unlink(missing_ok=True)


def remove_checkpoint_dir(ckpt_dir: epath.PathLike) -> None:
  """Deletes the checkpoint in `ckpt_dir` unless it is pinned."""
  if not is_pinned_checkpoint(ckpt_dir):
    epath.Path(ckpt_dir).rmtree(missing_ok=True)


def remove_dataset_checkpoint(ckpt_dir: epath.PathLike, train_ds_prefix: str) -> None:
  """Deletes the dataset positions of the checkpoint in `ckpt_dir` unless it is pinned.

  They are in the checkpoint's folder (T5X's older layout) or in its item `dataset` (Orbax).
  """
  folder = epath.Path(ckpt_dir)
  if is_pinned_checkpoint(folder):
    return
  for parent in (folder, folder / checkpoint_folders.DATASET_ITEM):
    for position in parent.glob(f"{train_ds_prefix}*"):
      position.rmtree() if position.is_dir() else position.unlink()


def populate_metrics_for_steps(
  checkpoints_dir: epath.PathLike, metric_name: str, steps: Iterable[int]
) -> dict[int, float]:
  """Returns {step: value} of a metric for those of `steps` that have a value (T5X's function).

  Args:
    checkpoints_dir: the folder that contains the folders of TensorBoard's files.
    metric_name: RUN/TAG. Both may contain slashes, so the longest RUN with the TAG is used.
    steps: the steps to look up.
  """
  parts = metric_name.split("/")
  for depth in range(len(parts) - 1, 0, -1):
    run, tag = epath.Path(checkpoints_dir).joinpath(*parts[:depth]), "/".join(parts[depth:])
    files = (read_event_file(file) for file in sorted(run.glob("*tfevents*")))
    found = {
      int(step): float(value)
      for series in files
      if tag in series
      for step, value in zip(series[tag].steps, series[tag].values, strict=True)
    }
    if values := {step: found[step] for step in steps if step in found}:
      return values
  return {}
