"""Evaluation of one checkpoint, a list, or all of a folder; each once, with a table at the end."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import jax.numpy as jnp
import pytest
from limited_memory import limited_memory
from tiny_tasks import add_task, byte_model, save_checkpoints

from rosetta_t5 import checkpoints, data
from rosetta_t5.data.tensorflow_import import import_seqio
from rosetta_t5.eval import evaluate
from rosetta_t5.out_of_memory import OutOfMemoryError
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.telemetry.console import format_metrics_table
from rosetta_t5.training import Trainer

TASK = "pairs_to_evaluate"
STEPS = (3, 7)


def likelihood(targets, scores):
  return {"likelihood": float(scores.mean())}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
  """Checkpoints of two steps."""
  add_task(TASK, metric_fns=[likelihood])
  folder = tmp_path_factory.mktemp("run")
  save_checkpoints(folder, STEPS)
  yield folder
  import_seqio().TaskRegistry.remove(TASK)


def run(path, output_dir, mode="specific", **arguments):
  def config(**fields):
    given = {"task_feature_lengths": None, "split": "test", "batch_size": 8, "shuffle": False}
    return data.DatasetConfig(**{"mixture_or_task_name": TASK, **given, "seed": 0, **fields})

  given = {
    "model": byte_model(),
    "dataset_cfg": config(**arguments.pop("dataset", {})),
    "restore_checkpoint_cfg": checkpoints.RestoreCheckpointConfig(path, mode=mode),
    "partitioner": PjitPartitioner(num_partitions=1),
    "output_dir": str(output_dir),
    "summarize_config_fn": lambda model_dir, summary_writer, step: None,
  }
  return evaluate(**{**given, **arguments})


def logged(output_dir):
  path = output_dir / f"inference_eval/{TASK}-metrics.jsonl"
  return {row["step"]: row["likelihood"] for row in map(json.loads, path.read_text().splitlines())}


@pytest.mark.slow
def test_all_checkpoints_are_evaluated_once(model_dir, tmp_path, capsys):
  own = shutil.copytree(model_dir, tmp_path / "run")
  shutil.move(own / "checkpoint_7", tmp_path / "checkpoint_7")
  out = tmp_path / "out"
  first = run(str(own), out, mode="all")
  assert list(first) == [3]
  shutil.move(tmp_path / "checkpoint_7", own / "checkpoint_7")
  capsys.readouterr()
  second = run(str(own), out, mode="all")
  assert list(second) == [7]
  likelihoods = {**first, **second}
  assert logged(out) == {step: likelihoods[step][TASK]["likelihood"] for step in STEPS}
  assert likelihoods[3] != likelihoods[7]
  output = capsys.readouterr().out
  assert f"skipped, because they have been evaluated before: {own}/checkpoint_3" in output
  assert f"{TASK}  step  examples  likelihood\n" in output
  assert f"results  {out}/inference_eval" in output
  assert (out / f"eval.{TASK}.ckpt").read_text().split() == [
    f"{own}/checkpoint_3",
    f"{own}/checkpoint_7",
  ]
  assert "Total number of parameters" in (out / "model-info.txt").read_text()
  with pytest.raises(
    ValueError, match=r"has results of the split 'test', with which those of 'valid"
  ):
    run(str(own), out, mode="all", dataset={"split": "validation"})


@pytest.mark.slow
def test_a_second_checkpoint_of_a_step_is_refused_instead_of_replacing_results(model_dir, tmp_path):
  save_checkpoints(tmp_path / "other", STEPS[:1])
  paths = [str(folder / f"checkpoint_{STEPS[0]}") for folder in (model_dir, tmp_path / "other")]
  with pytest.raises(ValueError, match=r"other/checkpoint_3 has step 3, like another checkpoint"):
    run(paths, tmp_path / "out")
  (line,) = map(json.loads, (tmp_path / "out/results.jsonl").read_text().splitlines())
  assert line["checkpoint"] == paths[0]


def test_loss_is_evaluated_with_a_trainer_class(model_dir, tmp_path, capsys):
  seen = []

  class Watched(Trainer):
    def eval(self, batch_iters):
      seen.append(super().eval(batch_iters))
      return seen[-1]

  results = run(
    [str(model_dir / "checkpoint_7"), str(model_dir / "checkpoint_3")],
    tmp_path,
    dataset={"task_feature_lengths": {"inputs": 16, "targets": 16}},
    training_evaluator_cls=Watched,
    train_eval_get_dataset_fn=functools.partial(data.get_training_eval_datasets, eval_steps=1),
  )
  assert list(results) == [7, 3]
  losses = [float(jnp.asarray(values[TASK]["loss"].value)) for values in seen]
  assert len(losses) == 2
  assert losses[0] != losses[1]
  assert f"evaluation at step 7  {TASK}  loss " in capsys.readouterr().out
  assert list((tmp_path / "training_eval" / TASK).glob("events*"))


@pytest.mark.slow
def test_out_of_memory_error_of_evaluation_suggests_what_to_change(model_dir, tmp_path):
  large = {"task_feature_lengths": {"inputs": 4096, "targets": 16}, "batch_size": 1024}
  with limited_memory(10 << 30), pytest.raises(OutOfMemoryError) as raised:
    run(str(model_dir / "checkpoint_7"), tmp_path, dataset=large)
  output = str(raised.value)
  assert output.startswith("a device is out of memory: RESOURCE_EXHAUSTED: Out of memory")
  assert "TASK_FEATURE_LENGTHS: smaller numbers" in output


@pytest.mark.one_quick_variant
@pytest.mark.parametrize(
  ("path", "mode", "text"),
  [
    ("", "all", "there is no checkpoint to restore in .*CHECKPOINT_PATH"),
    (
      "checkpoint_5",
      "specific",
      r"checkpoint_5 \(mode = 'specific'\): there is no such file or folder\. Set .*CHECKPOINT_PATH",
    ),
    ("", "specific", r"/empty \(mode = 'specific'\): the folder is empty\. Set .*CHECKPOINT_PATH"),
  ],
)
def test_missing_checkpoints_are_reported_before_anything_is_written(
  model_dir, tmp_path, path, mode, text
):
  (tmp_path / "empty").mkdir()
  with pytest.raises(ValueError, match=text):
    run(str(tmp_path / "empty" / path), tmp_path / "out", mode=mode)
  assert not (tmp_path / "out").exists()


def test_one_missing_checkpoint_is_reported_before_the_others_are_evaluated(model_dir, tmp_path):
  paths = [str(model_dir / f"checkpoint_{step}") for step in (3, 5)]
  with pytest.raises(
    ValueError, match=r"no checkpoint to restore in \S+/checkpoint_5 .*CHECKPOINT_PATH"
  ):
    run(paths, tmp_path / "out")
  assert not (tmp_path / "out").exists()


def test_batch_size_zero_is_rejected(model_dir, tmp_path):
  with pytest.raises(ValueError, match=r"batch size 0 cannot be split over the 8 devices"):
    run(str(model_dir / "checkpoint_3"), tmp_path / "out", dataset={"batch_size": 0})
  assert not (tmp_path / "out").exists()


def broken(targets, predictions):
  raise KeyError("no_such_field")


@pytest.mark.slow
def test_the_error_of_a_metric_names_the_task(model_dir, tmp_path):
  add_task("pairs_with_a_broken_metric", metric_fns=[broken])
  names = {"dataset": {"mixture_or_task_name": "pairs_with_a_broken_metric"}}
  text = "^Failed to evaluate task pairs_with_a_broken_metric: 'no_such_field'"
  with pytest.raises(ValueError, match=text):
    run(str(model_dir / "checkpoint_3"), tmp_path / "out", **names)
  import_seqio().TaskRegistry.remove("pairs_with_a_broken_metric")


def test_task_without_metrics_is_rejected_before_anything_is_written(model_dir, tmp_path):
  add_task("pairs_not_to_evaluate")
  with pytest.raises(ValueError, match="'pairs_not_to_evaluate' has no task with metrics for the"):
    run(str(model_dir), tmp_path / "out", dataset={"mixture_or_task_name": "pairs_not_to_evaluate"})
  import_seqio().TaskRegistry.remove("pairs_not_to_evaluate")
  assert not (tmp_path / "out").exists()


def test_table_has_a_block_per_task_a_row_per_step_and_a_column_per_metric():
  metrics = {
    2000: {"squad": {"em": 81.25, "f1": 88.123456}, "mnli": {"accuracy": 83.0}},
    1000: {"squad": {"em": 7.5}},
  }
  assert format_metrics_table(metrics) == (
    "squad  step     em      f1\n"
    "       1000    7.5\n"
    "       2000  81.25  88.123\n"
    "mnli  step  accuracy\n"
    "      2000        83"
  )


@pytest.mark.slow
def test_two_processes_write_the_same_files_as_one(model_dir, tmp_path):
  here = pathlib.Path(__file__).parent
  flags = {"PYTHONPATH": f"{here}:{here.parent}", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = str(free.getsockname()[1])

  def start(out, *group):
    script = [sys.executable, here / "evaluate/one_of_several.py", model_dir / "checkpoint_3"]
    return subprocess.Popen(
      [*script, tmp_path / out, *group], env={**os.environ, **flags}, stderr=subprocess.PIPE
    )

  processes = [start("two", port, "2", str(index)) for index in (0, 1)]
  processes.append(start("one"))
  output = [process.communicate(timeout=600)[1].decode() for process in processes]
  assert [process.returncode for process in processes] == [0, 0, 0], output

  def written(out):
    files = sorted((tmp_path / out / "inference_eval").glob("*.jsonl"))
    return {path.name: list(map(json.loads, path.read_text().splitlines())) for path in files}

  one, two = written("one"), written("two")
  assert one.keys() == two.keys()
  (metrics,) = one.pop("pairs_of_several_processes-metrics.jsonl")
  assert two.pop("pairs_of_several_processes-metrics.jsonl") == [pytest.approx(metrics, rel=1e-5)]
  assert metrics["examples"] == metrics["predictions"]
  for name, rows in one.items():
    assert len(rows) == metrics["examples"]
    assert len({json.dumps(row["input"]) for row in rows}) == len(rows)
    assert [row["input"] for row in two[name]] == [row["input"] for row in rows]
    assert [row.get("prediction") for row in two[name]] == [row.get("prediction") for row in rows]
