"""The encoder-decoder model: loss, scores and the call of the decode function."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import (
  DECODER_ONLY,
  T5_1_1,
  VOCAB,
  Bigram,
  decoder_only_params,
  exchange_padding,
  logits_of,
  make_batch,
  make_decoder_only_model,
  make_model,
  params_of,
  variables,
  with_padding,
)

from rosetta_t5.decoding import DecodingState, beam_search, temperature_sample
from rosetta_t5.models.base_model import get_input_vocabulary, get_output_vocabulary
from rosetta_t5.models.encoder_decoder import DecoderParams
from rosetta_t5.networks.transformer import Transformer
from rosetta_t5.training.losses import SpecialLossNormalizingFactor as Special
from rosetta_t5.training.step import accumulate_gradients
from rosetta_t5.training.train_state import TrainState

BATCH = make_batch(4)
TOKENS = [name for name in BATCH if name.endswith("_tokens")]
TABLE = variables(Bigram())["params"]["table"]


def token_losses(smoothing=0.0, z_loss=0.0):
  """Returns each target's loss and z-loss with the bigram table, in float64."""
  logits = np.asarray(TABLE, np.float64)[np.asarray(BATCH["decoder_input_tokens"])]
  lse = np.log(np.exp(logits).sum(-1))
  off = smoothing / (VOCAB - 1)
  wanted = np.where(np.eye(VOCAB)[BATCH["decoder_target_tokens"]] > 0, 1 - smoothing, off)
  entropy = -(wanted * np.log(np.maximum(wanted, 1e-30))).sum(-1)
  cross_entropy = -(wanted * (logits - lse[..., None])).sum(-1) - entropy
  return cross_entropy + z_loss * lse**2, z_loss * lse**2


REAL = np.asarray(BATCH["decoder_target_tokens"]) > 0


def loss_of(batch, **arguments):
  loss, metrics = make_model(Bigram(), **arguments).loss_fn({"table": TABLE}, batch, None)
  return float(loss), metrics


