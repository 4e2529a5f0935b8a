"""Experiment trackers, with the real packages if they are installed."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from rosetta_t5.telemetry import trackers
from rosetta_t5.telemetry.metrics_manager import MetricsManager


class Listed:
  """A writer that records its calls."""

  def __init__(self, name, model_dir):
    self.name, self.model_dir, self.calls = name, model_dir, []
    made.append(self)

  def __getattr__(self, name):
    return lambda *args: self.calls.append((name, args))


made: list[Listed] = []


def test_extra_writer_gets_everything_that_tensorboard_gets(tmp_path):
  made.clear()
  manager = MetricsManager("training_eval/pile", tmp_path, [Listed])
  manager.write_scalars(3, {"loss": 1.5})
  manager.summary_writer.write_texts(3, {"config": "a = 1"})
  manager.close()
  (writer,) = made
  assert (writer.name, writer.model_dir) == ("training_eval/pile", str(tmp_path))
  assert ("write_scalars", (3, {"loss": 1.5})) in writer.calls
  assert ("write_texts", (3, {"config": "a = 1"})) in writer.calls
  assert writer.calls[-1] == ("close", ())
  assert list((tmp_path / "training_eval/pile").glob("events*"))


def test_no_extra_writer_is_built_without_a_folder(tmp_path):
  made.clear()
  MetricsManager("train", None, [Listed]).close()
  assert not made


def test_missing_package_is_reported_before_training(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "wandb", None)
  expected = "WandbWriter needs the package wandb.*pip install wandb, or remove it"
  with pytest.raises(ValueError, match=expected):
    MetricsManager("train", tmp_path, [trackers.WandbWriter])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its database library
def test_mlflow_writers_share_one_run_that_a_restart_continues(tmp_path, monkeypatch):
  mlflow = pytest.importorskip("mlflow")
  monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
  monkeypatch.chdir(tmp_path)
  folder = tmp_path / "run"
  (folder / "checkpoint_20").mkdir(parents=True)
  (folder / "checkpoint_20" / "array").write_bytes(b"1234")
  (folder / "checkpoint_30.orbax-checkpoint-tmp-0").mkdir()  # a save that was interrupted
  for step in (10, 20):
    train = trackers.MlflowWriter("train", str(folder), "tests", log_checkpoint=True)
    evaluation = trackers.MlflowWriter("training_eval/pile", str(folder), "tests")
    train.write_scalars(step, {"loss": 100.0 / step})
    evaluation.write_scalars(step, {"loss": 3.0})
    train.write_texts(0, {"config": "a = 1"})
    evaluation.close()
    train.close()
  (run,) = mlflow.search_runs(experiment_names=["tests"], output_format="list")
  assert run.info.status == "FINISHED"
  assert run.data.metrics == {"train/loss": 5.0, "training_eval/pile/loss": 3.0}
  client = mlflow.MlflowClient()
  history = client.get_metric_history(run.info.run_id, "train/loss")
  assert [(each.step, each.value) for each in history] == [(10, 10.0), (20, 5.0)]
  stored = [file.path for file in client.list_artifacts(run.info.run_id)]
  assert stored == ["checkpoint_20", "config.txt"]
  array = client.download_artifacts(run.info.run_id, "checkpoint_20/array", str(tmp_path))
  assert pathlib.Path(array).read_bytes() == b"1234"


@pytest.mark.slow
def test_weights_and_biases_writers_share_one_run(tmp_path, monkeypatch):
  wandb = pytest.importorskip("wandb")
  monkeypatch.setenv("WANDB_MODE", "offline")
  train = trackers.WandbWriter("train", str(tmp_path), project="tests")
  evaluation = trackers.WandbWriter("training_eval/pile", str(tmp_path))
  train.write_scalars(20, {"loss": 2.0})
  evaluation.write_scalars(10, {"loss": 3.0})
  train.write_texts(0, {"config": "a = 1"})
  summary, config = dict(wandb.run.summary), dict(wandb.run.config)
  wandb.finish()
  assert (summary["train/loss"], summary["training_eval/pile/loss"]) == (2.0, 3.0)
  assert config["config"] == "a = 1"
  assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


PROCESS = """
import os, sys
from rosetta_t5.telemetry import trackers
folder, first, is_killed = sys.argv[1:]
made = trackers.WandbWriter("train", folder, project="tests")
for step in range(int(first), int(first) + 2):
  made.write_scalars(step, {"loss": 10.0 - step})
