"""Predictions and scores include the fraction of each example's tokens that no expert computed."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scalable_trees import scalable
from tiny_models import (
  DECODER_ONLY,
  T5_1_1,
  decoder_only_params,
  make_batch,
  make_decoder_only_model,
  make_model,
  variables,
)

from rosetta_t5.decoding import temperature_sample
from rosetta_t5.export.functions import (
  create_inference_function,
  load_stablehlo,
  write_stablehlo,
)
from rosetta_t5.inference import get_infer_fn
from rosetta_t5.inference.infer_fn import check_buckets, inference_step, notes_on_tokens_left_behind
from rosetta_t5.inference.text_inference import InferenceType, TextInference
from rosetta_t5.models import EncoderDecoderModel
from rosetta_t5.networks.transformer import Transformer
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.training import InferenceState

# Each row of ten tokens has four slots.
FEW_SLOTS = dataclasses.replace(T5_1_1, num_experts=4, expert_layer_period=1, expert_capacity=1)
MODEL = make_model(Transformer(FEW_SLOTS))
VARIABLES = variables(Transformer(FEW_SLOTS))
PARAMS = VARIABLES["params"]
BATCH = make_batch()


@functools.cache
def left_behind_in_encoder():
  """Returns the fraction of each row's inputs, from what the layer sows for this row alone."""

  @jax.jit
  def fraction(row):
    _, sown = MODEL.score_batch(PARAMS, row, return_intermediates=True)
    return sown["encoder"]["layers_0"]["mlp"]["fraction_tokens_left_behind"][0]

  rows = [{name: x[n : n + 1] for name, x in BATCH.items()} for n in range(8)]
  return np.array([fraction(row) for row in rows])


@pytest.mark.slow
@pytest.mark.parametrize(
  ("model", "options"),
  [
    (MODEL, {"num_decodes": 2}),
    (make_model(MODEL.module, decode_fn=temperature_sample), {"rng": jax.random.PRNGKey(0)}),
  ],
  ids=["beams", "sampling"],
)
def test_predictions_include_the_fraction_of_their_inputs(model, options):
  predict = functools.partial(model.predict_batch_with_aux, **options)
  _, aux = jax.jit(predict)(PARAMS, BATCH)
  assert left_behind_in_encoder().max() > left_behind_in_encoder().min() > 0
  np.testing.assert_allclose(aux["tokens_left_behind"], left_behind_in_encoder(), rtol=1e-6)


@pytest.mark.slow
def test_scanned_layers_count_too():
  module = Transformer(scalable(FEW_SLOTS, scan_layers=True))
  predict = make_model(module).predict_batch_with_aux
  _, aux = jax.eval_shape(predict, variables(module)["params"], BATCH)
  assert aux["tokens_left_behind"].shape == (8,)


@pytest.mark.slow
def test_predictions_of_a_decoder_include_the_fraction_of_their_prompts():
  config = DECODER_ONLY.replace(num_experts=2, expert_capacity=1)
  prompts = jnp.array([[0, 5, 6, 7, 8, 9, 0, 0], [0, 4, 0, 0, 0, 0, 0, 0]])
  mask = jnp.array([[1] * 6 + [0, 0], [1, 1] + [0] * 6])
  batch = {"decoder_input_tokens": prompts, "decoder_causal_attention": mask}
  predict = make_decoder_only_model(config).predict_batch_with_aux
  _, aux = jax.jit(predict)(decoder_only_params(config), batch)
  # Two experts have a slot each: of six tokens, at least four have none; of two, at most one.
  assert 4 / 6 <= aux["tokens_left_behind"][0] < 1
  assert aux["tokens_left_behind"][1] <= 1 / 2


@pytest.mark.slow
def test_every_way_of_inference_over_a_dataset_has_the_fraction():
  state, partitioner = InferenceState.create(VARIABLES), PjitPartitioner(num_partitions=1)
  rows = [{name: np.asarray(x[n]) for name, x in BATCH.items()} for n in range(8)]
  axes = partitioner.get_mesh_axes(state)
  for method in ("predict_batch", "score_batch", "predict_batch_with_aux"):
    infer = get_infer_fn(inference_step(MODEL, method), 8, axes, partitioner)
    _, aux = infer(enumerate(rows), state)
    assert set(aux) - {"tokens_left_behind"} == ({"scores"} if "aux" in method else set())
    if method != "score_batch":
      np.testing.assert_allclose(aux["tokens_left_behind"], left_behind_in_encoder(), rtol=1e-6)
  scored = functools.partial(MODEL.score_batch, return_intermediates=True)
  got = jax.jit(inference_step(MODEL, "score_batch"))(PARAMS, BATCH)
  np.testing.assert_allclose(got[0], jax.jit(scored)(PARAMS, BATCH)[0], rtol=1e-6)


@pytest.mark.slow
def test_a_text_has_the_same_score_alone_and_beside_a_long_text():
  import seqio

  vocabulary = seqio.ByteVocabulary()
  config = dataclasses.replace(FEW_SLOTS, vocab_size=384, expert_capacity=None)
  module = Transformer(config)
  model = EncoderDecoderModel(module, vocabulary, vocabulary, None)
  state, partitioner = InferenceState.create(variables(module)), PjitPartitioner(num_partitions=1)
  axes = partitioner.get_mesh_axes(state)
  texts = TextInference(model, partitioner, axes, 8, {"inputs": 64, "targets": 8})
  short, long = ({"input": text, "target": "b"} for text in ("aaaaaa", "c" * 60))
  preprocessors = [seqio.preprocessors.tokenize, seqio.preprocessors.append_eos]

  def score(*examples):
    return texts.infer(InferenceType.SCORE, examples, preprocessors, state)[0][0][1]

  np.testing.assert_allclose(score(short), score(short, long), rtol=1e-6)


def test_lengths_that_change_the_slots_are_refused():
  with pytest.raises(
    ValueError, match=r"experts, because an expert has fewer slots .*set it to \(\)"
  ):
    check_buckets((8, 16), MODEL)
  assert check_buckets((), MODEL) == ()


def test_a_note_says_how_many_tokens_and_what_to_set():
  (note,) = notes_on_tokens_left_behind({"tokens_left_behind": [0.1, 0.3]})
  assert note.startswith("no expert computed 20.00% of the tokens")
  assert "set a higher eval_capacity_factor" in note
  assert not list(notes_on_tokens_left_behind({"tokens_left_behind": [0.0]}))
  assert not list(notes_on_tokens_left_behind({"scores": [1.0]}))


@pytest.mark.slow
def test_the_last_result_of_an_exported_model_is_the_fraction(tmp_path):
  (batch,) = jax.export.symbolic_shape("b")
  shapes = {n: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for n, x in BATCH.items()}
  function = create_inference_function(model=MODEL, inference_mode="predict")
  write_stablehlo(tmp_path / "stablehlo", function, jax.device_get(PARAMS), shapes)
  decodes, scores, left_behind = load_stablehlo(tmp_path / "stablehlo")(BATCH)
  assert (decodes.shape, scores.shape) == ((8, 6), (8,))
  np.testing.assert_allclose(left_behind, left_behind_in_encoder(), rtol=1e-6)
