"""From a command line to a run, as a user starts it."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest
from forked_python import python

from rosetta_t5.config import run_from_command_line

TOY = pathlib.Path(__file__).parent
RUN = """
from __gin__ import dynamic_registration
import __main__ as train_script
import toy
STEPS = %gin.REQUIRED
train_script.train:
  model = @toy.Model()
  model_dir = '/run'
  total_steps = %STEPS
toy.Model.width = 8
"""


@pytest.fixture
def launch(write, monkeypatch):
  """Runs toy.train in this process without importing TensorFlow."""
  import toy

  monkeypatch.setattr("rosetta_t5.config.launch.find_spec", lambda name: None)
  monkeypatch.delenv("ROSETTA_T5_DEBUG", raising=False)
  write("run.gin", RUN)
  return lambda *arguments: run_from_command_line(toy.train, ["train", *arguments])


def test_the_command_line_configures_the_run(launch):
  given = launch("--gin_file=run.gin", "--gin.STEPS=4", "--gin.train.model_dir='/other'")
  assert (given["total_steps"], given["model_dir"], given["model"].width) == (4, "/other", 8)


def test_one_process_can_run_twice(launch):
  assert launch("--gin_file=run.gin", "--gin.STEPS=4")["total_steps"] == 4
  assert launch("--gin_file=run.gin", "--gin.STEPS=5")["total_steps"] == 5


def test_the_given_function_runs_if_another_has_the_same_name(launch, monkeypatch):
  import toy

  def train(model, model_dir, total_steps):
    return "another"

  given = ("train", "--gin_file=run.gin", "--gin.STEPS=4")
  assert launch(*given[1:])["total_steps"] == 4
  assert run_from_command_line(train, given) == "another"
  assert run_from_command_line(toy.train, given)["total_steps"] == 4


def test_a_command_line_without_gin_is_refused(launch, capsys):
  with pytest.raises(SystemExit) as ended:
    launch()
  assert ended.value.code == 2
  assert (
    "there is nothing to run: --gin_file=gin/examples/quickstart.gin" in capsys.readouterr().err
  )


def test_processes_are_joined_before_gin_files_are_bound(launch, capsys):
  with pytest.raises(SystemExit) as ended:
    launch("--gin_file=run.gin", "--gin.STEPS=4", "--gin.nothing.at=1", "--process_count=2")
  assert ended.value.code == 1
  assert "has no effect without --multiprocess_gpu" in capsys.readouterr().err


def test_help_is_printed_and_nothing_runs(launch, capsys):
  assert launch("--help") is None
  assert "--gin_file" in capsys.readouterr().out


def _train(folder: pathlib.Path, *arguments: str, env: dict[str, str] | None = None):
  return subprocess.run(
    [python(), "-m", "t5x.train", *arguments],
    cwd=folder,
    env={**os.environ, **(env or {})},
    capture_output=True,
    text=True,
    check=False,
  )


def test_t5x_train_reports_missing_values_without_a_traceback(tmp_path):
  ended = _train(
    tmp_path,
    "--gin_file=t5x/examples/t5/t5_1_1/tiny.gin",
    "--gin_file=gin/runs/pretrain.gin",
    "--gin.TRAIN_STEPS=3",
  )
  assert ended.returncode == 2
  assert "4 values are missing:" in ended.stderr
  for name in ("DROPOUT_RATE", "MIXTURE_OR_TASK_NAME", "TASK_FEATURE_LENGTHS", "MODEL_DIR"):
    assert f"\n  {name}, needed at " in ended.stderr
  assert "/loss_vocabulary_optimizer.gin, line 12:  DROPOUT_RATE = %gin.REQUIRED" in ended.stderr
  assert "Traceback" not in ended.stderr
  assert "TRAIN_STEPS" not in ended.stderr


@pytest.mark.slow
def test_the_reference_recipe_of_t5x_trains_unchanged(tmp_path, shared):
  reference = shared / "reference"
  ended = _train(
    tmp_path,
    f"--gin_file={reference}/adafactor.gin",
    "--gin.MODEL_DIR='run'",
    "--gin.TRAIN_STEPS=1",
    "--gin.train/utils.DatasetConfig.batch_size=8",
    "--gin.train_script.train.stats_period=1",
    env={"REFERENCE_TEXT": str(reference / "lines.txt"), "PYTHONPATH": str(reference)},
  )
  assert ended.returncode == 0, ended.stderr
  written = (tmp_path / "run/config.gin").read_text().splitlines()
  assert "train/utils.DatasetConfig.batch_size = 8" in written
  assert "train_script.train.stats_period = 1" in written
  assert (tmp_path / "run/checkpoint_1").is_dir()


@pytest.mark.slow
def test_a_misspelled_binding_ends_t5x_train_before_a_device_is_used(tmp_path):
  ended = _train(
    tmp_path,
    "--gin_file=t5x/examples/t5/t5_1_1/tiny.gin",
    "--gin_file=t5x/configs/runs/pretrain.gin",
    "--gin.TRAIN_STEPS=3",
    "--gin.DROPOUT_RATE=0.0",
    "--gin.MODEL_DIR='run'",
    "--gin.MIXTURE_OR_TASK_NAME='none'",
    "--gin.TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}",
    "--gin.utils.SaveCheckpointConfig.perod=5",
    env={"JAX_PLATFORMS": "no_such_platform"},
  )
  assert ended.returncode == 2, ended.stderr
  assert "SaveCheckpointConfig has no argument 'perod'. Did you mean period?" in ended.stderr
  assert not (tmp_path / "run").exists()
