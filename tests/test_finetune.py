"""Finetuning end to end: pretrain, learn SQuAD and MNLI in small by heart, evaluate, infer."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("t5", reason="the tasks are made of the package t5's functions")

_HERE = pathlib.Path(__file__).parent / "finetune"
_PRETRAINED = 100  # steps
_RUN = {"RANDOM_SEED": 0, "train.stats_period": 50, "DROPOUT_RATE": 0.0}
_PRETRAIN = {
  "MIXTURE_OR_TASK_NAME": "'small_text'",
  "TASK_FEATURE_LENGTHS": "{'inputs': 64, 'targets': 32}",
  "TRAIN_STEPS": _PRETRAINED,
  "BATCH_SIZE": 32,
  "train/utils.DatasetConfig.pack": False,
  "train_eval/utils.DatasetConfig.pack": False,
  "utils.create_learning_rate_scheduler.warmup_steps": 100,
}
_FINETUNE = {
  "TASK_FEATURE_LENGTHS": "{'inputs': 96, 'targets': 16}",
  "TRAIN_STEPS": _PRETRAINED + 400,
  "BATCH_SIZE": 16,
  "EVAL_PERIOD": 200,
  "EVAL_STEPS": 2,
  "utils.create_learning_rate_scheduler.base_learning_rate": 0.02,
}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
  """Runs a command of T5X's as a user types it, on one device."""
  folder = tmp_path_factory.mktemp("finetune")
  environment = {
    **os.environ,
    "FINETUNE_DATA": str(folder / "data"),
    "PYTHONPATH": os.pathsep.join([str(_HERE), str(_HERE.parents[1])]),
    "JAX_PLATFORMS": "cpu",
  }

  def run(*command):
    done = subprocess.run(
      [sys.executable, *command], env=environment, capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout

  def start(module, recipe, **bindings):
    flags = [f"--gin.{name}={value}" for name, value in bindings.items()]
    files = [f"--gin_file=t5x/configs/runs/{recipe}.gin", f"--gin_file={_HERE}/model.gin"]
    return run("-m", f"t5x.{module}", *files, *flags)

  run("-c", "import finetune_tasks; finetune_tasks.write()")
  start("train", "pretrain", MODEL_DIR=f"'{folder}/pretrained'", **_RUN, **_PRETRAIN)
  start.folder = folder
  return start


def metrics(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "metric"), [("small_squad", "em"), ("small_mnli", "accuracy")])
def test_64_examples_are_learnt_by_heart_and_every_program_agrees(start, task, metric):
  folder = start.folder
  start(
    "train",
    "finetune",
    MODEL_DIR=f"'{folder}/{task}'",
    MIXTURE_OR_TASK_NAME=f"'{task}'",
    INITIAL_CHECKPOINT_PATH=f"'{folder}/pretrained/checkpoint_{_PRETRAINED}'",
    **_RUN,
    **_FINETUNE,
  )
  rows = metrics(folder / f"{task}/inference_eval/{task}-metrics.jsonl")
  assert [row["step"] for row in rows] == [200, 400, 500]
  assert rows[-1][metric] >= 95
  assert (folder / f"{task}/inference_eval/{task}-000500.jsonl").exists()

  trained = {
    "MIXTURE_OR_TASK_NAME": f"'{task}'",
    "CHECKPOINT_PATH": f"'{folder}/{task}/checkpoint_500'",
    "DROPOUT_RATE": 0.0,
  }
  said = start("eval", "eval", EVAL_OUTPUT_DIR=f"'{folder}/eval'", **trained)
  assert metrics(folder / f"eval/inference_eval/{task}-metrics.jsonl") == [rows[-1]]
  assert metric in said
  start(
    "infer",
    "infer",
    INFER_OUTPUT_DIR=f"'{folder}/infer'",
    TASK_FEATURE_LENGTHS=_FINETUNE["TASK_FEATURE_LENGTHS"],
    **trained,
    **{"utils.RestoreCheckpointConfig.dtype": "'float32'"},
  )
  written = metrics(folder / f"infer/{task}-predict.jsonl-00000-of-00001")
  right = sum(row["prediction"] == row["inputs"]["targets_pretokenized"] for row in written)
  assert 100 * right / 64 == rows[-1][metric]
