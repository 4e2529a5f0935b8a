"""Finetuning with NVIDIA's scripts: the folder where it starts, and the checkpoints that are copied."""

from __future__ import annotations

import os
import pathlib

import pytest

_SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts_gpu"
_IN_A_COPY = ["squad1", "small", "bfloat16", "1", "8", "out", "pre", "0", "true", "0"]


# Stands in for srun: skips the options, then runs the command.
_SRUN = '#!/usr/bin/env bash\nwhile [[ $1 == -* ]]; do shift; done\n"$@"\n'


@pytest.fixture
def job(run, tmp_path):
  """Returns job(srun, **environment): the sub script that copies a checkpoint, in a job of Slurm."""
  (tmp_path / "pre/checkpoint_1000").mkdir(parents=True)
  known = {"SLURM_JOB_ID": "7", "SCRIPTS_DIR": str(_SCRIPTS), "MODEL_DIR": "pre"}
  known |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MAKE_FT_DIR": "true"}

  def run_job(srun: str, **environment: str):
    (tmp_path / "srun").write_text(srun)
    (tmp_path / "srun").chmod(0o755)
    return run("example_slurm_ft_frompile.sub", **known | environment)

  return run_job


@pytest.mark.parametrize(
  ("fails", "text"),
  [
    ("--dry_run", "the finetuning cannot start"),
    ("inspect", "the data of squad_v010_allanswers"),
  ],
)
def test_a_run_that_cannot_start_copies_no_checkpoint(run, tmp_path, fails, text):
  (tmp_path / "pre/checkpoint_1000").mkdir(parents=True)
  status, out, err = run("singlenode_ft_frompile.sh", *_IN_A_COPY, FAILS=fails)
  assert (status, out) == (2, "")
  assert f"error: {text}" in err
  assert not list(tmp_path.glob("ft_*"))
  environment = {"MAKE_FT_DIR": "true", "MODEL_DIR": "pre", "FT_TASK": "squad1"}
  status, out, err = run("multiprocess_ft_frompile.sh", **environment, FAILS=fails)
  assert (status, out) == (2, "")
  assert f"error: {text}" in err
  assert not list(tmp_path.glob("ft_*"))


def test_a_job_that_cannot_start_copies_no_checkpoint(job, tmp_path):
  nodes = {"SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7"}
  for problem, text in [
    ({"BASE_TFDS_DATA_DIR": "/nowhere"}, "TFDS_DATA_DIR=/nowhere is not a folder"),
    ({"TP_SIZE": "3"}, "TP_SIZE=3 does not divide the job's 16 processes"),
    ({"DATASET_MAP": "/data:/t5x_home/datasets"}, "DATASET_MAP is only for containers"),
    ({"FAILS": "--devices=16 --dry_run"}, "the finetuning cannot start"),
  ]:
    status, _, err = job(_SRUN, **nodes, **problem)
    assert (status, not list(tmp_path.glob("ft_*"))) == (2, True)
    assert f"error: {text}" in err


def test_finetuning_in_a_new_folder_starts_from_a_copy_of_the_last_checkpoint(run, tmp_path):
  for step in (900, 1000, 2000):
    (tmp_path / f"pre/checkpoint_{step}").mkdir(parents=True)
  (tmp_path / "pre/checkpoint_3000.orbax-checkpoint-tmp-1").mkdir()
  arguments = ["squad1", "small", "bfloat16", "1", "8", "out", "pre", "0", "true", "0"]
  status, out, _ = run("singlenode_ft_frompile.sh", *arguments)
  assert status == 0
  (folder,) = tmp_path.glob("ft_pre_*")
  assert [path.name for path in folder.iterdir()] == ["checkpoint_2000"]
  assert f'--gin.MODEL_DIR="{folder}"' in out
  assert "small_squad1_finetune_adam.gin" in out


def test_finetuning_requires_a_checkpoint_in_model_dir_or_an_explicit_one(run, tmp_path):
  status, out, err = run("singlenode_ft_frompile.sh", "mnli2", "small")
  assert (status, out) == (2, "")
  assert f"error: MODEL_DIR={tmp_path}/model_dir has no checkpoint to finetune\n" in err
  named = "--gin.INITIAL_CHECKPOINT_PATH='/runs/small'"
  status, out, _ = run("singlenode_ft_frompile.sh", "mnli2", "small", TRAIN_ARGS=named)
  assert status == 0
  assert named in out
  (tmp_path / "model_dir/checkpoint_1").mkdir(parents=True)
  status, _, _ = run("singlenode_ft_frompile.sh", "mnli2", "small")
  assert status == 0


def test_a_requeued_job_resumes_in_the_folder_that_it_copied(job, tmp_path):
  script = '#!/usr/bin/env bash\necho "$MODEL_DIR" "$MAKE_FT_DIR"\n'
  for _ in range(2):
    status, out, _ = job(script, SLURM_JOB_NUM_NODES="1")
    assert status == 0
    assert out.splitlines()[-1] == "./ft_pre_7 false"
    (tmp_path / "ft_pre_7/checkpoint_1005").mkdir(exist_ok=True)
  assert {path.name for path in tmp_path.glob("ft_*/*")} == {"checkpoint_1000", "checkpoint_1005"}
