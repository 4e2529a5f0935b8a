"""Which checkpoints stay on disk."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from rosetta_t5.checkpoints.folders import all_steps, checkpoint_path
from rosetta_t5.checkpoints.pins import is_pinned_checkpoint, remove_dataset_checkpoint


@dataclasses.dataclass(frozen=True)
class Retention:
  """Orbax's preservation policy with T5X's rules.

  Attributes:
    directory: the folder of checkpoints.
    keep: how many of the latest stay; None for all.
    force_keep_period: steps that are a multiple of it stay too.
  """

  directory: str | os.PathLike[str]
  keep: int | None = None
  force_keep_period: int | None = None

  def __post_init__(self) -> None:
    if self.keep is not None and self.keep < 1:
      raise ValueError(
        f"SaveCheckpointConfig.keep = {self.keep} would delete every checkpoint: set it to 1 or "
        "more, or to None to keep all"
      )

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    """Returns for each checkpoint (with attribute `step`, in ascending order) whether it stays."""
    del context
    first_kept = 0 if self.keep is None else max(0, len(checkpoints) - self.keep)
    return [
      position >= first_kept or self._is_protected(checkpoint.step)
      for position, checkpoint in enumerate(checkpoints)
    ]

  def _is_protected(self, step: int) -> bool:
    if self.force_keep_period and step % self.force_keep_period == 0:
      return True
    return is_pinned_checkpoint(checkpoint_path(self.directory, step))


def drop_old_dataset_positions(directory: str | os.PathLike[str], keep: int, prefix: str) -> None:
  """Deletes the dataset positions of all but the last `keep` complete checkpoints."""
  for step in all_steps(directory)[: -keep or None]:
    remove_dataset_checkpoint(checkpoint_path(directory, step), prefix)
