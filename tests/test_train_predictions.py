"""Predictions are evaluated during training: when, with which parameters, and who sees them."""

from __future__ import annotations

import functools
import json
import re

import jax.numpy as jnp
import pytest
from tiny_tasks import PAIRS, add_task, byte_model

from rosetta_t5.checkpoints import CheckpointConfig, SaveCheckpointConfig, all_steps
from rosetta_t5.data import DatasetConfig
from rosetta_t5.data.tensorflow_import import import_seqio
from rosetta_t5.inference.evaluation import PredictionEvaluation
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.train import train
from rosetta_t5.training import Trainer
from rosetta_t5.training.actions import ActionMode, BaseAction
from rosetta_t5.user_errors import exit_on_user_error

TASK = "pairs_of_a_run"


def likelihood(targets, scores):
  return {"likelihood": float(scores.mean())}


def broken(targets, scores):
  raise KeyError("the metric is broken")


@pytest.fixture(scope="module", autouse=True)
def tasks():
  add_task(TASK, metric_fns=[likelihood])
  add_task("pairs_without_a_metric")
  add_task("pairs_with_a_broken_metric", metric_fns=[broken])
  yield
  for name in (TASK, "pairs_without_a_metric", "pairs_with_a_broken_metric"):
    import_seqio().TaskRegistry.remove(name)


class Record(BaseAction):
  """Records the metrics; stops training after `patience` evaluations."""

  def __init__(self, patience=99):
    self.shown, self._patience = [], patience

  def run(self, train_state, metrics_by_task):
    self.shown.append((int(train_state.step), metrics_by_task))
    return len(self.shown) >= self._patience


def run(model_dir, infer_eval_task=TASK, infer_eval=None, train_eval=False, **arguments):
  """Trains for two steps with an evaluation before the first and after each."""

  def config(name, **fields):
    lengths = {"inputs": 16, "targets": 16}
    given = {"task_feature_lengths": lengths, "split": "train", "batch_size": 8, "shuffle": False}
    return DatasetConfig(name, **{**given, "seed": 0, **fields})

  given = {
    "model": byte_model(),
    "train_dataset_cfg": config(TASK, pack=True),
    "train_eval_dataset_cfg": config(TASK, pack=True, split="test") if train_eval else None,
    "infer_eval_dataset_cfg": config(
      infer_eval_task, task_feature_lengths=None, split="validation", **(infer_eval or {})
    ),
    "checkpoint_cfg": CheckpointConfig(),
    "partitioner": PjitPartitioner(num_partitions=1),
    "trainer_cls": functools.partial(
      Trainer, learning_rate_fn=lambda step: jnp.float32(0.1), num_microbatches=None
    ),
    "model_dir": str(model_dir),
    "total_steps": 2,
    "eval_steps": 1,
    "eval_period": 1,
    "random_seed": 0,
    "summarize_config_fn": lambda model_dir, writer, step: None,
    "run_eval_before_training": True,
  }
  return train(**{**given, **arguments})


def logged(model_dir):
  path = model_dir / f"inference_eval/{TASK}-metrics.jsonl"
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_predictions_are_evaluated_before_training_and_at_each_period(tmp_path, capsys):
  action = Record()
  run(tmp_path, train_eval=True, actions={ActionMode.INFER_EVAL: [action]})
  rows = logged(tmp_path)
  assert [row["step"] for row in rows] == [0, 1, 2]
  values = [row["likelihood"] for row in rows]
  assert values[0] < values[1] < values[2], "the model learns these very pairs"
  # Metrics are computed while training continues: actions see them one evaluation later.
  assert action.shown == [
    (step, {TASK: {"likelihood": value}}) for step, value in zip((1, 2, 2), values, strict=True)
  ]
  output = capsys.readouterr().out
  for row in rows:
    assert (
      f"predictions at step {row['step']}  {TASK}  likelihood {row['likelihood']:.4g}" in output
    )
  # The metric needs only scores, so the first examples of the held-out batches are predicted too.
  samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
  assert [(row["step"], row["input"], row["target"]) for row in samples] == [
    (step, *pair) for step in range(3) for pair in PAIRS[:3]
  ]
  assert samples[0]["prediction"] != samples[6]["prediction"]
  for row in samples:
    assert f"samples at step {row['step']}  {TASK}\n  input      {PAIRS[0][0]}\n" in output


