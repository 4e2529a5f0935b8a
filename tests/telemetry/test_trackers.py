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


@pytest.mark.parametrize(
  ("writer", "package"), [(trackers.WandbWriter, "wandb"), (trackers.AimWriter, "aim")]
)
def test_missing_package_is_reported_before_training(writer, package, tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, package, None)
  expected = f"{writer.__name__} needs the package {package}.*pip install {package}, or remove it"
  with pytest.raises(ValueError, match=expected):
    MetricsManager("train", tmp_path, [writer])


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


@pytest.mark.slow
def test_aim_writers_share_one_run(tmp_path):
  pytest.importorskip("aim")
  from aim.storage.context import Context

  losses = {"train": 2.0, "training_eval/pile": 3.0}
  writers = [trackers.AimWriter(name, str(tmp_path), log_system_params=False) for name in losses]
  for writer, loss in zip(writers, losses.values(), strict=True):
    writer.write_scalars(20, {"loss": loss})
  writers[0].write_texts(0, {"config": "a = 1"})
  (run,) = {writer.run for writer in writers}
  found = {name: run.get_metric("loss", Context({"subset": name})).values.last() for name in losses}
  assert {name: value[1] for name, value in found.items()} == losses
  assert run["config"] == "a = 1"
  assert (tmp_path / "aim_run.txt").read_text() == run.hash


PROCESS = """
import os, sys
from rosetta_t5.telemetry import trackers
writer, folder, first, is_killed = sys.argv[1:]
options = {"log_system_params": False} if writer == "AimWriter" else {"project": "tests"}
made = getattr(trackers, writer)("train", folder, **options)
for step in range(int(first), int(first) + 2):
  made.write_scalars(step, {"loss": 10.0 - step})
print(made.run.hash if writer == "AimWriter" else made.run.id)
sys.stdout.flush()
if is_killed == "True":
  os._exit(9)
"""


def identities(writer, folder, kills):
  """Returns the run ids of processes that run one after another; some are killed."""
  found = []
  for number, is_killed in enumerate(kills):
    call = [sys.executable, "-c", PROCESS, writer, str(folder), str(2 * number), str(is_killed)]
    # Without the W&B service of this process: a process of another job has its own.
    environment = {n: x for n, x in os.environ.items() if n != "WANDB_SERVICE"}
    environment["WANDB_MODE"] = "offline"
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == (9 if is_killed else 0), done.stderr[-2000:]
    found += [line for line in done.stdout.splitlines() if re.fullmatch("[0-9a-f]{24}", line)]
  return found


@pytest.mark.slow
def test_restart_continues_its_aim_run_and_the_sdk_reads_all_of_it(tmp_path):
  aim = pytest.importorskip("aim")
  (run_hash,) = set(identities("AimWriter", tmp_path, (False, True, False)))
  command = [pathlib.Path(sys.executable).with_name("aim"), "storage", "--repo", tmp_path]
  subprocess.run([*command, "reindex", "-y"], check=True, capture_output=True)  # as aim up does
  assert aim.Repo(str(tmp_path)).list_all_runs() == [run_hash]
  (loss,) = (m for m in aim.Repo(str(tmp_path)).get_run(run_hash).metrics() if m.name == "loss")
  assert sorted(loss.values.sparse_list()[1]) == [5.0, 6.0, 7.0, 8.0, 9.0, 10.0]
  assert loss.context.to_dict() == {"subset": "train"}


@pytest.mark.slow
def test_restart_continues_its_weights_and_biases_run(tmp_path):
  pytest.importorskip("wandb")
  names = identities("WandbWriter", tmp_path, (False, True, False))
  assert len(names) == 3
  assert len(set(names)) == 1
  other = identities("WandbWriter", tmp_path / "other", (False,))
  assert other != names[:1]
  assert len(list(tmp_path.glob(f"wandb/offline-run-*-{names[0]}/*.wandb"))) == 3
