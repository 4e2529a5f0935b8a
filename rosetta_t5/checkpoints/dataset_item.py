"""The position in the training data, stored beside the train state as the item `dataset`."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

DATASET_PREFIX = "train_ds"


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
    if not any(folder.glob(f"{self._filename}*")):
      raise ValueError(_no_position(folder, self._filename))
    args.item.restore(os.fspath(folder / self._filename))
    return args.item


ocp.args.register_with_handler(DatasetCheckpointHandler, for_save=True, for_restore=True)(
  DatasetArgs
)


def _no_position(folder: epath.Path, filename: str) -> str:
  """Says which dataset positions a checkpoint has and how to go on without this one."""
  found = (
    sorted(entry.name for entry in folder.glob(f"{DATASET_PREFIX}*")) if folder.exists() else []
  )
  have = f"it has {', '.join(found)}" if found else "it has none"
  return (
    f"checkpoint {folder.parent} holds no dataset position {filename!r} for this process ({have}): "
    "the run that wrote it did not save its dataset, or read it in another number of shards. To "
    "start the data from its beginning, set RestoreCheckpointConfig.restore_dataset = False (for a "
    "restart in MODEL_DIR: SaveCheckpointConfig.save_dataset = False)"
  )