@pytest.mark.slow
def test_an_action_on_predictions_ends_the_run_at_once_where_metrics_are_waited_for(tmp_path):
  action = Record(patience=2)
  actions = {ActionMode.INFER_EVAL: [action]}
  steps, _ = run(tmp_path, total_steps=9, concurrent_metrics=False, actions=actions)
  assert steps == 1
  assert [step for step, _ in action.shown] == [0, 1]


def evaluation(name, **fields):
  """Returns the evaluation that a run makes of its `infer_eval_dataset_cfg`."""
  given = {"task_feature_lengths": None, "split": "validation", "batch_size": 8, "shuffle": False}
  cfg = DatasetConfig(name, **{**given, "seed": 0, **fields})
  partitioner = PjitPartitioner(num_partitions=1)
  return PredictionEvaluation(cfg, None, byte_model(), partitioner, "unused", None)


def test_a_task_without_metrics_is_reported(capsys):
  evaluation("pairs_without_a_metric").wait_until_read()
  output = capsys.readouterr().out
  assert "no predictions are evaluated: 'pairs_without_a_metric' has no metrics for the s" in output


@pytest.mark.parametrize(
  ("fields", "text"),
  [
    ({"pack": True}, "DatasetConfig.pack must be False"),
    ({"batch_size": 6}, "batch size 6 cannot be spl"),
  ],
)
def test_data_that_cannot_be_evaluated_is_refused_when_the_run_waits_for_it(fields, text):
  with pytest.raises(ValueError, match=text):
    evaluation(TASK, **fields).wait_until_read()


@pytest.mark.slow
def test_data_that_cannot_be_evaluated_is_refused_before_the_first_step(tmp_path):
  action = Record()
  with pytest.raises(ValueError, match="pack must be False"):
    run(tmp_path, infer_eval={"pack": True}, actions={ActionMode.TRAIN: [action]})
  assert action.shown == []


@pytest.mark.slow
def test_training_continues_if_the_task_has_no_metrics(tmp_path):
  steps, _ = run(tmp_path, "pairs_without_a_metric")
  assert steps == 2
  assert not (tmp_path / "inference_eval").exists()


@pytest.mark.slow
def test_a_metric_that_fails_ends_the_run_with_its_line_and_keeps_the_last_step(tmp_path, capsys):
  checkpoint_cfg = CheckpointConfig(save=SaveCheckpointConfig())
  with pytest.raises(SystemExit), exit_on_user_error():
    run(
      tmp_path,
      "pairs_with_a_broken_metric",
      run_eval_before_training=False,
      eval_period=0,
      checkpoint_cfg=checkpoint_cfg,
    )
  output = capsys.readouterr().err
  assert "task pairs_with_a_broken_metric: 'the metric is broken'\n  KeyError in " in output
  assert re.search(
    r"_predictions\.py, line \d+:  raise KeyError\(.the metric is broken.\)\n", output
  )
  assert all_steps(tmp_path) == [0, 2]


@pytest.mark.slow
def test_a_model_that_cannot_predict_trains_without_samples(tmp_path, capsys):
  def decode(*args, **kwargs):
    raise NotImplementedError("this decode function is not written yet")

  steps, _ = run(tmp_path, train_eval=True, model=byte_model(decode_fn=decode))
  assert steps == 2
  assert (
    capsys.readouterr().out.count("no sample predictions: NotImplementedError: this decod") == 1
  )
