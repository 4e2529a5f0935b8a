"""A package that was written for T5X, all of its own parts bound from one gin file, trains."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import gin
import jax
import numpy as np
import pytest

from rosetta_t5.train import main

HERE = pathlib.Path(__file__).parent
RUN = HERE / "wordlab/run.gin"


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
  """The folder of a run that the package's own action has ended after step 3."""
  folder = tmp_path_factory.mktemp("wordlab")
  _train(folder)
  return folder


def _train(folder: pathlib.Path, *more: str) -> None:
  gin.clear_config()
  jax.config.update("jax_numpy_rank_promotion", "allow")  # users' code is not held to our rules
  try:
    with pytest.MonkeyPatch.context() as patch:
      patch.syspath_prepend(HERE)
      main(["train", *_arguments(folder), *more])
  finally:
    jax.config.update("jax_numpy_rank_promotion", "raise")
    gin.clear_config()


def _arguments(folder: pathlib.Path) -> list[str]:
  return [
    f"--gin_file={RUN}",
    f"--gin.MODEL_DIR='{folder}/run'",
    f"--gin.NOTES='{folder}/notes/seen.jsonl'",
  ]


def _notes(folder: pathlib.Path) -> list[dict]:
  return [json.loads(line) for line in (folder / "notes/seen.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_its_action_sees_every_stretch_and_ends_the_run(ended):
  assert [note["step"] for note in _notes(ended)] == [1, 2, 3]
  assert sorted(p.name for p in (ended / "run").glob("checkpoint_*")) == [
    "checkpoint_0",
    "checkpoint_2",
    "checkpoint_3",
  ]


@pytest.mark.slow
def test_its_model_and_trainer_measure_what_they_add(ended):
  metrics = _notes(ended)[-1]["metrics"]
  assert "scale_size" in metrics
  assert "weight_rms/words/embedding" in metrics
  assert "learning_rate" in metrics


@pytest.mark.slow
def test_its_initializer_makes_the_first_state(ended):
  from t5x import checkpoints

  first = checkpoints.load_t5x_checkpoint(str(ended / "run/checkpoint_0"))
  assert np.unique(np.asarray(first["target"]["scale"])) == pytest.approx([0.1])


@pytest.mark.slow
def test_its_decoding_is_what_the_predictions_are(ended):
  (written,) = (ended / "run/inference_eval").glob("wordlab_repeat-000002.jsonl")
  rows = [json.loads(line) for line in written.read_text().splitlines()]
  assert len(rows) == 8
  # Never an end: its decoding knows none.
  assert all(len(row["prediction"]) > 0 for row in rows)


@pytest.mark.slow
def test_what_it_wrote_down_configures_the_same_run(ended):
  written = (ended / "run/config.gin").read_text()
  for line in ("model.BagModel.penalty = 0.01", "running.BagTrainer.num_microbatches = 2"):
    assert line in written


@pytest.mark.slow
def test_it_goes_on_from_its_own_checkpoint(ended, capsys):
  capsys.readouterr()
  _train(ended, "--gin.TRAIN_STEPS=3", "--gin.model.BagModel.penalty=0.02")
  said = capsys.readouterr().out
  assert "steps     3 to 3, from" in said
  assert "changed since the last run: model.BagModel.penalty: 0.01 → 0.02" in said


def test_a_dry_run_shows_its_memory_on_other_devices(tmp_path, capsys):
  _train(tmp_path, "--dry_run", "--devices=8")
  said = capsys.readouterr().out
  assert "mesh           data 8 × model 1 on 8 devices" in said
  assert "memory         about 197 kB per device: params 49.2 kB, optimizer 49.3 kB, " in said


@pytest.mark.slow
def test_the_command_line_finds_it_in_the_working_directory(tmp_path):
  for arguments in (["--dry_run", "--devices=8"], []):
    done = subprocess.run(
      [sys.executable, "-m", "t5x.main", "--run_mode=train", *arguments, *_arguments(tmp_path)],
      cwd=HERE,
      env={**os.environ, "JAX_NUM_CPU_DEVICES": "2"},
      capture_output=True,
      text=True,
      check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
  assert [note["step"] for note in _notes(tmp_path)] == [1, 2, 3]
