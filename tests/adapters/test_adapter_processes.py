"""A LoRA that two processes train, and continue, has the losses of one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
from test_finetune_command import call
from test_folder_runs import make_folder
from test_run import logged


def train(recipe, folder, steps, processes):
  """Trains up to `steps` steps in several processes."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    address = f"localhost:{free.getsockname()[1]}"
  command = [sys.executable, "-m", "t5x.train", f"--gin_file={recipe}"]
  command += [f"--gin.MODEL_DIR={str(folder)!r}", f"--gin.TRAIN_STEPS={steps}"]
  group = ["--multiprocess_gpu", f"--coordinator_address={address}", f"--process_count={processes}"]
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
  started = []
  for index in range(processes):
    given = [*command, *group, f"--process_index={index}"] if processes > 1 else command
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started.append(subprocess.Popen(given, env=environment, **pipes))
  output = [process.communicate(timeout=600)[0] for process in started]
  assert {process.returncode for process in started} == {0}, output[0][-3000:]


@pytest.mark.slow
def test_two_processes_with_a_restart_have_the_losses_of_one(tmp_path):
  rows = [{"text": f"w{n} w{n + 1} w9", "label": f"w{4 + n % 2}"} for n in range(3, 38)]
  (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  make_folder(tmp_path / "model", "t5gemma", layers=1)
  options = ("--inputs", "text", "--targets", "label", "--lora", 4, "--batch_size", 8)
  options += ("--learning_rate", 0.05, "--out", tmp_path / "run", "--dry_run")
  # Batches have the same rows: each process reads every second row in the order of the file.
  options += ("--eval", tmp_path / "rows.jsonl", "--gin.train/utils.DatasetConfig.shuffle=False")
  options += ("--gin.utils.SaveCheckpointConfig.save_dataset=True",)
  options += tuple(
    f"--gin.train_script.train.{x}_eval_dataset_cfg=None" for x in ("train", "infer")
  )
  options += ("--gin.train_script.train.stats_period=1",)
  status, recipe, errors = call("finetune", tmp_path / "model", tmp_path / "rows.jsonl", *options)
  assert status == 0, errors[-2000:]
  (tmp_path / "lora.gin").write_text(recipe)
  for folder, steps, processes in (("one", 4, 1), ("two", 2, 2), ("two", 4, 2)):
    train(tmp_path / "lora.gin", tmp_path / folder, steps, processes)
  name = "loss_per_nonpadding_target_token"
  one, two = (
    {step: values[name] for step, values in logged(tmp_path / x).items() if name in values}
    for x in ("one", "two")
  )
  assert len(one) == 4
  assert two == pytest.approx(one, rel=1e-5)
