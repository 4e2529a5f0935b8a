"""Writers for the experiment trackers Weights & Biases and Aim, in addition to TensorBoard.

`trainer.Trainer.extra_writers = [@trackers.WandbWriter]` enables one. Neither package is a
dependency. A run that is restarted in its MODEL_DIR continues the same run of the tracker.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any


class NullWriter:
  """A clu MetricWriter that does nothing except what a subclass implements."""

  def __init__(self, name: str):
    self._name = name

  def close(self) -> None:
    """Leaves the tracker's run open for other writers; it ends with the process."""

  def __getattr__(self, name: str) -> Callable[..., None]:
    if name != "flush" and not name.startswith("write_"):
      raise AttributeError(name)
    return lambda *args, **kwargs: None


class WandbWriter(NullWriter):
  """Writes to Weights & Biases; all writers of a process share one run.

  Attributes:
    run: the W&B run.
  """

  def __init__(self, name: str, model_dir: str, project: str | None = None, **init: Any):
    """Joins the tracker's run of this process, or starts it.

    Args:
      name: the prefix of the metrics' names ("train", "training_eval/TASK").
      model_dir: the folder of the run's files; it also identifies the run.
      project: the W&B project; None for WANDB_PROJECT or W&B's default.
      **init: other arguments of `wandb.init`, such as `entity`, `group`, `mode` and `tags`.

    Raises:
      ValueError: the package wandb is not installed.
    """
    super().__init__(name)
    wandb = _load("wandb", "WandbWriter")
    if wandb.run is None:
      folder = os.path.abspath(model_dir)
      # The folder determines the id, so that a restart finds its run.
      identity = hashlib.sha256(folder.encode()).hexdigest()[:24]
      defaults = {"id": identity, "name": folder, "dir": folder, "resume": "allow"}
      wandb.init(**{**defaults, "project": project, **init})
      # W&B's own step must never decrease, which writers of several names cannot guarantee.
      wandb.define_metric("*", step_metric="step")
    self.run = wandb.run

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes numbers as NAME/METRIC against the metric `step`."""
    self.run.log({"step": step, **{f"{self._name}/{key}": float(x) for key, x in scalars.items()}})

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    """Stores texts, such as the configuration, in the run's settings."""
    self.run.config.update(dict(texts), allow_val_change=True)


class AimWriter(NullWriter):
  """Writes to an Aim repository; all writers of a process share one run.

  Attributes:
    run: the Aim run.
  """

  def __init__(self, name: str, model_dir: str, repo: str | None = None, **init: Any):
    """Joins the tracker's run of this process, or starts it.

    Args:
      name: the `subset` in the metrics' context ("train", "training_eval/TASK").
      model_dir: the name of the experiment.
      repo: Aim's folder or server; None for model_dir.
      **init: other arguments of `aim.Run`, such as `experiment` and `log_system_params`.

    Raises:
      ValueError: the package aim is not installed.
    """
    super().__init__(name)
    aim = _load("aim", "AimWriter")
    folder = os.path.abspath(model_dir)
    os.makedirs(folder, exist_ok=True)
    self.run = _open_aim_run(aim, repo or folder, folder, tuple(sorted(init.items())))

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes numbers."""
    for key, value in scalars.items():
      self.run.track(float(value), name=key, step=step, context={"subset": self._name})

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    """Stores texts, such as the configuration, in the run's settings."""
    for key, text in texts.items():
      self.run[key] = text


@functools.cache
def _open_aim_run(aim: Any, repo: str, folder: str, init: tuple[tuple[str, Any], ...]) -> Any:
  # Aim chooses the hash of a new run. It is stored so that a restart finds its run.
  hash_file = pathlib.Path(folder) / "aim_run.txt"
  run_hash = hash_file.read_text() if hash_file.exists() else None
  run = aim.Run(repo=repo, **{"run_hash": run_hash, "experiment": folder, **dict(init)})
  hash_file.write_text(run.hash)
  return run


def _load(package: str, writer: str) -> Any:
  try:
    return importlib.import_module(package)
  except ImportError as error:
    raise ValueError(
      f"trackers.{writer} needs the package {package}, which cannot be imported ({error}): "
      f"pip install {package}, or remove it from trainer.Trainer.extra_writers"
    ) from error
