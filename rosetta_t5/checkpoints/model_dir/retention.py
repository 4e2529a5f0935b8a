"""Which checkpoints stay on disk."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from rosetta_t5.checkpoints.model_dir.best_metric import BestMetric
from rosetta_t5.checkpoints.model_dir.checkpoint_folders import all_steps, checkpoint_path
from rosetta_t5.checkpoints.model_dir.pins import is_pinned_checkpoint, remove_dataset_checkpoint


@dataclasses.dataclass
class Retention:
  """Orbax's preservation policy with T5X's rules.

  Attributes:
    directory: the folder of checkpoints.
    keep: how many of the latest stay, or with `best` how many of the best beside the latest; None
      for all.
    force_keep_period: steps that are a multiple of it stay too.
    best: the metric that says which are best.
    protected: steps that stay whatever else is said, such as the one a run started from.
  """

  directory: str | os.PathLike[str]
  keep: int | None = None
  force_keep_period: int | None = None
  best: BestMetric | None = None
  protected: set[int] = dataclasses.field(default_factory=set)

  def __post_init__(self) -> None:
    if self.keep is not None and self.keep < 1:
      raise ValueError(
        f"SaveCheckpointConfig.keep = {self.keep} would delete every checkpoint: set it to 1 or "
        "more, or to None to keep all"
      )

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    """Returns for each checkpoint (with attribute `step`, in ascending order) whether it stays."""
    del context
    steps = [checkpoint.step for checkpoint in checkpoints]
    gone = self.steps_to_delete(steps)
    return [step not in gone for step in steps]

  def steps_to_delete(self, steps: Sequence[int]) -> set[int]:
    """Returns which of `steps`, in ascending order, may be deleted."""
    if self.keep is None:
      return set()
    if self.best is None:
      old = set(steps[: max(0, len(steps) - self.keep)])
      return {step for step in old if not self._stays(step)}
    # As in T5X, those that stay anyway do not count; the latest always stays.
    others = [step for step in steps if step == steps[-1] or not self._stays(step)]
    return self.best.steps_to_delete(self.directory, others, self.keep)

  def _stays(self, step: int) -> bool:
    if step in self.protected:
      return True
    if self.force_keep_period and step % self.force_keep_period == 0:
      return True
    return is_pinned_checkpoint(checkpoint_path(self.directory, step))


def drop_old_dataset_positions(directory: str | os.PathLike[str], keep: int, prefix: str) -> None:
  """Deletes the dataset positions of all but the last `keep` complete checkpoints."""
  for step in all_steps(directory)[: -keep or None]:
    remove_dataset_checkpoint(checkpoint_path(directory, step), prefix)
