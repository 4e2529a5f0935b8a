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

from rosetta_t5.checkpoints import checkpoint_folders
from rosetta_t5.checkpoints.saved_items import DATASET_PREFIX
from rosetta_t5.distributed.coordination import broadcast_text

LOCK_FILE = "run.lock"
_IN_USE = "is in use by another training run"
_TIMEOUT_S = 600.0
# The folder in MODEL_DIR to which checkpoints are moved before their files are deleted. A process
# that is killed during the deletion then leaves no incomplete checkpoint.
REMOVED_FOLDER = ".removed"
PIN_FILE = "PINNED"

_log = logging.getLogger(__name__)


class ModelDirInUseError(ValueError):
  """Another training run uses this MODEL_DIR."""


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
    ModelDirInUseError: another run holds the lock. All processes of this run raise it.
    ValueError: the folder cannot be written to.
  """
  refusal = ""
  with contextlib.ExitStack() as stack:
    if jax.process_index() == 0 and "://" not in os.fspath(model_dir):
      try:
        epath.Path(model_dir).mkdir(parents=True, exist_ok=True)
        refusal = _lock(epath.Path(model_dir) / LOCK_FILE, stack)
      except OSError as error:
        refusal = (
          f"MODEL_DIR {os.fspath(model_dir)} cannot be written to ({error}): set it to a writable folder "
          "with space for checkpoints (--gin.MODEL_DIR=\"'...'\")"
        )
    refusal = broadcast_text(refusal, f"run lock {model_dir}", _TIMEOUT_S)
    if refusal:
      raise (ModelDirInUseError if _IN_USE in refusal else ValueError)(refusal)
    yield


def _lock(path: epath.Path, stack: contextlib.ExitStack) -> str:
  """Locks a file until `stack` ends, and writes the process into it; returns why it cannot, or ""."""
  file = stack.enter_context(open(path, "a+"))  # noqa: SIM115
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    file.seek(0)
    return (
      f"MODEL_DIR {path.parent} {_IN_USE}: {file.read().strip()}. Two runs in one folder would mix their "
      "checkpoints. Wait until that run ends, stop it, or give this run its own folder "
      f"(--gin.MODEL_DIR=\"'...'\"). {LOCK_FILE} in the folder names the other run."
    )
  except OSError as error:  # as on a Lustre that is mounted without flock
    _log.warning("MODEL_DIR is not locked: %s", error.strerror)
  if not (path.exists() and os.path.samestat(os.fstat(file.fileno()), os.stat(path))):
    return _lock(path, stack)  # The run before removed the file after it was opened here.
  stack.callback(path.unlink, missing_ok=True)
  job = os.environ.get("SLURM_JOB_ID")
  since = time.strftime("%Y-%m-%d %H:%M:%S %z")
  file.truncate(0)
  file.write(
    f"process {os.getpid()} on {socket.gethostname()}{f', Slurm job {job}' if job else ''}, since {since}\n"
  )
  file.flush()
  return ""


@dataclasses.dataclass
class Retention:
  """Orbax's preservation policy with T5X's rules.

  Attributes:
    directory: the folder of checkpoints.
    keep: how many of the latest checkpoints are kept; with `best`, how many of the best beside the
      latest; None for all.
    force_keep_period: multiples of this step are kept too.
    best: the metric that decides which checkpoints are best.
    protected: steps that are always kept, such as the one that a run started from.
  """

  directory: epath.PathLike
  keep: int | None = None
  force_keep_period: int | None = None
  best: BestMetric | None = None
  protected: set[int] = dataclasses.field(default_factory=set)

  def __post_init__(self) -> None:
    if self.keep is not None and self.keep < 1:
      raise ValueError(
        f"SaveCheckpointConfig.keep must be at least 1, or None to keep every checkpoint; got "
        f"{self.keep}, which would delete all of them"
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
    if self.best is None:
      return {step for step in steps[: -self.keep] if not self._is_always_kept(step)}
    # As in T5X, checkpoints that are always kept do not count. The latest is kept in any case.
    counted = [step for step in steps if step == steps[-1] or not self._is_always_kept(step)]
    return self.best.steps_to_delete(self.directory, counted, self.keep)

  def _is_always_kept(self, step: int) -> bool:
    is_multiple = bool(self.force_keep_period and step % self.force_keep_period == 0)
    is_pinned = is_pinned_checkpoint(checkpoint_folders.checkpoint_path(self.directory, step))
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
  folder = epath.Path(ckpt_dir)
  if is_pinned_checkpoint(folder) or not folder.exists():
    return
  if os.fspath(folder).startswith("gs://"):
    folder.rmtree()
    return
  removed = folder.parent / REMOVED_FOLDER
  removed.mkdir(exist_ok=True)
  (removed / folder.name).rmtree(missing_ok=True)
  folder.rename(removed / folder.name)
  delete_removed(folder.parent, with_folder=True)


def remove_dataset_checkpoint(ckpt_dir: epath.PathLike, train_ds_prefix: str) -> None:
  """Deletes the dataset positions of the checkpoint in `ckpt_dir` unless it is pinned.

  They are in the checkpoint's folder (T5X's older layout) or in its item `dataset` (Orbax).
  """
  folder = epath.Path(ckpt_dir)
  if is_pinned_checkpoint(folder):
    return
  for parent in (folder, folder / checkpoint_folders.DATASET_ITEM):
    for position in checkpoint_folders.files_matching(parent, f"{train_ds_prefix}*"):
      if position.is_dir():
        position.rmtree()
      else:
        position.unlink()


def remove_old_dataset_positions(directory: epath.PathLike, keep: int) -> None:
  """Deletes the dataset positions of all but the last `keep` complete checkpoints."""
  steps = checkpoint_folders.all_steps(directory)
  for step in steps[: max(0, len(steps) - keep)]:
    remove_dataset_checkpoint(checkpoint_folders.checkpoint_path(directory, step), DATASET_PREFIX)


def delete_removed(directory: epath.PathLike, with_folder: bool = False) -> None:
  """Deletes the checkpoints that this run or an earlier one moved to `.removed`, on process 0.

  Args:
    with_folder: delete the folder `.removed` too; only while no checkpoint is being moved to it.
  """
  folder = epath.Path(directory) / REMOVED_FOLDER
  if jax.process_index() != 0 or not folder.is_dir():
    return
  for checkpoint in folder.iterdir():
    try:
      # Of a link, only the link is deleted; its target is kept.
      checkpoint.unlink() if os.path.islink(checkpoint) else checkpoint.rmtree()
    except OSError as error:
      _log.warning("an old checkpoint could not be deleted: %s", error)
  if with_folder and not any(folder.iterdir()):
    folder.rmdir()


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
  for file in (f for f in checkpoint_folders.files_matching(run, "*tfevents*") if f.is_file()):
    for event in EventFileLoader(os.fspath(file)).Load():
      for value in event.summary.value:
        if value.tag == tag:
          values[event.step] = tensor_util.make_ndarray(value.tensor).item()
  return values
