"""Writers for the experiment trackers Weights & Biases, MLflow and Aim, in addition to TensorBoard.

`trainer.Trainer.extra_writers = [@trackers.WandbWriter]` enables one. The packages are not dependencies. A run that is
restarted in its MODEL_DIR continues the same run of the tracker.
"""

import functools
import hashlib
import importlib
import os
import pathlib
import re
import threading
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


def _last_checkpoint(folder: str) -> str | None:
  # Other names are those of checkpoints that are being written or deleted.
  names = [name for name in os.listdir(folder) if re.fullmatch(r"checkpoint_\d+", name)]
  return os.path.join(folder, max(names, key=lambda name: int(name[11:]))) if names else None


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
      path = _last_checkpoint(self._folder) if self._log_checkpoint else None
      if path is not None:
        self._mlflow.log_artifacts(path, os.path.basename(path), run_id=self.run_id)
      self._mlflow.MlflowClient().set_terminated(self.run_id)


@functools.cache
def _aim_run(folder: str, **options: Any) -> Any:
  """Returns the Aim run of a MODEL_DIR, whose id is in a file there, because Aim chooses the ids."""
  aim = _import("aim", "AimWriter")
  file = pathlib.Path(folder, "aim-run.txt")
  if file.exists():
    # Of a process that was killed, the lock stays. MODEL_DIR's own lock keeps other processes out.
    return aim.Run(file.read_text(), force_resume=True, **options)
  run = aim.Run(**options)
  run.name, run["model_dir"] = os.path.basename(folder), folder
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(run.hash)
  return run


class AimWriter(_Tracker):
  """Writes to Aim; all writers of a process share one run.

  Attributes:
    run: the Aim run.
  """

  _lock = threading.Lock()  # each name is written by a thread of its own

  def __init__(self, name: str, model_dir: str, **options: Any):
    """Joins the tracker's run of this process, or starts or continues the run of `model_dir`.

    Args:
      name: the metrics' `context.subset` ("train", "training_eval/TASK").
      model_dir: the folder of the run's files; its file `aim-run.txt` identifies the run.
      **options: arguments of `aim.Run`, such as `repo` (a folder or an address) and `experiment`.

    Raises:
      ValueError: the package aim is not installed.
    """
    self._name, self._folder = name, os.path.abspath(model_dir)
    self.run = _aim_run(self._folder, **options)

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes numbers under their names."""
    with self._lock:
      for key, value in scalars.items():
        self.run.track(float(value), key, int(step), context={"subset": self._name})

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    """Stores texts, such as the configuration, as the run's parameters."""
    with self._lock:
      for key, text in texts.items():
        self.run[key] = text

  def close(self) -> None:
    """Stores the path of the last checkpoint as the parameter `checkpoint`."""
    if self._name == "train":
      self.run["checkpoint"] = _last_checkpoint(self._folder)
