"""The value of a metric at each checkpoint, read from TensorBoard's files in the same folder."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
from collections.abc import Iterable, Sequence

from etils import epath

from rosetta_t5.checkpoints.model_dir.checkpoint_folders import files_matching

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class BestMetric:
  """The metric that decides which checkpoints are kept (T5X's arguments of SaveBestCheckpointer).

  Attributes:
    name: RUN/TAG, such as 'train/accuracy' or 'inference_eval/glue_cola_v002/eval/accuracy'.
    mode: 'max' if larger values are better, 'min' if smaller values are.
    keep_unknown: whether checkpoints without a value of the metric are kept.
  """

  name: str
  mode: str = "max"
  keep_unknown: bool = True

  def __post_init__(self) -> None:
    if self.mode not in ("max", "min"):
      raise ValueError(f"metric_mode must be 'max' or 'min', got {self.mode!r}")
    if "/" not in self.name:
      raise ValueError(
        f"metric_name_to_monitor must be RUN/TAG, got {self.name!r}. RUN is the folder of "
        "TensorBoard's files under MODEL_DIR and TAG the name of the metric in them, as in "
        "'train/accuracy' or 'training_eval/TASK/loss_per_nonpadding_target_token'"
      )

  def steps_to_delete(self, directory: epath.PathLike, steps: Sequence[int], keep: int) -> set[int]:
    """Returns the steps to delete: all but the latest and the `keep` best ones.

    Args:
      directory: the folder of checkpoints, which also contains TensorBoard's files.
      steps: the steps of complete checkpoints, in ascending order.
      keep: how many of the best to keep beside the latest.
    """
    older = list(steps[:-1])
    if len(older) <= keep:
      return set()
    values = populate_metrics_for_steps(directory, self.name, older)
    if not values:
      _report_no_values(
        os.fspath(directory), self.name, "all" if self.keep_unknown else "the latest"
      )
    if self.keep_unknown:
      older = [step for step in older if step in values]
    sign = 1 if self.mode == "max" else -1

    def goodness(step: int) -> float:
      value = values.get(step, math.nan)
      return -math.inf if math.isnan(value) else sign * value

    # The sort is stable, so the oldest of equal checkpoints come first.
    worst_first = sorted(older, key=goodness)
    return set(worst_first[: max(0, len(older) - keep)])


@functools.cache
def _report_no_values(directory: str, name: str, kept: str) -> None:
  _log.warning(
    f"TensorBoard's files under {directory} have no value of {name!r} (metric_name_to_monitor) for any "
    f"checkpoint, so {kept} checkpoints are kept instead of the best"
  )


def populate_metrics_for_steps(
  checkpoints_dir: epath.PathLike, metric_name: str, steps: Iterable[int]
) -> dict[int, float]:
  """Returns {step: value} of a metric for those of `steps` that have a value (T5X's function).

  Args:
    checkpoints_dir: the folder that contains the folders of TensorBoard's files.
    metric_name: RUN/TAG. Both may contain slashes, so the longest RUN with the TAG is used.
    steps: the steps to look up.
  """
  wanted = set(steps)
  parts = metric_name.split("/")
  for depth in range(len(parts) - 1, 0, -1):
    run = epath.Path(checkpoints_dir).joinpath(*parts[:depth])
    values = _read_scalars(run, "/".join(parts[depth:])) if run.is_dir() else {}
    if found := {step: value for step, value in values.items() if step in wanted}:
      return found
  return {}


def _read_scalars(run: epath.Path, tag: str) -> dict[int, float]:
  """Returns {step: value} of the scalar `tag` in a folder of TensorBoard's files."""
  from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
  from tensorboard.util import tensor_util

  values = {}
  for file in (f for f in files_matching(run, "*tfevents*") if f.is_file()):
    for event in EventFileLoader(os.fspath(file)).Load():
      for value in event.summary.value:
        if value.tag == tag:
          values[event.step] = tensor_util.make_ndarray(value.tensor).item()
  return values
