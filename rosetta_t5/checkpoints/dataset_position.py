"""The position in the training data, stored beside the train state as the item `dataset`."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from rosetta_t5.checkpoints.arrays.checksums import ChecksumError, checksum
from rosetta_t5.checkpoints.formats.tensorstores import plain_path
from rosetta_t5.checkpoints.model_dir.checkpoint_folders import (
  DATASET_ITEM,
  files_matching,
  has_checksums,
  step_of,
)
from rosetta_t5.files import read_json_object

DATASET_PREFIX = "train_ds"
# The run fact that stores the shapes of the batches. A position is valid only for these shapes.
BATCH_FACT = "dataset_batch"

_CHECKSUMS = ".checksums"
_STEP = "step"


def dataset_filename(shard_id: int, num_shards: int) -> str:
  """Returns the file in which the reader of one data shard stores its position (T5X's name)."""
  return f"{DATASET_PREFIX}-{shard_id:03}-of-{num_shards:03}"


@dataclasses.dataclass
class DatasetArgs(ocp.args.CheckpointArgs):
  """Orbax's arguments of DatasetCheckpointHandler.

  Attributes:
    item: an iterator with `save` and `restore`.
    step: the checkpoint's step, which is stored and compared; None for neither.
  """

  item: Any = None
  step: int | None = None


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
      folder = epath.Path(directory)
      args.item.save(os.fspath(folder / self._filename))
      files = files_matching(folder, f"{self._filename}*")
      checksums = {file.name: checksum(file.read_bytes()) for file in files}
      content = {**checksums, _STEP: args.step}
      (folder / f"{self._filename}{_CHECKSUMS}").write_text(json.dumps(content))

  def restore(self, directory: epath.Path, args: DatasetArgs | None = None) -> Any:
    """Moves `args.item` to the stored position and returns it.

    Raises:
      ValueError: there is no stored position for this process in `directory`.
    """
    if args is None or args.item is None:
      raise ValueError("DatasetCheckpointHandler.restore needs DatasetArgs(item=iterator)")
    folder, filename = epath.Path(directory), self._filename
    positions = files_matching(folder, f"{DATASET_PREFIX}-*")
    found = [file.name for file in positions if not file.name.endswith(_CHECKSUMS)]
    if not any(name.startswith(filename) for name in found):
      # A position that is only a step number is the same in every shard.
      if not (found and getattr(args.item, "is_shard_independent", False)):
        raise ValueError(_missing_position_text(folder, filename, found))
      filename = found[0]
    _check_files(folder, f"{filename}{_CHECKSUMS}", args.step)
    args.item.restore(os.path.join(plain_path(folder), filename))
    return args.item


ocp.args.register_with_handler(DatasetCheckpointHandler, for_save=True, for_restore=True)(
  DatasetArgs
)


def position_problems(checkpoint: epath.Path) -> list[str]:
  """Describes the stored positions of a checkpoint that differ from those that were saved."""
  folder = checkpoint / DATASET_ITEM
  files = files_matching(folder, f"{DATASET_PREFIX}-*")
  problems = []
  for name in sorted({file.name.partition(".")[0] for file in files}):
    try:
      _check_files(folder, f"{name}{_CHECKSUMS}", step_of(checkpoint))
    except ChecksumError as error:
      problems.append(f"the position in the data: {error}")
  return problems


def start_over_text(checkpoint: epath.Path, is_own: bool) -> str:
  """Returns advice on how to continue from a checkpoint while restarting its data."""
  setting = (
    f"SaveCheckpointConfig.ignore_dataset_until={step_of(checkpoint)}"
    if is_own
    else "RestoreCheckpointConfig.restore_dataset=False"
  )
  return (
    "To continue from this checkpoint and start the data from its beginning, set "
    f"--gin.utils.{setting}"
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


def _check_files(folder: epath.Path, checksums: str, step: int | None) -> None:
  """Raises ChecksumError if a file of a position differs from the one that was saved at `step`."""
  if not (folder / checksums).exists():
    if has_checksums(folder.parent):
      raise ChecksumError(f"{folder / checksums} is missing")
    return
  try:
    saved = read_json_object(folder / checksums)
  except ValueError as error:
    raise ChecksumError(f"{folder / checksums} is damaged: {error}") from error
  saved_step = saved.pop(_STEP, None)
  if None not in (step, saved_step) and step != saved_step:
    raise ChecksumError(f"{folder} contains the position of step {saved_step}")
  for name, expected in saved.items():
    if not (folder / name).exists() or checksum((folder / name).read_bytes()) != expected:
      raise ChecksumError(f"{folder / name} has changed since it was saved")


def _missing_position_text(folder: epath.Path, filename: str, found: list[str]) -> str:
  """Describes which dataset positions a checkpoint has, and how to continue without this one."""
  have = f"it has {', '.join(found)}" if found else "it has none"
  return (
    f"checkpoint {folder.parent} contains no dataset position {filename!r} for this process ({have}): "
    "the run that wrote it did not save its dataset, or read it in another number of shards (hosts)"
  )
