"""MODEL_DIR: one training run at a time, and the checkpoints in it that are kept."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import inspect
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from etils import epath

from rosetta_t5.argument_types import check_one_of
from rosetta_t5.checkpoints.checkpoint_folders import DATASET_ITEM, checkpoint_path, files_matching
from rosetta_t5.distributed.coordination import broadcast_text

LOCK_FILE = "run.lock"
_TIMEOUT_S = 600.0
PIN_FILE = "PINNED"

_log = logging.getLogger(__name__)


def exclusive_model_dir(function: Callable[..., Any]) -> Callable[..., Any]:
  """Decorates a function with an argument `model_dir` so that it locks that folder while it runs."""
  signature = inspect.signature(function)

  @functools.wraps(function)
  def run(*args: Any, **kwargs: Any) -> Any:
    with lock_model_dir(signature.bind(*args, **kwargs).arguments["model_dir"]):
      return function(*args, **kwargs)

  # Gin inspects the arguments in a way that does not follow `__wrapped__`.
  run.__signature__ = signature  # type: ignore[attr-defined]
  return run


@contextlib.contextmanager
def lock_model_dir(model_dir: epath.PathLike) -> Iterator[None]:
  """Locks `model_dir` for this run inside a `with` statement. All processes of a run share the lock.

  The operating system releases the lock when process 0 ends, however it ends. Folders in the cloud
  and file systems without locks are not locked.

  Raises:
    ValueError: another run holds the lock, or the folder cannot be written to. All processes raise it.
  """
  refusal, path = "", epath.Path(model_dir) / LOCK_FILE
  with contextlib.ExitStack() as stack:
    if jax.process_index() == 0 and "://" not in os.fspath(model_dir):
      try:
        path.parent.mkdir(parents=True, exist_ok=True)
        refusal = _lock(stack.enter_context(open(path, "a+")))
      except OSError as error:
        refusal = (
          f"cannot be written to ({error}): set it to a writable folder with space for checkpoints"
        )
    if refusal := broadcast_text(refusal, f"run lock {model_dir}", _TIMEOUT_S):
      raise ValueError(f"MODEL_DIR {os.fspath(model_dir)} {refusal} (--gin.MODEL_DIR=\"'...'\")")
    yield


def _lock(file: Any) -> str:
  """Locks a file until it is closed, and writes the process into it; returns why it cannot, or ""."""
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    file.seek(0)
    return (
      f"is in use by another training run: {file.read().strip()}. Wait until that run ends, stop it, or "
      "give this run its own folder"
    )
  except OSError as error:  # as on a Lustre that is mounted without flock
    _log.warning("MODEL_DIR is not locked: %s", error.strerror)
  since = time.strftime("%Y-%m-%d %H:%M:%S %z")
  file.truncate(0)
  file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n")
  file.flush()
  return ""


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
    protected: steps that are always kept, such as the one that a run started from.
  """

  directory: epath.PathLike
  keep: int | None = None
  force_keep_period: int | None = None
  metric: str | None = None
  mode: str = "max"
  keep_unknown: bool = True
  protected: set[int] = dataclasses.field(default_factory=set)

  def __post_init__(self) -> None:
    check_one_of("metric_mode", self.mode, ("max", "min"))
    if self.metric is not None and "/" not in self.metric:
      raise ValueError(
        f"metric_name_to_monitor must be RUN/TAG, got {self.metric!r}. RUN is the folder of "
        "TensorBoard's files under MODEL_DIR and TAG the name of the metric in them, as in "
        "'train/accuracy'"
      )

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    """Returns whether each checkpoint is kept; they have an attribute `step`, in ascending order."""
    del context
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
      _log.warning(
        f"TensorBoard's files under {self.directory} have no value of {self.metric!r} "
        "(metric_name_to_monitor) for any checkpoint"
      )
    if self.keep_unknown:
      older = [step for step in older if step in values]
    sign = 1 if self.mode == "max" else -1
    goodness = {step: sign * value for step, value in values.items() if not math.isnan(value)}
    # The sort is stable, so the oldest of equal checkpoints come first.
    worst_first = sorted(older, key=lambda step: goodness.get(step, -math.inf))
    return set(worst_first[: max(0, len(older) - self.keep)])

  def _is_always_kept(self, step: int) -> bool:
    is_multiple = bool(self.force_keep_period and step % self.force_keep_period == 0)
    is_pinned = is_pinned_checkpoint(checkpoint_path(self.directory, step))
    return step in self.protected or is_multiple or is_pinned


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
  for parent in (folder, folder / DATASET_ITEM):
    for position in files_matching(parent, f"{train_ds_prefix}*"):
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
  wanted = set(steps)
  parts = metric_name.split("/")
  for depth in range(len(parts) - 1, 0, -1):
    run = epath.Path(checkpoints_dir).joinpath(*parts[:depth])
    values = _read_scalars(run, "/".join(parts[depth:]))
    if found := {step: value for step, value in values.items() if step in wanted}:
      return found
  return {}


def _read_scalars(run: epath.Path, tag: str) -> dict[int, float]:
  """Returns {step: value} of the scalar `tag` in a folder of TensorBoard's files."""
  from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
  from tensorboard.util import tensor_util

  values = {}
  for file in files_matching(run, "*tfevents*"):
    for event in EventFileLoader(os.fspath(file)).Load():
      for value in event.summary.value:
        if value.tag == tag:
          values[event.step] = tensor_util.make_ndarray(value.tensor).item()
  return values
