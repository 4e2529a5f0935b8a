"""The decoder-only model: loss, scores, and decodes that continue the inputs."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import (
  DECODER_ONLY,
  VOCAB,
  decoder_only_params,
  logits_of,
  make_decoder_only_model,
)

from rosetta_t5 import decoding
from rosetta_t5.models.decoder_only import remove_prefix

LENGTH = 10
INPUTS = ([5, 9, 3], [7, 2, 8, 4, 6, 3], [4, 4])
TARGETS = ([11, 12, 1], [13, 1], [14, 15, 16, 17, 1])
PARAMS = decoder_only_params(DECODER_ONLY)


def features(inputs, targets):
  """Returns the unpacked batch that SeqIO's PrefixLMFeatureConverter makes of examples."""
  rows = {name: np.zeros((len(inputs), LENGTH), np.int32) for name in ("target", "mask", "weight")}
  for row, (given, wanted) in enumerate(zip(inputs, targets, strict=True)):
    end = len(given) + len(wanted)
    rows["target"][row, :end] = [*given, *wanted]
    rows["mask"][row, : len(given) + 1] = 1
    rows["weight"][row, len(given) : end] = 1
  return {
    "decoder_target_tokens": jnp.asarray(rows["target"]),
    "decoder_input_tokens": jnp.asarray(np.pad(rows["target"], ((0, 0), (1, 0)))[:, :-1]),
    "decoder_causal_attention": jnp.asarray(rows["mask"]),
    "decoder_loss_weights": jnp.asarray(rows["weight"]),
  }


BATCH = features(INPUTS, TARGETS)


make = make_decoder_only_model
SCORE = jax.jit(make().score_batch)


@functools.cache
def logits_fn(is_prefix):
  """Returns a function from a batch to its logits with teacher forcing."""

  def logits(batch):
    hidden = () if is_prefix else ("decoder_causal_attention",)
    return logits_of(make().module, PARAMS, {n: x for n, x in batch.items() if n not in hidden})

  return jax.jit(logits)


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("is_prefix", [True, False])
def test_loss_and_scores_exclude_the_inputs(is_prefix):
  model = make(inputs_bidirectional_attention=is_prefix)
  logits = np.asarray(logits_fn(is_prefix)(BATCH), np.float64)
  log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  expected = np.zeros(3)
  for row, (given, wanted) in enumerate(zip(INPUTS, TARGETS, strict=True)):
    expected[row] = sum(log_probs[row, len(given) + i, token] for i, token in enumerate(wanted))
  loss, metrics = jax.jit(model.eval_fn)(PARAMS, BATCH)
  np.testing.assert_allclose(loss, -expected.sum(), rtol=1e-5)
  assert metrics["accuracy"].count == 10
  np.testing.assert_allclose(jax.jit(model.score_batch)(PARAMS, BATCH), expected, rtol=1e-5)


@pytest.mark.slow
def test_chunked_scores_equal_those_of_all_logits():
  chunked = make(loss_chunk_length=3)  # ten positions: the last chunk is not full
  program, whole = (f.lower(PARAMS, BATCH) for f in (jax.jit(chunked.score_batch), SCORE))
  all_logits = f"3x{LENGTH}x{VOCAB}xf32"
  assert all_logits in whole.as_text()
  assert all_logits not in program.as_text()
  np.testing.assert_allclose(program.compile()(PARAMS, BATCH), SCORE(PARAMS, BATCH), rtol=1e-6)
  _, sown = jax.jit(functools.partial(chunked.score_batch, return_intermediates=True))(
    PARAMS, BATCH
  )
  assert sown["decoder"]["token_scores"][0].shape == (3, LENGTH)


@pytest.mark.slow
def test_chunked_scores_give_padding_probability_0_too():
  config = DECODER_ONLY.replace(padding_never_follows=True)
  chunked, whole = (make(config, loss_chunk_length=n) for n in (4, None))
  scores = jax.jit(chunked.score_batch)(PARAMS, BATCH)
  np.testing.assert_allclose(scores, jax.jit(whole.score_batch)(PARAMS, BATCH), rtol=1e-6)
  assert np.all(np.asarray(scores) > np.asarray(SCORE(PARAMS, BATCH)))


def greedy_by_teacher_forcing(is_prefix):
  """Returns the most probable continuations, computed with a full forward pass per token."""
  found = [list(given) for given in INPUTS]
  for _ in range(LENGTH):
    batch = features([f[:LENGTH] for f in found], [[]] * 3)
    batch["decoder_causal_attention"] = BATCH["decoder_causal_attention"]
    # The next token's position must not be padding, or it would not be computed.
    targets = np.array(batch["decoder_target_tokens"])
    for row, tokens in enumerate(found):
      targets[row, len(tokens) : len(tokens) + 1] = 2
    logits = logits_fn(is_prefix)(batch | {"decoder_target_tokens": jnp.asarray(targets)})
    for row, tokens in enumerate(found):
      if len(tokens) < LENGTH and 1 not in tokens:
        tokens.append(int(np.argmax(logits[row, len(tokens)])))
  rows = [tokens[len(given) :] for tokens, given in zip(found, INPUTS, strict=True)]
  return np.array([row + [0] * (LENGTH - len(row)) for row in rows])


