"""Sampling: greedy decoding and the distribution of samples."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from history_model import HistoryModel

from rosetta_t5.decoding import temperature_sample

EOS = 1
LENGTH = 8


def sample(model, prompts, **kwargs):
  prompts = jnp.asarray(prompts, jnp.int32)
  cache = kwargs.pop("cache", None) or model.cache(len(prompts))
  run = jax.jit(
    lambda inputs, cache: temperature_sample(
      inputs, cache, model.tokens_to_logits, EOS, cache_offset=model.offset, **kwargs
    )
  )
  return jax.device_get(run(prompts, cache))


def greedy(model, prompt, length, steps=None):
  """Returns the most probable tokens after a prompt that begins with the start token; 0 after the end."""
  tokens, given = [0], sum(t != 0 for t in prompt)
  limit = length if steps is None else min(length, given + steps)
  while len(tokens) - 1 < limit:
    forced = prompt[len(tokens)] if len(tokens) < len(prompt) else 0
    tokens.append(int(forced or np.argmax(model.log_probs(tokens))))
    if not forced and tokens[-1] == EOS:
      break
  return (tokens[1:] + [0] * length)[:length]


def log_prob_of(model, tokens, given=0):
  """Returns the log probability of the tokens after the first `given` ones, up to the end."""
  ends = tokens.index(EOS, given) + 1 if EOS in tokens[given:] else len(tokens)
  return sum(model.log_probs([0, *tokens[:i]])[tokens[i]] for i in range(given, ends))


PROMPTS = np.zeros((3, LENGTH), np.int32)
PROMPTS[1, 1:3] = [4, 3]
PROMPTS[2, 1:4] = [2, EOS, 5]  # an end within the prompt does not end the decode


@pytest.mark.one_quick_variant
@pytest.mark.parametrize(
  "kwargs", [{"temperature": 0.0, "topk": 0}, {"topk": 1}, {"temperature": 5e-5}]
)
def test_zero_temperature_or_one_candidate_is_greedy(kwargs):
  model = HistoryModel(vocab=6, length=LENGTH + 1)
  decodes, log_probs = sample(model, PROMPTS, **kwargs)
  assert decodes.shape == (3, 1, LENGTH)
  np.testing.assert_array_equal(decodes[:, 0], [greedy(model, list(p), LENGTH) for p in PROMPTS])
  np.testing.assert_array_equal(log_probs, np.zeros((3, 1)))


@pytest.mark.parametrize(("topk", "draws_noise"), [(1, False), (2, True)])
def test_one_candidate_needs_no_noise(topk, draws_noise):
  model = HistoryModel(vocab=6, length=LENGTH + 1)
  arguments = (jnp.zeros((3, LENGTH), jnp.int32), model.cache(3), model.tokens_to_logits, EOS)
  program = jax.make_jaxpr(lambda: temperature_sample(*arguments, topk=topk))()
  assert ("random_bits" in str(program)) == draws_noise


def test_log_probs_may_be_those_of_the_model():
  model = HistoryModel(vocab=6, length=LENGTH + 1)
  decodes, log_probs = sample(model, PROMPTS, temperature=0.0, topk=0, rescale_log_probs=False)
  want = [log_prob_of(model, list(d), g) for d, g in zip(decodes[:, 0], (0, 2, 3), strict=True)]
  np.testing.assert_allclose(log_probs[:, 0], want, rtol=1e-5)


def test_samples_have_the_distribution_of_the_model():
  model = HistoryModel(vocab=5, length=2)
  decodes, log_probs = sample(
    model, np.zeros((1, 1)), topk=0, num_decodes=4000, decode_rng=jax.random.key(1)
  )
  probs = np.exp(model.log_probs([0]))
  frequency = np.bincount(decodes[0, :, 0], minlength=5) / 4000
  np.testing.assert_allclose(frequency, probs, atol=4 * np.sqrt(0.25 / 4000))
  np.testing.assert_allclose(log_probs[0], np.log(probs)[decodes[0, :, 0]], rtol=1e-4)
  assert (np.diff(log_probs[0]) >= 0).all()


def test_every_step_uses_the_next_key_of_the_stream_of_t5x():
  model = HistoryModel(vocab=50, length=LENGTH + 1, eos_bias=-1e6)
  model.table[:, [0, *range(2, 50)]] = 0.0
  key = jax.random.key(5)
  decodes, _ = sample(model, np.zeros((2, LENGTH)), topk=0, decode_rng=key)
  assert all(len(set(tokens)) > 2 for tokens in decodes[:, 0])
  logits = jnp.asarray(np.stack([model.table[0]] * 2))
  first, rest = jax.random.split(key)
  np.testing.assert_array_equal(decodes[:, 0, 0], jax.random.categorical(first, logits))
  second = jax.random.categorical(jax.random.split(rest)[0], logits)
  np.testing.assert_array_equal(decodes[:, 0, 1], second)


def test_temperature_sharpens_and_its_log_probs_are_rescaled():
  model = HistoryModel(vocab=5, length=2)
  decodes, log_probs = sample(model, np.zeros((1, 1)), topk=0, temperature=0.5, num_decodes=4000)
  sharp = np.exp(2 * model.log_probs([0]))
  sharp /= sharp.sum()
  frequency = np.bincount(decodes[0, :, 0], minlength=5) / 4000
  np.testing.assert_allclose(frequency, sharp, atol=4 * np.sqrt(0.25 / 4000))
  np.testing.assert_allclose(log_probs[0], np.log(sharp)[decodes[0, :, 0]], rtol=1e-4)


@pytest.mark.one_quick_variant
@pytest.mark.parametrize(
  ("kwargs", "kept"),
  [({"topk": 2, "topp": 0.1}, 1), ({"topk": 2}, 2), ({"topk": 0, "topp": 0.7}, None)],
)
def test_top_k_and_top_p_sample_from_the_most_probable_only(kwargs, kept):
  model = HistoryModel(vocab=6, length=2, seed=3)
  decodes, log_probs = sample(model, np.zeros((1, 1)), num_decodes=500, **kwargs)
  probs = np.exp(model.log_probs([0]))
  order = np.argsort(-probs)
  kept = kept or int(np.searchsorted(np.cumsum(probs[order]), 0.7)) + 1
  assert kept < 6
  assert set(decodes[0, :, 0]) == set(order[:kept])
  want = np.log(probs / probs[order[:kept]].sum())[decodes[0, :, 0]]
  np.testing.assert_allclose(log_probs[0], want, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_top_p_of_0_samples_from_all_tokens_even_if_it_is_an_array():
  model = HistoryModel(vocab=6, length=2, seed=3)
  want, array = (
    sample(model, np.zeros((1, 1)), topk=0, topp=topp, num_decodes=50)
    for topp in (0.0, jnp.float32(0.0))
  )
  np.testing.assert_array_equal(array[0], want[0])
  np.testing.assert_array_equal(array[1], want[1])


def test_each_sequence_may_have_its_own_temperature():
  model = HistoryModel(vocab=6, length=LENGTH + 1)
  decodes, log_probs = sample(
    model, np.zeros((2, LENGTH)), topk=0, num_decodes=20, temperature=jnp.array([0.0, 1.0])
  )
  assert (decodes[0] == greedy(model, [0] * LENGTH, LENGTH)).all()
  assert len({tuple(d) for d in decodes[1]}) > 5
  assert (log_probs[0] == 0).all()
  want = [log_prob_of(model, list(d)) for d in decodes[1]]
  np.testing.assert_allclose(log_probs[1], want, rtol=1e-4)


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("steps", [1, 3, jnp.int32(3)])
def test_the_number_of_tokens_after_the_prompt_can_be_limited(steps):
  model = HistoryModel(vocab=6, length=LENGTH + 1, eos_bias=-1e6)
  decodes, _ = sample(model, PROMPTS, temperature=0.0, topk=0, max_decode_steps=steps)
  want = [greedy(model, list(p), LENGTH, int(steps)) for p in PROMPTS]
  np.testing.assert_array_equal(decodes[:, 0], want)
  whole = [sample(model, PROMPTS, topk=0, temperature=0.0, max_decode_steps=n)[0] for n in (8, 60)]
  np.testing.assert_array_equal(*whole)
  bounded, _ = sample(
    model, PROMPTS, temperature=0.0, topk=0, max_decode_steps=100, max_decode_steps_hard_limit=2
  )
  np.testing.assert_array_equal(bounded[:, 0], [greedy(model, list(p), LENGTH, 2) for p in PROMPTS])


def test_decoding_continues_each_sequence_of_a_prefilled_cache():
  model = HistoryModel(vocab=7, length=LENGTH + 1, per_sequence_index=True, eos_bias=-1e6)
  prompts = np.zeros((3, LENGTH), np.int32)
  prompts[0, 1:5] = [3, 2, 6, 5]
  prompts[2, 1:7] = [5, 4, 3, 2, 2, 3]
  index = np.array([4, 0, 6], np.int32)
  cache = model.cache(3)
  filled = np.where(np.arange(LENGTH + 1) < index[:, None], np.pad(prompts, ((0, 0), (0, 1))), 0)
  cache["layer"] |= {"cached_key": jnp.asarray(filled), "cache_index": jnp.asarray(index)}
  positions = []

  def note_positions(state):
    jax.debug.callback(positions.append, state.cur_index)
    return state

  decodes, _ = sample(
    model,
    prompts,
    cache=cache,
    temperature=0.0,
    topk=0,
    initial_index=jnp.asarray(index),
    num_decodes=2,
    state_callback_fn=note_positions,
  )
  jax.effects_barrier()
  # A full sequence stays at the position after its end, where the loop writes discarded tokens.
  assert np.max(positions) == LENGTH + 1
  want = [greedy(model, list(p), LENGTH) for p in prompts]
  np.testing.assert_array_equal(decodes[:, 0], want)
  np.testing.assert_array_equal(decodes[:, 1], want)


def test_the_batch_is_the_second_dimension_of_scanned_layers():
  model = HistoryModel(vocab=6, length=LENGTH + 1, offset=1)
  decodes, _ = sample(model, PROMPTS, temperature=0.0, topk=0, num_decodes=3)
  for i, prompt in enumerate(PROMPTS):
    assert (decodes[i] == greedy(model, list(prompt), LENGTH)).all()


def test_a_callback_changes_the_logits():
  model = HistoryModel(vocab=6, length=LENGTH + 1)

  def only_3_then_end(logits, state):
    token = jnp.where(state.step < 2, 3, EOS)
    return jnp.where(jnp.arange(6) == token, logits, -1e6)

  decodes, _ = sample(model, np.zeros((2, LENGTH)), topk=0, logit_callback_fn=only_3_then_end)
  assert (decodes == [3, 3, EOS, 0, 0, 0, 0, 0]).all()


def test_a_callback_changes_the_state_before_each_step_and_at_the_end():
  model = HistoryModel(vocab=6, length=LENGTH + 1, eos_bias=-1e6)

  def force_5(state):
    is_even = (state.cur_index % 2 == 0)[:, None]
    return state.replace(
      cur_token=jnp.where(is_even, 5, state.cur_token), log_prob=state.log_prob + 1.0
    )

  decodes, log_probs = sample(
    model, np.zeros((1, LENGTH)), temperature=0.0, topk=0, state_callback_fn=force_5
  )
  tokens = [0]
  for i in range(LENGTH):
    seen = [5 if j % 2 == 0 else t for j, t in enumerate(tokens)]
    tokens.append(int(np.argmax(model.log_probs(seen))))
    assert len(tokens) == i + 2
  np.testing.assert_array_equal(decodes[0, 0], tokens[1:])
  assert log_probs == LENGTH + 1


def test_contradictory_arguments_are_refused():
  model = HistoryModel(vocab=6, length=LENGTH + 1)
  with pytest.raises(ValueError, match=r"topp=0.5 has no effect with topk=1.*: set topk=0"):
    sample(model, PROMPTS, topp=0.5)
