"""Metrics to experiment trackers, beside TensorBoard's files: Weights & Biases, and Aim, if installed.

`trainer.Trainer.extra_writers = [@trackers.WandbWriter]` names them; neither is a dependency. A run that goes
on in its MODEL_DIR goes on in the tracker too.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any


class _ScalarWriter:
  """The methods of clu's MetricWriter: numbers and texts are written, all else is dropped."""

  def __init__(self, name: str):
    self._name = name

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes numbers."""
    raise NotImplementedError

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    """Writes texts."""
    raise NotImplementedError

  def close(self) -> None:
    """The process's end ends the run, which others may still write to."""

  def __getattr__(self, name: str) -> Callable[..., None]:
    if name != "flush" and not name.startswith("write_"):
      raise AttributeError(name)
    return lambda *args, **kwargs: None


class WandbWriter(_ScalarWriter):
  """Writes to Weights & Biases: one run for all the writers of a process."""

  def __init__(self, name: str, model_dir: str, project: str | None = None, **init: Any):
    """Joins the process's run, or starts it.

    Args:
      name: what stands before each metric's name ("train", "training_eval/TASK").
      model_dir: names the run; its files go there.
      project: None for the one in WANDB_PROJECT, else W&B's default.
      **init: further arguments of `wandb.init`: `entity`, `group`, `mode`, `tags`.

    Raises:
      ValueError: the package wandb is not installed.
    """
    super().__init__(name)
    wandb = _load("wandb", "WandbWriter")
    if wandb.run is None:
      folder = os.path.abspath(model_dir)
      # The same for the same folder, so that a restart finds its run.
      identity = hashlib.sha256(folder.encode()).hexdigest()[:24]
      defaults = {"id": identity, "name": folder, "dir": folder, "resume": "allow"}
      wandb.init(**{**defaults, "project": project, **init})
      # Writers of several names are not in step with each other, as W&B's own steps would have to be.
      wandb.define_metric("*", step_metric="step")
    self._wandb = wandb

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes numbers as NAME/METRIC, over the metric `step`."""
    self._wandb.log(
      {"step": step, **{f"{self._name}/{key}": float(x) for key, x in scalars.items()}}
    )

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    """Keeps texts, such as the configuration, with the run's settings."""
    self._wandb.config.update(dict(texts), allow_val_change=True)


class AimWriter(_ScalarWriter):
  """Writes to an Aim repository: one run for all the writers of a process."""

  def __init__(self, name: str, model_dir: str, repo: str | None = None, **init: Any):
    """Joins the process's run, or starts it.

    Args:
      name: the metrics' context, as `subset` ("train", "training_eval/TASK").
      model_dir: names the experiment.
      repo: Aim's folder or server; None for model_dir.
      **init: further arguments of `aim.Run`: `experiment`, `log_system_params`.

    Raises:
      ValueError: the package aim is not installed.
    """
    super().__init__(name)
    aim = _load("aim", "AimWriter")
    folder = os.path.abspath(model_dir)
    os.makedirs(folder, exist_ok=True)
    self._run = _aim_run(aim, repo or folder, folder, tuple(sorted(init.items())))

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes numbers."""
    for key, value in scalars.items():
      self._run.track(float(value), name=key, step=step, context={"subset": self._name})

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    """Keeps texts, such as the configuration, with the run's settings."""
    for key, text in texts.items():
      self._run[key] = text


@functools.cache
def _aim_run(aim: Any, repo: str, folder: str, init: tuple[tuple[str, Any], ...]) -> Any:
  # Aim names a new run itself; the name is kept, so that a restart finds its run.
  kept = pathlib.Path(folder) / "aim_run.txt"
  known = kept.read_text() if kept.exists() else None
  run = aim.Run(repo=repo, **{"run_hash": known, "experiment": folder, **dict(init)})
  kept.write_text(run.hash)
  return run


def _load(package: str, writer: str) -> Any:
  try:
    return importlib.import_module(package)
  except ImportError as error:
    raise ValueError(
      f"trackers.{writer} needs the package {package}, which cannot be imported ({error}): "
      f"pip install {package}, or take it out of trainer.Trainer.extra_writers"
    ) from error
