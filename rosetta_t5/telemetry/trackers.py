"""A writer for the experiment tracker Weights & Biases, in addition to TensorBoard.

`trainer.Trainer.extra_writers = [@trackers.WandbWriter]` enables it. The package is not a dependency. A run that is
restarted in its MODEL_DIR continues the same run of the tracker.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from typing import Any


class WandbWriter:
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
    self._name = name
    try:
      import wandb
    except ImportError as error:
      raise ValueError(
        f"trackers.WandbWriter needs the package wandb, which cannot be imported ({error}): "
        "pip install wandb, or remove it from trainer.Trainer.extra_writers"
      ) from error
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

  def __getattr__(self, name: str) -> Callable[..., None]:
    """Returns a method of clu's MetricWriter that does nothing; the run of W&B ends with the process."""
    if name not in ("flush", "close") and not name.startswith("write_"):
      raise AttributeError(name)
    return lambda *args, **kwargs: None
