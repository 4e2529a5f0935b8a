"""Jobs of the .sub scripts on a real Slurm of two nodes."""

from __future__ import annotations

import pathlib
import re
import sys
import time
from collections.abc import Iterator

import pytest
from slurm_cluster import Cluster, cluster, missing

from rosetta_t5.checkpoints import all_steps

_ROOT = pathlib.Path(__file__).parents[2]
_RESUME = _ROOT / "tests" / "resume"
_JOB = _ROOT / "scripts_gpu" / "example_slurm_pretrain_pile.sub"
_STEP = re.compile(r"^step (\d+)/30  loss ([\d.]+)", re.MULTILINE)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
  """Yields a running cluster; skips where none can run, and says why."""
  if (why := missing()) is not None:
    pytest.skip(why)
  with cluster(tmp_path_factory.mktemp("slurm") / "cluster") as started:
    yield started


def submit(slurm: Cluster, workspace: pathlib.Path, name: str) -> str:
  """Submits the job as a user would, on two nodes: tiny, on the CPU, with text that is here."""
  changes = (
    *(
      "--gin.MIXTURE_OR_TASK_NAME='resume_upper_case'",
      "--gin.MIXTURE_OR_TASK_MODULE='resume_task'",
    ),
    *("--gin.VOCABULARY=@seqio.ByteVocabulary()", "--gin.train.train_eval_dataset_cfg=None"),
    *("--gin.RANDOM_SEED=0", "--gin.train/utils.DatasetConfig.seed=0"),
  )
  environment = {
    "MODEL_DIR": name,
    "T5_SIZE": "tiny",
    "PREC": "float32",
    "ENABLE_FP8": "0",
    "BSIZE_PER_GPU": "4",
    "ENC_SL": "64",
    "DEC_SL": "64",
    "TRAIN_STEPS": "30",
    "STAT_PERIOD": "1",
    "TRAIN_ARGS": " ".join(changes),
    "PYTHON": sys.executable,
    "PYTHONPATH": f"{_RESUME}:{_ROOT}",
    "JAX_PLATFORMS": "cpu",
  }
  return slurm.submit(
    _JOB,
    *("-N2", f"--job-name={name}"),
    arguments=("1",),
    cwd=workspace,
    environment=environment,
  )


def losses(workspace: pathlib.Path, job: str) -> dict[int, str]:
  """Returns {step: loss} as process 0 of a job has printed them."""
  (output,) = workspace.glob(f"outputs/multinode/*/output-{job}-0.txt")
  return {int(step): loss for step, loss in _STEP.findall(output.read_text())}


def test_a_preempted_job_saves_is_requeued_and_ends_with_the_unbroken_curve(slurm, tmp_path):
  unbroken = submit(slurm, tmp_path, "unbroken")
  assert slurm.wait(unbroken, "COMPLETED", "FAILED") == "COMPLETED", show(tmp_path)

  preempted = submit(slurm, tmp_path, "preempted")
  while not (tmp_path / "outputs").exists() or not has_reached(tmp_path, preempted, step=12):
    assert slurm.state(preempted) in ("PENDING", "RUNNING"), show(tmp_path)
    time.sleep(0.2)
  slurm.run("scancel", "--signal=USR1", "--batch", preempted)
  slurm.wait(preempted, "PENDING")
  saved = all_steps(tmp_path / "preempted")[-1]
  assert saved in range(12, 30)
  assert slurm.wait(preempted, "COMPLETED", "FAILED") == "COMPLETED", show(tmp_path)
  assert all_steps(tmp_path / "preempted")[-1] == 30
  assert losses(tmp_path, preempted) == losses(tmp_path, unbroken)


def has_reached(workspace: pathlib.Path, job: str, step: int) -> bool:
  """Whether the job's process 0 has printed this step or a later one."""
  if not list(workspace.glob(f"outputs/multinode/*/output-{job}-0.txt")):
    return False
  return max(losses(workspace, job), default=0) >= step


def show(workspace: pathlib.Path) -> str:
  """Returns the ends of all output."""
  files = [*workspace.glob("slurm-*.out"), *workspace.glob("outputs/multinode/*/*.txt")]
  return "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in files)