GREEDY = functools.partial(decoding.temperature_sample, temperature=0.0)


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("is_prefix", [True, False])
def test_greedy_decodes_continue_inputs_of_different_lengths(is_prefix):
  model = make(decode_fn=GREEDY, inputs_bidirectional_attention=is_prefix)
  predict = jax.jit(model.predict_batch)
  expected = greedy_by_teacher_forcing(is_prefix)
  np.testing.assert_array_equal(predict(PARAMS, BATCH), expected)
  others = features(INPUTS, ([20, 1], [21, 22, 1], [1]))
  np.testing.assert_array_equal(predict(PARAMS, others), expected)  # the targets are ignored
  assert predict._cache_size() == 1, "one program for all batches"


@pytest.mark.slow
def test_samples_are_sorted_by_log_probability_with_the_best_last():
  model = make(
    decode_fn=functools.partial(decoding.temperature_sample, topk=0, rescale_log_probs=False)
  )
  predict = functools.partial(model.predict_batch_with_aux, num_decodes=4, return_all_decodes=True)
  tokens_BNT, aux = jax.jit(predict)(PARAMS, BATCH, jax.random.PRNGKey(3))
  scores_BN = np.asarray(aux["scores"])
  assert tokens_BNT.shape == (3, 4, LENGTH)
  assert np.all(np.diff(scores_BN, axis=1) >= 0)
  for number in range(4):
    rows = [[int(t) for t in row if t] for row in tokens_BNT[:, number]]
    scores = SCORE(PARAMS, features(INPUTS, rows))
    np.testing.assert_allclose(scores_BN[:, number], scores, rtol=1e-4)
  best, best_aux = jax.jit(model.predict_batch_with_aux, static_argnames="num_decodes")(
    PARAMS, BATCH, jax.random.PRNGKey(3), num_decodes=4
  )
  np.testing.assert_array_equal(best, tokens_BNT[:, -1])
  np.testing.assert_array_equal(best_aux["scores"], scores_BN[:, -1])


@pytest.mark.slow
def test_beam_search_continues_the_inputs_too():
  model = make(decode_fn=decoding.beam_search)
  predict = functools.partial(model.predict_batch_with_aux, num_decodes=3, return_all_decodes=True)
  tokens_BNT, aux = jax.jit(predict)(PARAMS, BATCH)
  for number in range(3):
    rows = [[int(t) for t in row if t] for row in tokens_BNT[:, number]]
    likelihood = np.asarray(SCORE(PARAMS, features(INPUTS, rows)))
    ends = [len(given) + len(row) for given, row in zip(INPUTS, rows, strict=True)]
    ended = np.array([1 in row for row in rows])
    penalty = np.where(ended, ((5 + np.array(ends)) / 6) ** 0.6, 1.0)
    np.testing.assert_allclose(aux["scores"][:, number], likelihood / penalty, rtol=1e-4)


def test_batches_that_do_not_mark_the_inputs_are_refused():
  batch = {n: v for n, v in BATCH.items() if n != "decoder_causal_attention"}
  text = "must have decoder_causal_attention, which distinguishes inputs from targets"
  with pytest.raises(ValueError, match=text):
    jax.eval_shape(make().predict_batch, PARAMS, batch)
  with pytest.raises(ValueError, match=text):
    jax.eval_shape(make(inputs_bidirectional_attention=True).eval_fn, PARAMS, batch)


def test_a_decode_function_without_initial_index_is_refused():
  def decode(inputs, cache, tokens_to_logits, eos_id, num_decodes):
    raise AssertionError("must not be called")

  text = "the decode function decode needs an argument initial_index"
  with pytest.raises(ValueError, match=re.escape(text)):
    jax.eval_shape(make(decode_fn=decode).predict_batch, PARAMS, BATCH)


def test_prefixes_are_removed_from_one_decode_or_several():
  sequences = jnp.array([[1, 2, 3, 4, 5, 0], [6, 7, 8, 9, 0, 0]])
  lengths = jnp.array([2, 4])
  expected = np.array([[3, 4, 5, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
  np.testing.assert_array_equal(remove_prefix(sequences, lengths), expected)
  twice = remove_prefix(jnp.stack([sequences] * 2, axis=1), lengths)
  np.testing.assert_array_equal(twice, np.stack([expected] * 2, axis=1))


def test_initial_variables_have_the_axes_that_sharding_needs():
  shapes = {"decoder_input_tokens": (2, 4)}
  variables = jax.eval_shape(
    functools.partial(make().get_initial_variables, input_shapes=shapes), jax.random.PRNGKey(0)
  )
  assert variables.keys() == {"params", "params_axes"}
  assert jax.tree.structure(variables["params"].unfreeze()) == jax.tree.structure(PARAMS)
