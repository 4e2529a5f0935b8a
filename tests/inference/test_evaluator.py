"""Evaluation by inference: metrics receive each example once, and files contain what they received."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_tasks import PAIRS, add_task, byte_model

from rosetta_t5.checkpoints import TrainStateInitializer
from rosetta_t5.data import DatasetConfig
from rosetta_t5.data.tensorflow_import import import_seqio
from rosetta_t5.inference.evaluation import InferenceEvaluator, plain_numbers
from rosetta_t5.parallel import PjitPartitioner

seen = {}


def exact(targets, predictions):
  seen["predictions"] = targets, predictions
  return {"exact": sum(t == p for t, p in zip(targets, predictions, strict=True))}


def likelihood(targets, scores):
  seen["scores"] = targets, scores
  return {"likelihood": import_seqio().metrics.Scalar(float(np.mean(scores)))}


def confidence(targets, predictions, aux_values):
  seen["aux"] = targets, predictions, aux_values
  return {"confidence": float(np.mean(aux_values["scores"]))}


@pytest.fixture(scope="module")
def task():
  add_task("pairs_with_metrics", metric_fns=[exact, likelihood, confidence])
  add_task("pairs_without_metrics")
  add_task("pairs_with_scores", metric_fns=[likelihood])
  import_seqio().MixtureRegistry.add(
    "pairs_mixture", [("pairs_with_metrics", 1), ("pairs_without_metrics", 1)]
  )
  yield "pairs_with_metrics"
  import_seqio().MixtureRegistry.remove("pairs_mixture")
  for name in ("pairs_with_metrics", "pairs_with_scores"):
    import_seqio().TaskRegistry.remove(name)
  import_seqio().TaskRegistry.remove("pairs_without_metrics")


def config(name, **fields):
  given = {"task_feature_lengths": None, "split": "test", "batch_size": 8, "shuffle": False}
  return DatasetConfig(name, **{**given, "seed": 0, **fields})


@pytest.fixture(scope="module")
def evaluated(task, tmp_path_factory):
  """The evaluator after one evaluation at step 0, its folder, its metrics, the state."""
  folder, model, partitioner = tmp_path_factory.mktemp("eval"), byte_model(), PjitPartitioner(1)
  evaluator = InferenceEvaluator(config(task), None, model, partitioner, log_dir=folder)
  shapes = {name: (8, *shape) for name, shape in evaluator.model_feature_shapes.items()}
  initializer = TrainStateInitializer(None, model.get_initial_variables, shapes, partitioner)
  state = initializer.from_scratch(jax.random.PRNGKey(0))
  metrics = evaluator.evaluate(state, initializer.train_state_axes).result()
  return evaluator, folder / "inference_eval", metrics, model, state


def batch_of(model):
  """Returns all examples as one batch, without SeqIO."""
  inputs, targets = (
    [[*model.input_vocabulary.encode(text), 1] for text in side]
    for side in zip(*PAIRS, strict=True)
  )

  def padded(rows):
    return np.array([row + [0] * (max(map(len, rows)) - len(row)) for row in rows], np.int32)

  targets_BT = padded(targets)
  batch = {
    "encoder_input_tokens": padded(inputs),
    "decoder_input_tokens": np.pad(targets_BT, ((0, 0), (1, 0)))[:, :-1],
    "decoder_target_tokens": targets_BT,
    "decoder_loss_weights": (targets_BT > 0).astype(np.int32),
  }
  return jax.tree.map(jnp.asarray, batch)


@pytest.mark.slow
def test_metrics_see_every_example_once_with_the_models_outputs(evaluated):
  evaluator, _, metrics, model, state = evaluated
  texts = [target for _, target in PAIRS]
  assert seen["predictions"][0] == seen["scores"][0] == seen["aux"][0] == texts
  batch = batch_of(model)
  scores = jax.jit(model.score_batch)(state.params, batch)
  np.testing.assert_allclose(seen["scores"][1], scores, rtol=1e-4)
  decodes, aux = jax.jit(model.predict_batch_with_aux)(state.params, batch)
  decoded = [model.output_vocabulary.decode(row) for row in np.asarray(decodes).tolist()]
  assert seen["predictions"][1] == seen["aux"][1] == decoded
  np.testing.assert_allclose(seen["aux"][2]["scores"], aux["scores"], rtol=1e-4)
  samples = [("pairs_with_metrics", *pair, decoded[n].rstrip()) for n, pair in enumerate(PAIRS[:2])]
  assert [(*x[:3], x[3].rstrip()) for x in evaluator.samples(2)] == samples
  assert set(metrics["pairs_with_metrics"]) == {"exact", "likelihood", "confidence"}


def test_files_contain_metrics_and_every_prediction(evaluated):
  _, folder, metrics, _, _ = evaluated
  task_metrics = metrics["pairs_with_metrics"]
  (line,) = (folder / "pairs_with_metrics-metrics.jsonl").read_text().splitlines()
  assert json.loads(line) == {
    "step": 0,
    "exact": task_metrics["exact"],
    "likelihood": task_metrics["likelihood"].value,
    "confidence": task_metrics["confidence"],
  }
  rows = [
    json.loads(line)
    for line in (folder / "pairs_with_metrics-000000.jsonl").read_text().splitlines()
  ]
  assert [row["target"] for row in rows] == [target for _, target in PAIRS]
  assert [row["prediction"] for row in rows] == seen["predictions"][1]
  assert list((folder / "pairs_with_metrics").glob("events*"))


def test_lengths_that_are_not_set_are_those_of_the_longest_example(evaluated):
  evaluator = evaluated[0]
  assert evaluator.model_feature_shapes["encoder_input_tokens"] == (len("question 100") + 1,)
  assert evaluator.model_feature_shapes["decoder_target_tokens"] == (len("answer 10") + 1,)


@pytest.mark.slow
def test_batches_of_short_inputs_are_computed_at_a_short_length(evaluated):
  model, state = byte_model(), evaluated[-1]
  lengths, score = [], model.score_batch

  def recorded(params, batch):
    lengths.append(batch["encoder_input_tokens"].shape[1])  # This runs only during compilation.
    return score(params, batch)

  model.score_batch = recorded
  cfg, partitioner = config("pairs_with_scores"), PjitPartitioner(1)
  evaluator = InferenceEvaluator(cfg, None, model, partitioner, input_length_buckets=[12])
  evaluator.evaluate(state, partitioner.get_mesh_axes(state)).result()
  assert lengths == [12, 13], "the longest question is in the second batch"
  np.testing.assert_allclose(seen["scores"][1], score(state.params, batch_of(model)), rtol=1e-4)


def test_tasks_without_metrics_are_left_out(task):
  def tasks(name):
    return InferenceEvaluator(config(name), None, byte_model(), PjitPartitioner(1)).eval_tasks

  assert [t.name for t in tasks("pairs_mixture")] == ["pairs_with_metrics"]
  assert tasks("pairs_without_metrics") == []


@pytest.mark.parametrize(
  ("fields", "text"),
  [
    ({"pack": True}, "infer_eval/utils.DatasetConfig.pack must be False.*'pairs_with_metrics'"),
    ({"split": "testing"}, "no split 'testing'; it has 'test', 'train', 'validation'"),
    ({"batch_size": 6}, "batch size 6 cannot be split over the 8 devices"),
    ({"use_cached": True}, "no offline cache, but USE_CACHED_TASKS = True"),
  ],
)
def test_data_that_cannot_be_evaluated_is_refused(task, fields, text):
  with pytest.raises(ValueError, match=text):
    InferenceEvaluator(config(task, **fields), None, byte_model(), PjitPartitioner(1))


def test_metrics_that_are_not_numbers_are_left_out():
  seqio = import_seqio()
  metrics = {"t": {"a": 1, "b": seqio.metrics.Scalar(2.5), "c": seqio.metrics.Text("x"), "d": "y"}}
  metrics["t"][3] = 4  # a class id, as some metrics name their values
  assert plain_numbers(metrics) == {"t": {"a": 1.0, "b": 2.5, "3": 4.0}}
  assert plain_numbers(None) == {}
