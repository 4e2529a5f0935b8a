"""Jobs of the .sub scripts on a real Slurm of two nodes."""

from __future__ import annotations

import pathlib
import re
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
from inline_executor import InlineExecutor
from prepared_text import prepared_gin
from slurm_cluster import Cluster, cluster, missing

from rosetta_t5.checkpoints import all_steps
from rosetta_t5.data.prepared import prepare
from rosetta_t5.data.vocabularies.sentencepiece_models import train_sentencepiece

pytestmark = pytest.mark.slow

_ROOT = pathlib.Path(__file__).parents[2]
_RESUME = _ROOT / "tests" / "resume"
_JOB = _ROOT / "scripts_gpu" / "example_slurm_pretrain_pile.sub"
_STEP = re.compile(r"^step (\d+)/\d+  loss ([\d.]+)", re.MULTILINE)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
  """Yields a running cluster; skips with the reason where none can run."""
  if (why := missing()) is not None:
    pytest.skip(why)
  with cluster(tmp_path_factory.mktemp("slurm") / "cluster") as started:
    yield started


# A SeqIO task must be read by a fixed number of processes; prepared text by any number.
_TASK = (
  "--gin.MIXTURE_OR_TASK_NAME='resume_upper_case'",
  "--gin.MIXTURE_OR_TASK_MODULE='resume_task'",
  "--gin.VOCABULARY=@seqio.ByteVocabulary()",
)


def submit(
  slurm: Cluster,
  workspace: pathlib.Path,
  name: str,
  nodes: int = 2,
  data: tuple[str, ...] = _TASK,
  steps: int = 30,
) -> str:
  """Submits the job as a user would, but tiny and on the CPU, with 8 examples per step."""
  changes = (
    *data,
    "--gin.train.train_eval_dataset_cfg=None",
    *("--gin.RANDOM_SEED=0", "--gin.train/utils.DatasetConfig.seed=0"),
  )
  environment = {
    "MODEL_DIR": name,
    "T5_SIZE": "tiny",
    "PREC": "float32",
    "ENABLE_FP8": "0",
    "BSIZE_PER_GPU": str(8 // nodes),
    "ENC_SL": "64",
    "DEC_SL": "64",
    "TRAIN_STEPS": str(steps),
    "STAT_PERIOD": "1",
    "TRAIN_ARGS": " ".join(changes),
    "PYTHON": sys.executable,
    "PYTHONPATH": f"{_RESUME}:{_ROOT}",
    "JAX_PLATFORMS": "cpu",
  }
  return slurm.submit(
    _JOB,
    *(f"-N{nodes}", f"--job-name={name}"),
    arguments=("1",),
    cwd=workspace,
    environment=environment,
  )


def losses(workspace: pathlib.Path, job: str) -> dict[int, str]:
  """Returns {step: loss} as printed by process 0 of a job."""
  (output,) = workspace.glob(f"outputs/multinode/*/output-{job}-0.txt")
  return {int(step): loss for step, loss in _STEP.findall(output.read_text())}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
  """Returns the flags that make a job read prepared text."""
  folder = tmp_path_factory.mktemp("prepared")
  words, random = ("red", "old", "cat", "hat", "sea", "sun"), np.random.default_rng(0)
  lines = (" ".join(random.choice(words, 30)) for _ in range(400))
  (folder / "text.txt").write_text("\n".join(lines))
  model = folder / "pieces.model"
  model.write_bytes(train_sentencepiece([" ".join(words)] * 20, vocab_size=18))
  prepare(str(folder / "text.txt"), str(model), folder / "tokens", executor=InlineExecutor())
  (folder / "prepared.gin").write_text(prepared_gin(folder / "tokens"))
  return (f"--gin_file={folder}/prepared.gin",)


def test_a_job_on_two_nodes_trains_to_the_end(slurm, tmp_path, prepared):
  job = submit(slurm, tmp_path, "quick", data=prepared, steps=4)
  assert slurm.wait(job, "COMPLETED", "FAILED") == "COMPLETED", show(tmp_path)
  assert sorted(losses(tmp_path, job)) == [1, 2, 3, 4]
  assert all_steps(tmp_path / "quick") == [0, 4]
  first, second = (
    path.read_text() for path in sorted(tmp_path.glob(f"outputs/multinode/*/output-{job}-*.txt"))
  )
  assert re.search("^2 processes on .*, each with 1 cpu; ", first, re.MULTILINE)
  assert "mesh data=2 model=1" in first
  assert "step " not in second  # Only process 0 prints progress.


@pytest.fixture(scope="module")
def uninterrupted(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
  """Returns the losses of an uninterrupted run on two nodes."""
  folder = tmp_path_factory.mktemp("uninterrupted")
  job = submit(slurm, folder, "uninterrupted")
  assert slurm.wait(job, "COMPLETED", "FAILED") == "COMPLETED", show(folder)
  return losses(folder, job)


def interrupt(slurm: Cluster, workspace: pathlib.Path, job: str) -> None:
  """Preempts a job after some steps, and waits until it is back in the queue."""
  while not (workspace / "outputs").exists() or not has_reached(workspace, job, step=12):
    assert slurm.state(job) in ("PENDING", "RUNNING"), show(workspace)
    time.sleep(0.2)
  slurm.run("scancel", "--signal=USR1", "--batch", job)
  slurm.wait(job, "PENDING")


def test_a_preempted_job_is_requeued_and_has_the_losses_of_an_uninterrupted_run(
  slurm, tmp_path, uninterrupted
):
  preempted = submit(slurm, tmp_path, "preempted")
  interrupt(slurm, tmp_path, preempted)
  assert all_steps(tmp_path / "preempted")[-1] in range(12, 30)
  assert slurm.wait(preempted, "COMPLETED", "FAILED") == "COMPLETED", show(tmp_path)
  assert all_steps(tmp_path / "preempted")[-1] == 30
  assert losses(tmp_path, preempted) == uninterrupted


def test_a_run_that_grows_from_one_node_to_two_has_the_losses_of_an_uninterrupted_run(
  slurm, tmp_path, prepared
):
  uninterrupted = submit(slurm, tmp_path, "uninterrupted", data=prepared)
  assert slurm.wait(uninterrupted, "COMPLETED", "FAILED") == "COMPLETED", show(tmp_path)
  small = submit(slurm, tmp_path, "grown", nodes=1, data=prepared)
  interrupt(slurm, tmp_path, small)
  slurm.run("scancel", small)
  saved = all_steps(tmp_path / "grown")[-1]
  grown = submit(slurm, tmp_path, "grown", data=prepared)
  assert slurm.wait(grown, "COMPLETED", "FAILED") == "COMPLETED", show(tmp_path)
  before, after = losses(tmp_path, small), losses(tmp_path, grown)
  assert (max(before), min(after), max(after)) == (saved, saved + 1, 30)
  # Two processes sum in another order, so the last printed digit may differ.
  expected = {step: float(loss) for step, loss in losses(tmp_path, uninterrupted).items()}
  both = {step: float(loss) for step, loss in (before | after).items()}
  assert both == pytest.approx(expected, rel=1e-3)


def has_reached(workspace: pathlib.Path, job: str, step: int) -> bool:
  """Returns whether process 0 of the job has printed this step or a later one."""
  if not list(workspace.glob(f"outputs/multinode/*/output-{job}-0.txt")):
    return False
  return max(losses(workspace, job), default=0) >= step


def show(workspace: pathlib.Path) -> str:
  """Returns the last lines of all output files."""
  files = [*workspace.glob("slurm-*.out"), *workspace.glob("outputs/multinode/*/*.txt")]
  return "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in files)
