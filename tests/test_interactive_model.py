"""A model in a notebook trains, predicts, scores and evaluates on examples in memory."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_tasks import PAIRS, add_task, byte_model, byte_vocabulary

from rosetta_t5.checkpoints import RestoreCheckpointConfig, SaveCheckpointConfig, all_steps
from rosetta_t5.config.binding_checks import check_required
from rosetta_t5.config.language.statements import read_program
from rosetta_t5.data.pipeline.inference_data import (
  default_preprocessors,
  get_batches_from_seqio,
  get_dataset_from_natural_text_examples,
  get_seqio_task_from_examples,
)
from rosetta_t5.data.tensorflow_import import import_seqio
from rosetta_t5.interactive import InteractiveModel
from rosetta_t5.models import DecoderOnlyModel
from rosetta_t5.networks.transformer import DecoderWrapper, TransformerConfig
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.training.optimizers.optax_wrapper import adamw
from t5x.interactive_model import T5XScriptType, get_gin_config_from_interactive_model

EXAMPLES = [{"input": question, "target": answer} for question, answer in PAIRS]
LENGTHS = {"inputs": 16, "targets": 12}


def build(folder, **arguments):
  shapes = {"encoder_input_tokens": (8, 16), "decoder_input_tokens": (8, 12)}
  given = {
    "batch_size": 8,
    "task_feature_lengths": LENGTHS,
    "output_dir": str(folder),
    "partitioner": PjitPartitioner(num_partitions=1),
    "model": byte_model(),
    "dtype": "float32",
    "restore_mode": "latest",
    "checkpoint_path": "",
    "input_shapes": shapes,
  }
  return InteractiveModel(**{**given, **arguments})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  """Before its first step; tests that train it build their own."""
  return build(tmp_path_factory.mktemp("interactive"))


@pytest.mark.slow
def test_examples_are_scored_in_their_order_whatever_their_number(model):
  scored = model.score(EXAMPLES)
  assert [example["inputs_pretokenized"].decode() for example, _ in scored] == [
    question for question, _ in PAIRS
  ]
  again = model.score(EXAMPLES[9:])
  np.testing.assert_allclose([s for _, s in again], [s for _, s in scored[9:]], rtol=1e-5)


@pytest.mark.slow
def test_texts_alone_are_predicted_and_options_reach_the_decoder(model):
  predictions, aux = model.predict_with_aux([question for question, _ in PAIRS])
  assert len(predictions) == len(aux["scores"]) == len(PAIRS)
  assert all(isinstance(text, bytes) for _, text in predictions)
  controls = {"no_repeat_ngram_size": 1, "bad_words_ids": [[106]]}
  both, aux = model.predict_with_aux(
    EXAMPLES[:2], num_decodes=2, return_all_decodes=True, decoder_params=controls
  )
  assert all(len(set(text)) == len(text) for _, texts in both for text in texts)
  assert all(worse <= best for worse, best in aux["scores"])
  assert [text.shape for _, text in both] == [(2,), (2,)]
  with pytest.raises(ValueError, match=r"InferenceType.EMBED, got 'score'"):
    model.infer_with_preprocessors("score", EXAMPLES, default_preprocessors())


@pytest.mark.slow
def test_metrics_get_texts_and_scores(model):
  seen = {}

  def accuracy(targets, predictions):
    seen["predictions"] = predictions
    return {"accuracy": sum(t == p for t, p in zip(targets, predictions, strict=True))}

  def likelihood(targets, scores):
    seen["targets"] = targets
    return {"likelihood": float(scores.mean())}

  def best(targets, predictions, aux_values):
    return {"best": max(aux_values["scores"])}

  metrics = model.evaluate(EXAMPLES, [accuracy, likelihood, best])
  assert seen["targets"] == [answer for _, answer in PAIRS]
  predictions, aux = model.predict_with_aux(EXAMPLES)
  assert seen["predictions"] == [text.decode() for _, text in predictions]
  expected = np.mean([score for _, score in model.score(EXAMPLES)])
  assert metrics == {
    "accuracy": 0,
    "likelihood": pytest.approx(expected, rel=1e-5),
    "best": max(aux["scores"]),
  }
  shout = model.evaluate_with_preprocessors(
    EXAMPLES,
    default_preprocessors(),
    [lambda targets, scores: {"first": targets[0]}],
    postprocessor=lambda text, example, is_target: (text.upper(), is_target),
  )
  assert shout == {"first": ("ANSWER 0", True)}


@pytest.mark.slow
def test_metrics_that_cannot_be_computed_are_refused(model):
  with pytest.raises(
    ValueError, match=r"A metric_fn must have the arguments \(targets.*, got \(labels\)"
  ):
    model.evaluate(EXAMPLES, [lambda labels: {}])
  with pytest.raises(ValueError, match="Two metric_fns return a metric named 'n': rename one"):
    model.evaluate(EXAMPLES, [lambda targets, scores: {"n": 1}] * 2)


@pytest.mark.slow
def test_training_on_examples_raises_their_scores_and_is_saved_and_restored(tmp_path):
  learner = byte_model()
  learner.optimizer_def = adamw(learning_rate=0.01)  # the notebook's schedule begins at 0
  model = build(tmp_path / "first", model=learner)
  first = model.score(EXAMPLES[:8])
  predictions, scores, metrics = model.train_loop(
    2,
    eval_period=2,
    train_batches=EXAMPLES[:8],
    score_batches=[EXAMPLES[:8], EXAMPLES[8:]],
    eval_batches=EXAMPLES[:8],
    metrics_fns=[lambda targets, scores: {"likelihood": float(scores.mean())}],
  )
  assert predictions is None
  assert len(scores) == 3, "those of the last batch"
  assert metrics["likelihood"] > np.mean([score for _, score in first])
  assert model.step == 2
  assert all_steps(tmp_path / "first") == [1, 2]
  assert float(jnp.asarray(model.train_summary["loss"].value)) > 0
  for again in (
    build(tmp_path / "first", model=learner),
    build(tmp_path / "second", model=learner, checkpoint_path=str(tmp_path / "first")),
  ):
    assert again.step == 2
    jax.tree.map(np.testing.assert_array_equal, again.train_state, model.train_state)


def test_a_step_that_another_session_saved_is_an_error(tmp_path):
  build(tmp_path / "start").save_checkpoint()
  start = {"checkpoint_path": str(tmp_path / "start")}
  first = build(tmp_path / "out", **start)
  first.trainer.train_state = first.train_state.replace_step(np.int32(1))
  first.save_checkpoint()
  first.save_checkpoint()  # nothing new, and no error
  second = build(tmp_path / "out", **start)
  second.trainer.train_state = second.train_state.replace_step(np.int32(1))
  with pytest.raises(ValueError, match="out/checkpoint_1 exists, from another session: give"):
    second.save_checkpoint()
  build(tmp_path / "out").save_checkpoint()  # continues the first


def test_too_few_examples_and_a_missing_checkpoint_are_refused(model, tmp_path):
  with pytest.raises(ValueError, match="a batch of 8 examples, got 3"):
    model.train_step(EXAMPLES[:3])
  with pytest.raises(
    ValueError, match=r"no checkpoint to restore in .*nowhere \(mode = 'latest'\)"
  ):
    build(tmp_path, checkpoint_path=str(tmp_path / "nowhere"))


def test_examples_of_another_kind_are_refused(model):
  tokenize = default_preprocessors()[:1]
  with pytest.raises(ValueError, match=r"an example must be a text or .* got {'inputs': 'x'}"):
    model.score([{"inputs": "x"}])
  with pytest.raises(
    ValueError, match=r"incorrect type for feature 'inputs' .*Got string, expected int32"
  ):
    get_dataset_from_natural_text_examples(EXAMPLES, [], LENGTHS, model.features)
  long = [{"input": "x" * 99, "target": ""}]
  (cut,) = get_dataset_from_natural_text_examples(long, tokenize, LENGTHS, model.features)
  assert cut["inputs"].shape == (16,)


def test_batches_are_taken_from_tasks():
  add_task("pairs_in_batches")
  batches = get_batches_from_seqio("pairs_in_batches", "test", 4, 2, shuffle=False)
  assert [[e["input"].decode() for e in batch] for batch in batches] == [
    [question for question, _ in PAIRS[:4]],
    [question for question, _ in PAIRS[4:8]],
  ]
  ((tokens,),) = get_batches_from_seqio(
    "pairs_in_batches", "test", 1, 1, get_pretokenized_examples=False, shuffle=False
  )
  assert tokens["target"] == [*byte_vocabulary().encode(PAIRS[0][1]), 1]
  with pytest.raises(ValueError, match="has only 11 examples: request fewer"):
    get_batches_from_seqio("pairs_in_batches", "test", 4, 3)
  import_seqio().TaskRegistry.remove("pairs_in_batches")


def test_examples_become_a_task(model):
  task = get_seqio_task_from_examples(
    "examples_as_a_task", model, EXAMPLES, default_preprocessors()
  )
  dataset = task.get_dataset(LENGTHS, "validation", shuffle=False)
  texts = [example["targets_pretokenized"].decode() for example in dataset.as_numpy_iterator()]
  import_seqio().TaskRegistry.remove("examples_as_a_task")
  assert texts == [answer for _, answer in PAIRS]


@pytest.mark.parametrize("script", list(T5XScriptType))
def test_gin_text_is_a_whole_configuration_of_its_run(tmp_path, script):
  restore = None
  if script is not T5XScriptType.PRETRAINING:
    restore = RestoreCheckpointConfig("runs/one", mode="latest", dtype="bfloat16")
  model = types.SimpleNamespace(
    batch_size=8,
    task_feature_lengths=LENGTHS,
    output_dir="out",
    restore_cfg=restore,
    save_cfg=SaveCheckpointConfig(keep=5, period=1000),
  )
  text = get_gin_config_from_interactive_model(
    model, script, "a_task", "", "include 't5x/examples/t5/t5_1_1/tiny.gin'", train_steps=9
  )
  path = tmp_path / "run.gin"
  path.write_text(text)
  program = read_program([str(path)])
  check_required(program)
  bound = {binding.name: binding.value for binding in program.effective_bindings().values()}
  assert bound["MIXTURE_OR_TASK_NAME"] == "a_task"
  assert bound["TASK_FEATURE_LENGTHS"] == LENGTHS
  assert (bound["utils.RestoreCheckpointConfig.path"] == "runs/one") is (restore is not None)


@pytest.mark.slow
@pytest.mark.parametrize("add_eos", [pytest.param(True, marks=pytest.mark.slow), False])
def test_add_eos_decides_whether_a_language_models_prompt_has_an_end_token(tmp_path, add_eos):
  """As in T5X, both texts have an end token or neither has; only a prompt without one continues."""
  config = TransformerConfig(
    vocab_size=384, emb_dim=16, num_heads=2, num_layers=1, head_dim=8, mlp_dim=32, dropout_rate=0.0
  )
  model = DecoderOnlyModel(DecoderWrapper(config), byte_vocabulary(), adamw(1e-3))
  shapes = dict.fromkeys(("decoder_input_tokens", "decoder_target_tokens"), (8, 28))
  interactive = build(tmp_path, model=model, input_shapes=shapes, add_eos=add_eos)
  [(_, score)] = interactive.score([{"input": "ab", "target": "cd"}])

  prompt, answer = ([3 + byte for byte in text] + [1] * add_eos for text in (b"ab", b"cd"))
  whole = prompt + answer
  batch = {
    "decoder_target_tokens": [whole],
    "decoder_input_tokens": [[0, *whole[:-1]]],
    "decoder_loss_weights": [[0] * len(prompt) + [1] * len(answer)],
    "decoder_causal_attention": [[1] * (len(prompt) + 1) + [0] * (len(answer) - 1)],
  }
  batch = {name: jnp.array(rows, jnp.int32) for name, rows in batch.items()}
  np.testing.assert_allclose(
    score, model.score_batch(interactive.train_state.params, batch)[0], rtol=1e-5
  )
