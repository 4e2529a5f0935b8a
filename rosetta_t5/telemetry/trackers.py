"""Writers for the experiment trackers Weights & Biases and MLflow, in addition to TensorBoard.

`trainer.Trainer.extra_writers = [@trackers.WandbWriter]` enables one. The packages are not dependencies. A run that is
restarted in its MODEL_DIR continues the same run of the tracker.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
from collections.abc import Callable, Mapping
from typing import Any


class _Tracker:
  """The methods of clu's MetricWriter, which do nothing; the run of a tracker ends with the process."""

  def __getattr__(self, name: str) -> Callable[..., None]:
    if name not in ("flush", "close") and not name.startswith("write_"):
      raise AttributeError(name)
    return lambda *args, **kwargs: None


def _import(package: str, writer: str) -> Any:
  try:
    return importlib.import_module(package)
  except ImportError as error:
    raise ValueError(
      f"trackers.{writer} needs the package {package}, which cannot be imported ({error}): "
      f"pip install {package}, or remove it from trainer.Trainer.extra_writers"
    ) from error


class WandbWriter(_Tracker):
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
    wandb = _import("wandb", "WandbWriter")
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


class MlflowWriter(_Tracker):
  """Writes to MLflow; all writers of a process share one run.

  MLFLOW_TRACKING_URI names the server or the database, as in all programs that use MLflow.

  Attributes:
    run_id: the id of the MLflow run.
  """

  def __init__(
    self, name: str, model_dir: str, experiment: str | None = None, log_checkpoint: bool = False
  ):
    """Joins the tracker's run of this process, or starts or continues the run of `model_dir`.

    Args:
      name: the prefix of the metrics' names ("train", "training_eval/TASK").
      model_dir: the folder of the run's files; it also identifies the run.
      experiment: the MLflow experiment; None for MLFLOW_EXPERIMENT_NAME or MLflow's default.
      log_checkpoint: whether the last checkpoint is stored as an artifact when training ends.

    Raises:
      ValueError: the package mlflow is not installed.
    """
    mlflow = _import("mlflow", "MlflowWriter")
    self._mlflow, self._name = mlflow, name
    self._folder, self._log_checkpoint = os.path.abspath(model_dir), log_checkpoint
    if experiment is not None:
      mlflow.set_experiment(experiment)
    # The first writer creates the run. The other writers, and later starts, find it by its folder.
    wanted = f"tags.model_dir = '{self._folder}'"
    found = mlflow.search_runs(filter_string=wanted, output_format="list")
    if found:
      self.run_id = found[0].info.run_id
      mlflow.MlflowClient().update_run(self.run_id, status="RUNNING")
    else:
      run_name, tags = os.path.basename(self._folder), {"model_dir": self._folder}
      with mlflow.start_run(run_name=run_name, tags=tags) as run:
        self.run_id = run.info.run_id

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes numbers as NAME/METRIC."""
    metrics = {f"{self._name}/{key}": float(value) for key, value in scalars.items()}
    self._mlflow.log_metrics(metrics, step=int(step), run_id=self.run_id)

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    """Stores texts, such as the configuration, as artifacts."""
    for key, text in texts.items():
      self._mlflow.log_text(text, f"{key}.txt", run_id=self.run_id)

  def close(self) -> None:
    """Ends the run with training, and stores its last checkpoint if that was asked for."""
    if self._name == "train":
      found = os.listdir(self._folder) if self._log_checkpoint else []
      # Other names are those of checkpoints that are being written or deleted.
      names = [name for name in found if re.fullmatch(r"checkpoint_\d+", name)]
      for name in sorted(names, key=lambda name: int(name[11:]))[-1:]:
        path = os.path.join(self._folder, name)
        self._mlflow.log_artifacts(path, name, run_id=self.run_id)
      self._mlflow.MlflowClient().set_terminated(self.run_id)