@pytest.mark.parametrize(
  ("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.01), (0.2, 0.01)]
)
def test_loss_is_the_sum_over_weighted_targets(smoothing, z_loss):
  loss, metrics = loss_of(BATCH, label_smoothing=smoothing, z_loss=z_loss)
  expected, expected_z = (terms[REAL].sum() for terms in token_losses(smoothing, z_loss))
  assert loss == pytest.approx(expected, rel=1e-6)
  assert float(metrics["z_loss"].compute()) == pytest.approx(expected_z, rel=1e-6)
  assert float(metrics["cross_ent_loss"].compute()) == pytest.approx(loss - expected_z, rel=1e-6)


def test_without_weights_padding_counts_unless_a_special_factor_excludes_it():
  unweighted = {name: BATCH[name] for name in BATCH if name != "decoder_loss_weights"}
  terms, _ = token_losses()
  assert loss_of(unweighted)[0] == pytest.approx(terms.sum(), rel=1e-6)
  special = loss_of(unweighted, loss_normalizing_factor="NUM_REAL_TARGET_TOKENS")[0]
  assert special == pytest.approx(terms[REAL].mean(), rel=1e-6)


def per_sequence(rows):
  weights = REAL[rows] / REAL[rows].sum(1, keepdims=True)
  return weights, weights.sum()


# The weights of some rows of the batch, and their divisor, for each factor.
FACTORS = {
  None: lambda rows: (REAL[rows], 1.0),
  7.0: lambda rows: (REAL[rows], 7.0),
  "NUM_REAL_TARGET_TOKENS": lambda rows: (REAL[rows], REAL[rows].sum()),
  "num_total_target_tokens": lambda rows: (REAL[rows], REAL[rows].size),
  Special.AVERAGE_PER_SEQUENCE: per_sequence,
}


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_each_microbatch_is_divided_by_its_own_factor_and_the_parts_are_summed(
  factor, num_microbatches
):
  model = make_model(Bigram(), loss_normalizing_factor=factor)
  state = TrainState.create(model.optimizer_def, variables(Bigram()))
  run = functools.partial(accumulate_gradients, model.loss_fn, num_microbatches=num_microbatches)
  _, loss, metrics, _ = jax.jit(run)(state, BATCH, jax.random.PRNGKey(0))
  parts = [FACTORS[factor](rows) for rows in np.split(np.arange(4), num_microbatches)]
  losses = np.split(token_losses()[0], num_microbatches)
  expected = sum((part * w).sum() / norm for part, (w, norm) in zip(losses, parts, strict=True))
  assert float(loss) == pytest.approx(expected, rel=1e-5)
  assert float(metrics["loss"].compute()) == pytest.approx(expected, rel=1e-5)


def test_an_unknown_factor_is_refused_when_the_model_is_built():
  with pytest.raises(
    ValueError, match=r"'NUM_REAL_TOKENS' \(did you mean 'NUM_REAL_TARGET_TOKENS'"
  ):
    make_model(Bigram(), loss_normalizing_factor="NUM_REAL_TOKENS")


def test_the_score_is_the_log_likelihood_of_the_targets_without_padding():
  model = make_model(Bigram())
  expected = -(token_losses()[0] * REAL).sum(1)
  np.testing.assert_allclose(model.score_batch({"table": TABLE}, BATCH), expected, rtol=1e-5)
  unweighted = {name: BATCH[name] for name in BATCH if name != "decoder_loss_weights"}
  scores, sown = model.score_batch({"table": TABLE}, unweighted, return_intermediates=True)
  np.testing.assert_allclose(scores, expected, rtol=1e-5)
  assert sown.keys() == {"decoder"}
  (of_tokens,) = sown["decoder"]["token_scores"]
  np.testing.assert_allclose(of_tokens, -token_losses()[0] * REAL, rtol=1e-5)
  np.testing.assert_array_equal(sown["decoder"]["loss_weights"][0], REAL)
  np.testing.assert_array_equal(sown["decoder"]["target_tokens"][0], BATCH["decoder_target_tokens"])


@pytest.fixture(scope="module")
def decodes():
  """Four beams of each example, best last, with their scores."""
  model = make_model(default_decoder_params=DecoderParams(num_decodes=4, return_all_decodes=True))
  decode = functools.partial(model.predict_batch_with_aux, params_of(T5_1_1))
  tokens, aux = jax.jit(decode)(BATCH)
  return np.asarray(tokens), np.asarray(aux["scores"])


@pytest.mark.slow
def test_scores_of_decodes_are_those_of_teacher_forcing_with_beam_search_s_length_penalty(decodes):
  tokens_BNT, scores_BN = decodes
  assert tokens_BNT.shape == (4, 4, 6)
  assert np.all(np.diff(scores_BN, axis=1) >= 0), "best last"
  targets = tokens_BNT.reshape(16, 6)
  batch = {
    "encoder_input_tokens": jnp.repeat(BATCH["encoder_input_tokens"], 4, axis=0),
    "decoder_input_tokens": jnp.asarray(np.pad(targets, ((0, 0), (1, 0)))[:, :-1]),
    "decoder_target_tokens": jnp.asarray(targets),
  }
  log_likelihood = jax.jit(make_model().score_batch)(params_of(T5_1_1), batch)
  # Wu et al., 2016, with alpha = 0.6; the end token counts.
  ended = np.any(targets == 1, axis=1) & (scores_BN.reshape(16) > -1e6)
  penalty = ((5 + np.argmax(targets == 1, axis=1) + 1) / 6) ** 0.6
  assert ended.sum() >= 8
  np.testing.assert_allclose(
    scores_BN.reshape(16)[ended], (log_likelihood / penalty)[ended], rtol=1e-4
  )


@pytest.mark.slow
@pytest.mark.parametrize("decode_fn", [beam_search, temperature_sample])
def test_decodes_are_the_same_if_padding_is_another_token(decode_fn):
  def decoded(pad_id):
    model = make_model(Transformer(T5_1_1.replace(pad_id=pad_id)), decode_fn=decode_fn)
    params = with_padding(params_of(T5_1_1), pad_id)
    batch = {name: exchange_padding(BATCH[name], pad_id) for name in TOKENS}
    tokens, aux = jax.jit(model.predict_batch_with_aux)(params, batch)
    return exchange_padding(np.asarray(tokens), pad_id), aux["scores"]

  (want, want_scores), (got, scores) = decoded(0), decoded(5)
  assert len(np.unique(want)) > 4
  np.testing.assert_array_equal(got, want)
  np.testing.assert_allclose(scores, want_scores, rtol=1e-5)


@pytest.mark.slow
def test_a_step_of_beam_search_neither_moves_nor_copies_the_keys_and_values():
  model = make_model()
  decode = jax.jit(functools.partial(model.predict_batch_with_aux, num_decodes=3))
  text = decode.lower(params_of(T5_1_1), BATCH).compile().as_text()
  # Each layer has one key and one value for 4 examples with 3 beams, 4 heads of size 4, 6 positions.
  kept = r"f32\[(?:12|4,3),4,(?:4,6|6,4)\]"
  bodies = [part for part in re.split(r"\n(?=%|ENTRY)", text) if "dynamic-update-slice" in part]
  (step,) = [
    part for part in bodies if len(re.findall(rf"= {kept}\S* get-tuple-element", part)) == 2
  ]
  made = re.findall(rf"= {kept}\S* ([\w-]+)\((.*)", step)
  written = [rest for operation, rest in made if operation != "get-tuple-element"]
  assert len(written) == 2, "each is written once, in place"
  assert all("dynamic_update_slice" in rest for rest in written), written


@pytest.mark.one_quick_variant
@pytest.mark.parametrize(
  ("model", "params", "kernels"),
  [
    (make_model(), params_of(T5_1_1), 10),
    (make_decoder_only_model(), decoder_only_params(DECODER_ONLY), 2 * 7 + 1),
  ],
  ids=["encoder-decoder", "decoder-only"],
)
def test_every_projection_of_a_step_uses_its_precomputed_kernel(model, params, kernels):
  batch = BATCH | {"decoder_causal_attention": jnp.zeros((4, 6), jnp.int32).at[:, :2].set(1)}
  text = jax.jit(model.predict_batch_with_aux).lower(params, batch).as_text()
  # The matmuls of few rows are [outputs, rows]; those of encoder and prompts are [rows, outputs].
  matmuls = re.findall(r"optimization_barrier %\S+ : tensor<\d+x4(?:x1)?xf32>", text)
  assert len(matmuls) == kernels


def arguments_of_decode_fn(**options):
  """Returns the arguments that `predict_batch_with_aux` passes to its decode_fn, without computing."""
  given = {}

  def decode(**arguments):
    given.update(arguments)
    shape = (*arguments["inputs"].shape[:1], arguments["num_decodes"], 6)
    decodes = jnp.broadcast_to(jnp.arange(shape[1])[None, :, None], shape)
    return decodes, decodes[..., 0].astype(jnp.float32)

  model = make_model(decode_fn=decode)
  predict = functools.partial(model.predict_batch_with_aux, params_of(T5_1_1), **options)
  decoded, aux = jax.eval_shape(predict, BATCH)
  return given, decoded.shape, aux["scores"].shape


def test_the_decode_function_receives_the_end_token_and_the_options_of_the_caller():
  given, decodes, scores = arguments_of_decode_fn(
    num_decodes=3, rng=jax.random.PRNGKey(0), decoder_params={"alpha": 0.5, "topk": 7}
  )
  assert (given["eos_id"], given["num_decodes"], given["alpha"], given["topk"]) == (1, 3, 0.5, 7)
  assert (decodes, scores) == ((4, 6), (4,))
  assert given["decode_rng"] is not None
  given, decodes, scores = arguments_of_decode_fn(num_decodes=3, return_all_decodes=True)
  assert (decodes, scores) == ((4, 3, 6), (4, 3))
  assert "decode_rng" not in given


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("prompted", [True, False])
def test_targets_begin_the_decodes_only_on_request(prompted):

  def decode(inputs, cache, tokens_to_logits, eos_id, num_decodes):
    return inputs[:, None], jnp.zeros((inputs.shape[0], 1))

  model = make_model(decode_fn=decode)
  predict = functools.partial(model.predict_batch_with_aux, prompt_with_targets=prompted)
  got = jax.jit(predict)(params_of(T5_1_1), BATCH)[0]
  expected = BATCH["decoder_input_tokens"] if prompted else jnp.zeros((4, 6), jnp.int32)
  np.testing.assert_array_equal(got, expected)


def test_the_end_token_of_a_prompt_is_removed():
  def decode(inputs, cache, tokens_to_logits, eos_id, num_decodes):
    return inputs[:, None], jnp.zeros((inputs.shape[0], 1))

  prompts = jnp.array([[0, 5, 6, 1, 0, 0], [0, 1, 0, 0, 0, 0]] * 2)
  model = make_model(decode_fn=decode)
  predict = functools.partial(model.predict_batch_with_aux, prompt_with_targets=True)
  decodes, _ = jax.jit(predict)(params_of(T5_1_1), BATCH | {"decoder_input_tokens": prompts})
  np.testing.assert_array_equal(decodes, np.where(prompts == 1, 0, prompts))


class Scanned(Transformer):
  """A network with the attribute of T5X's scanned ones."""

  @property
  def scan_layers(self):
    return True


@pytest.mark.slow
def test_a_custom_decode_function_receives_only_arguments_that_it_accepts():
  def plain(inputs, cache, tokens_to_logits, eos_id, num_decodes):
    logits, _ = tokens_to_logits(
      DecodingState(jnp.int32(0), inputs, jnp.zeros((4, 1), jnp.int32), cache)
    )
    return jnp.argmax(logits, -1)[:, None, None], jnp.max(logits, -1)[:, None]

  predict = jax.jit(make_model(decode_fn=plain).predict_batch_with_aux)
  tokens, aux = predict(params_of(T5_1_1), BATCH, rng=jax.random.PRNGKey(0))
  logits = jax.jit(logits_of, static_argnums=0)(Transformer(T5_1_1), params_of(T5_1_1), BATCH)[:, 0]
  np.testing.assert_array_equal(tokens[:, 0], np.argmax(logits, -1))
  np.testing.assert_allclose(aux["scores"], np.max(logits, -1), rtol=1e-5)
  scanned = make_model(Scanned(T5_1_1), decode_fn=plain)
  with pytest.raises(ValueError, match=r"function plain needs an argument cache_offset"):
    jax.eval_shape(functools.partial(scanned.predict_batch, params_of(T5_1_1)), BATCH)


def test_the_decode_function_receives_the_batch_dimension_of_a_scanned_cache():
  given = {}

  def decode(**arguments):
    given.update(arguments)
    return jnp.zeros((4, 1, 6), jnp.int32), jnp.zeros((4, 1))

  for module, offset in ((Scanned(T5_1_1), 1), (Transformer(T5_1_1), 0)):
    model = make_model(module, decode_fn=decode)
    jax.eval_shape(functools.partial(model.predict_batch, params_of(T5_1_1)), BATCH)
    assert given["cache_offset"] == offset


@pytest.mark.one_quick_variant
@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    ({"decoder_params": {"alhpa": 0.5}}, r"\(did you mean 'alpha'\?\): it accepts inputs, cache, "),
    (
      {"decoder_params": {"decode_rng": jax.random.PRNGKey(0)}, "rng": jax.random.PRNGKey(1)},
      r"Got RNG both from the `rng` argument .* Please specify one or the other",
    ),
  ],
)
def test_unknown_options_of_the_decode_function_are_refused(arguments, text):
  predict = functools.partial(make_model().predict_batch_with_aux, params_of(T5_1_1), **arguments)
  with pytest.raises(ValueError, match=text):
    jax.eval_shape(predict, BATCH)


@pytest.mark.slow
def test_one_program_serves_all_batches_of_a_shape_and_traced_options():
  model = make_model(decode_fn=functools.partial(beam_search, alpha=0.0))
  predict = jax.jit(
    lambda batch, alpha: model.predict_batch_with_aux(
      params_of(T5_1_1), batch, decoder_params={"alpha": alpha, "eos_id": 3}, num_decodes=2
    )
  )
  tokens, aux = predict(BATCH, 0.0)
  _, others = predict(make_batch(4, seed=1), 1.0)
  assert predict._cache_size() == 1
  assert not np.allclose(aux["scores"], others["scores"])
  ends = [list(row).index(3) for row in np.asarray(tokens) if 3 in row]
  assert ends, "the end token is that of decoder_params"
  for row, end in zip([r for r in np.asarray(tokens) if 3 in r], ends, strict=True):
    assert not row[end + 1 :].any()


def test_the_model_has_the_given_vocabularies_and_converter():
  model = make_model()
  assert get_input_vocabulary(model) is model.input_vocabulary
  assert get_output_vocabulary(model) is model.output_vocabulary
  assert model.FEATURE_CONVERTER_CLS is object