print(made.run.id)
sys.stdout.flush()
if is_killed == "True":
  os._exit(9)
"""


def identities(folder, kills):
  """Returns the run ids of processes that run one after another; some are killed."""
  found = []
  for number, is_killed in enumerate(kills):
    call = [sys.executable, "-c", PROCESS, str(folder), str(2 * number), str(is_killed)]
    # Without the W&B service of this process: a process of another job has its own.
    environment = {n: x for n, x in os.environ.items() if n != "WANDB_SERVICE"}
    environment["WANDB_MODE"] = "offline"
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == (9 if is_killed else 0), done.stderr[-2000:]
    found += [line for line in done.stdout.splitlines() if re.fullmatch("[0-9a-f]{24}", line)]
  return found


@pytest.mark.slow
def test_restart_continues_its_weights_and_biases_run(tmp_path):
  pytest.importorskip("wandb")
  names = identities(tmp_path, (False, True, False))
  assert len(names) == 3
  assert len(set(names)) == 1
  other = identities(tmp_path / "other", (False,))
  assert other != names[:1]
  assert len(list(tmp_path.glob(f"wandb/offline-run-*-{names[0]}/*.wandb"))) == 3


AIM_PROCESS = """
import os, sys
from rosetta_t5.telemetry import trackers
folder, first = sys.argv[1], int(sys.argv[2])
train, evaluation = [trackers.AimWriter(name, folder + "/run", repo=folder)
                     for name in ("train", "training_eval/pile")]
train.write_texts(0, {"config": f"a = {first}"})
for step in range(first, first + 2):
  train.write_scalars(step, {"loss": 10.0 - step})
evaluation.write_scalars(first, {"loss": 3.0})
if first:
  train.close()
else:
  os._exit(9)  # killed
"""
READ_AIM = """
import sys, aim
repo = aim.Repo(sys.argv[1])
(run,) = repo.iter_runs()
losses = [metric for metric in run.metrics() if metric.name == "loss"]
found = {x.context["subset"]: (x.data.items_list()[0], x.data.items_list()[1][0]) for x in losses}
print(dict(sorted(found.items())), run["config"], run["model_dir"], run["checkpoint"], run.name)
"""


@pytest.mark.slow
def test_aim_writers_share_one_run_that_a_restart_continues(tmp_path):
  pytest.importorskip("aim")
  (tmp_path / "run/checkpoint_9").mkdir(parents=True)
  (tmp_path / "run/checkpoint_20").mkdir()
  run = [sys.executable, "-c"]
  subprocess.run([*run, AIM_PROCESS, str(tmp_path), "0"], check=False)
  subprocess.run([*run, AIM_PROCESS, str(tmp_path), "2"], check=True)
  # Aim's queries read an index, which its server writes while it runs.
  command = "from aim.cli.cli import cli_entry_point as cli; cli()"
  reindex = ["storage", "--repo", str(tmp_path), "reindex", "--yes"]
  subprocess.run([*run, command, *reindex], check=True)
  read = subprocess.run([*run, READ_AIM, str(tmp_path)], check=True, capture_output=True, text=True)
  metrics = {
    "train": ([0, 1, 2, 3], [10.0, 9.0, 8.0, 7.0]),
    "training_eval/pile": ([0, 2], [3.0, 3.0]),
  }
  folder = tmp_path / "run"
  assert read.stdout.strip() == f"{metrics} a = 2 {folder} {folder / 'checkpoint_20'} run"
