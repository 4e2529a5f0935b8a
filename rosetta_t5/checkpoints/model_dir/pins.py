"""Pinned checkpoints are never deleted; the others go by `remove_checkpoint_dir`."""

from __future__ import annotations

import os

from etils import epath

from rosetta_t5.checkpoints.model_dir.checkpoint_folders import DATASET_ITEM
from rosetta_t5.checkpoints.model_dir.removal import remove_folder

_PIN = "PINNED"


def pinned_checkpoint_filepath(ckpt_dir: str | os.PathLike[str]) -> str:
  """Returns the file whose presence pins the checkpoint in `ckpt_dir`."""
  return os.fspath(epath.Path(ckpt_dir) / _PIN)


def is_pinned_checkpoint(ckpt_dir: str | os.PathLike[str]) -> bool:
  """Returns whether the checkpoint in `ckpt_dir` is kept whatever `keep` says."""
  return epath.Path(pinned_checkpoint_filepath(ckpt_dir)).exists()


def pin_checkpoint(ckpt_dir: str | os.PathLike[str], txt: str = "1") -> None:
  """Pins the checkpoint in `ckpt_dir`, with a note `txt`."""
  epath.Path(pinned_checkpoint_filepath(ckpt_dir)).write_text(txt)


def unpin_checkpoint(ckpt_dir: str | os.PathLike[str]) -> None:
  """Lets `keep` delete the checkpoint in `ckpt_dir` again."""
  epath.Path(pinned_checkpoint_filepath(ckpt_dir)).unlink(missing_ok=True)


def remove_checkpoint_dir(ckpt_dir: str | os.PathLike[str]) -> None:
  """Deletes the checkpoint in `ckpt_dir`, unless it is pinned."""
  if not is_pinned_checkpoint(ckpt_dir) and epath.Path(ckpt_dir).exists():
    remove_folder(epath.Path(ckpt_dir))


def remove_dataset_checkpoint(ckpt_dir: str | os.PathLike[str], train_ds_prefix: str) -> None:
  """Deletes the saved dataset positions of the checkpoint in `ckpt_dir`, unless it is pinned.

  Looks in the checkpoint's folder (T5X's legacy layout) and in its item `dataset` (Orbax).
  """
  folder = epath.Path(ckpt_dir)
  if is_pinned_checkpoint(folder):
    return
  for saved in (
    *folder.glob(f"{train_ds_prefix}*"),
    *(folder / DATASET_ITEM).glob(f"{train_ds_prefix}*"),
  ):
    if saved.is_dir():
      saved.rmtree()
    else:
      saved.unlink()
