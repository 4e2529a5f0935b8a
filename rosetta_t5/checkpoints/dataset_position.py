"""The position in the training data, stored beside the train state as the item `dataset`."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

DATASET_PREFIX = "train_ds"
# The run fact that says what batches a stored position counts.
BATCH_FACT = "dataset_batch"

_START_OVER = (
  "to start the data from its beginning, set RestoreCheckpointConfig.restore_dataset = False (for a "
  "restart in MODEL_DIR: SaveCheckpointConfig.save_dataset = False)"
)


def dataset_filename(shard_id: int, num_shards: int) -> str:
  """Returns the file in which the reader of one data shard stores its position (T5X's name)."""
  return f"{DATASET_PREFIX}-{shard_id:03}-of-{num_shards:03}"


@dataclasses.dataclass
class DatasetArgs(ocp.args.CheckpointArgs):
  """What Orbax hands to DatasetCheckpointHandler: an iterator with `save` and `restore`."""

  item: Any = None


class DatasetCheckpointHandler(ocp.CheckpointHandler):
  """Stores and restores the position of an iterator with `save(filename)`, `restore(filename)`."""

  def __init__(self, checkpoint_filename: str, should_write_dataset_ckpt: bool = True):
    """Builds a handler.

    Args:
      checkpoint_filename: this process's file in the item's folder.
      should_write_dataset_ckpt: whether this process writes it; one of the processes that read the
        same shard does.
    """
    self._filename = checkpoint_filename
    self._should_write = should_write_dataset_ckpt

  def save(self, directory: epath.Path, args: DatasetArgs) -> None:
    """Writes the position of `args.item` at once, before the iterator moves on."""
    if self._should_write:
      args.item.save(os.fspath(epath.Path(directory) / self._filename))

  def restore(self, directory: epath.Path, args: DatasetArgs | None = None) -> Any:
    """Moves `args.item` to the stored position and returns it.

    Raises:
      ValueError: this process has no stored position in `directory`.
    """
    if args is None or args.item is None:
      raise ValueError("DatasetCheckpointHandler.restore needs DatasetArgs(item=iterator)")
    folder = epath.Path(directory)
    found = sorted(entry.name for entry in folder.glob(f"{DATASET_PREFIX}-*"))
    filename = self._filename
    if not any(name.startswith(filename) for name in found):
      # Of data whose position is a step's number any shard's file will do, in any number of them.
      if not (found and getattr(args.item, "is_shard_independent", False)):
        raise ValueError(_no_position(folder, filename))
      filename = found[0]
    args.item.restore(os.fspath(folder / filename))
    return args.item


ocp.args.register_with_handler(DatasetCheckpointHandler, for_save=True, for_restore=True)(
  DatasetArgs
)


def batch_fact(iterator: Any) -> dict[str, list[int]]:
  """Returns {feature: shape of a batch}, which is stored so that another one is noticed; {} if unknown."""
  spec = getattr(iterator, "element_spec", None) or {}
  return {name: list(map(int, leaf.shape)) for name, leaf in sorted(spec.items())}


def check_same_batches(folder: epath.Path, stored: Any, iterator: Any) -> None:
  """Raises ValueError if the position in `folder` was stored for batches of other shapes.

  Args:
    folder: the checkpoint.
    stored: what `batch_fact` returned for the run that wrote it; None if it wrote no such fact.
    iterator: this run's.
  """
  now = batch_fact(iterator)
  if not stored or not now or stored == now:
    return
  differing = [
    f"{name}: {stored.get(name, 'none')} there, {now.get(name, 'none')} now"
    for name in sorted({*stored, *now})
    if stored.get(name) != now.get(name)
  ]
  raise ValueError(
    f"checkpoint {folder} holds a position in data of other batches ({'; '.join(differing[:4])}): "
    "another BATCH_SIZE, TASK_FEATURE_LENGTHS or packing, so the position means other examples. "
    f"Set them as they were, or {_START_OVER}"
  )


def _no_position(folder: epath.Path, filename: str) -> str:
  """Says which dataset positions a checkpoint has and how to go on without this one."""
  found = (
    sorted(entry.name for entry in folder.glob(f"{DATASET_PREFIX}*")) if folder.exists() else []
  )
  have = f"it has {', '.join(found)}" if found else "it has none"
  return (
    f"checkpoint {folder.parent} holds no dataset position {filename!r} for this process ({have}): "
    "the run that wrote it did not save its dataset, or read it in another number of shards (hosts). "
    f"{_START_OVER[0].upper()}{_START_OVER[1:]}"
  )
