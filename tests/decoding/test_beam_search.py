"""Beam search, compared with an exhaustive search and with a plain beam search in Python."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import freeze
from flax.linen.partitioning import axis_rules
from history_model import HistoryModel
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rosetta_t5.decoding.beam_search import beam_init, beam_search, brevity_penalty

EOS = 1


def penalty(length, alpha=0.6):
  return ((5 + length) / 6) ** alpha


def all_finished(model, length, alpha=0.6):
  """Returns (score, tokens) of every sequence that ends within `length` tokens, the best last."""
  found = []
  for count in range(1, length + 1):
    for body in itertools.product([t for t in range(model.vocab) if t != EOS], repeat=count - 1):
      tokens = [*body, EOS]
      log_prob = sum(model.log_probs([0, *tokens[:i]])[t] for i, t in enumerate(tokens))
      found.append((log_prob / penalty(count, alpha), tokens + [0] * (length - count)))
  return sorted(found)


def plain_beam_search(model, prompt, length, beams, alpha=0.6, steps=None, start=0):
  """Searches one sequence with lists; `prompt` has the start token. Returns [(score, tokens)], best last."""
  live, finished = [(0.0, prompt[: start + 1])], []
  end = length if steps is None else min(length, start + steps)
  for index in range(start, end):
    candidates = []
    forced = prompt[index + 1] if index + 1 < len(prompt) else 0
    for log_prob, tokens in live:
      scores = model.log_probs(tokens)
      candidates += [(log_prob + scores[t], [*tokens, t]) for t in range(model.vocab)]
    candidates = sorted(candidates, reverse=True)[: 2 * beams]
    if forced:
      candidates = [(0.0, [*candidates[0][1][:-1], forced])]
    live = [c for c in candidates if c[1][-1] != EOS][:beams]
    ended = [(c[0] / penalty(index + 1, alpha), c[1]) for c in candidates if c[1][-1] == EOS]
    finished = sorted(finished + ended, reverse=True)[:beams]
    best_live = max((c[0] for c in live), default=-1e7) / penalty(length + 1, alpha)
    if len(finished) == beams and finished[-1][0] > best_live:
      break
  chosen = finished or live
  return [(s, (t[1:] + [0] * length)[:length]) for s, t in reversed(chosen)]


def search(model, prompts, **kwargs):
  cache = model.cache(len(prompts))
  run = jax.jit(
    lambda inputs, cache: beam_search(
      inputs, cache, model.tokens_to_logits, EOS, cache_offset=model.offset, **kwargs
    )
  )
  return jax.device_get(run(jnp.asarray(prompts, jnp.int32), cache))


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_a_wide_enough_beam_search_finds_the_best_of_all_sequences(alpha):
  model = HistoryModel(vocab=4, length=5)
  decodes, scores = search(model, np.zeros((1, 4)), num_decodes=64, alpha=alpha)
  want = all_finished(model, 4, alpha)
  assert len(want) == 40
  # The search stops when nothing can enter a full set; a set of 64 is never full.
  np.testing.assert_allclose(scores[0, -40:], [score for score, _ in want], rtol=1e-5)
  np.testing.assert_array_equal(decodes[0, -40:], [tokens for _, tokens in want])
  assert (scores[0, :-40] < -1e6).all()


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("beams", [1, 2, 4])
@pytest.mark.parametrize("offset", [0, 1])
def test_narrow_beams_equal_the_plain_search(beams, offset):
  model = HistoryModel(vocab=7, length=13, offset=offset, eos_bias=1.0)
  prompts = np.zeros((5, 12), np.int32)
  prompts[1, 1:4] = [3, 2, 6]
  prompts[2, 1] = 4
  prompts[3, 1:6] = [5, 5, 5, 2, 2]
  decodes, scores = search(model, prompts, num_decodes=beams)
  for i, prompt in enumerate(prompts):
    want = plain_beam_search(model, list(prompt), 12, beams)
    np.testing.assert_allclose(scores[i, -len(want) :], [s for s, _ in want], rtol=1e-5)
    np.testing.assert_array_equal(decodes[i, -len(want) :], [tokens for _, tokens in want])
  assert (decodes[1, :, :3] == [3, 2, 6]).all()


def test_the_first_state_of_a_users_own_search_is_at_position_0():
  cache = {"cached_key": jnp.zeros((2, 5)), "cache_index": jnp.int32(0)}
  state = beam_init(2, 3, 5, cache, initial_index=jnp.array([0, 1]))
  assert state.cur_index.shape == state.cache["cache_index"].shape == ()
  assert state.cache["cached_key"].shape == (2, 3, 5)


def test_live_sequences_are_returned_if_none_has_ended():
  model = HistoryModel(vocab=8, length=7, eos_bias=-1e6)
  decodes, scores = search(model, np.zeros((2, 6)), num_decodes=3)
  want = plain_beam_search(model, [0] * 6, 6, 3)
  np.testing.assert_allclose(scores, [[s for s, _ in want]] * 2, rtol=1e-5)
  np.testing.assert_array_equal(decodes, [[t for _, t in want]] * 2)


@pytest.mark.slow
def test_the_search_stops_once_no_live_sequence_can_win():
  # With this model the search can stop long before the end of its 30 positions.
  model = HistoryModel(vocab=5, length=31, eos_bias=4.0)
  seen = []

  def counted(state):
    jax.debug.callback(lambda index: seen.append(int(index)), state.cur_index)
    return model.tokens_to_logits(state)

  decodes, _ = beam_search(
    jnp.zeros((2, 30), jnp.int32), model.cache(2), counted, EOS, num_decodes=2
  )
  jax.effects_barrier()
  assert len(seen) < 20
  np.testing.assert_array_equal(
    decodes[0], [t for _, t in plain_beam_search(model, [0] * 30, 30, 2)]
  )


def test_the_search_continues_while_a_longer_sequence_could_win():
  # With this model, a bound that ignored the longer sequence's larger penalty would stop too early.
  model = HistoryModel(vocab=5, length=13, seed=4, eos_bias=1.0)
  decodes, _ = search(model, np.zeros((1, 12)), num_decodes=2)
  want = plain_beam_search(model, [0] * 12, 12, 2)
  np.testing.assert_array_equal(decodes[0], [tokens for _, tokens in want])


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("eos_bias", [0.5, -1e6])
def test_decoding_continues_each_sequence_of_a_prefilled_cache(eos_bias):
  model = HistoryModel(vocab=7, length=13, per_sequence_index=True, eos_bias=eos_bias)
  prompts = np.zeros((3, 12), np.int32)
  prompts[0, 1:5] = [3, 2, 6, 5]
  prompts[2, 1:9] = [5, 4, 3, 2, 2, 3, 4, 6]
  index = np.array([4, 0, 8], np.int32)
  start = jnp.asarray(index)
  cache = model.cache(3)
  filled = np.where(np.arange(13) < index[:, None], np.pad(prompts, ((0, 0), (0, 1))), 0)
  cache["layer"] |= {"cached_key": jnp.asarray(filled), "cache_index": jnp.asarray(index)}
  decodes, scores = jax.jit(
    lambda cache: beam_search(
      jnp.asarray(prompts), cache, model.tokens_to_logits, EOS, num_decodes=3, initial_index=start
    )
  )(jax.tree.map(jnp.asarray, cache))
  for i, prompt in enumerate(prompts):
    want = plain_beam_search(model, list(prompt), 12, 3, start=index[i])
    np.testing.assert_allclose(scores[i, -len(want) :], [s for s, _ in want], rtol=1e-5)
    np.testing.assert_array_equal(decodes[i, -len(want) :], [tokens for _, tokens in want])


def test_the_number_of_steps_can_be_limited():
  model = HistoryModel(vocab=5, length=13, eos_bias=-1e6)
  decodes, scores = search(model, np.zeros((1, 12)), num_decodes=2, max_decode_step=3)
  want = plain_beam_search(model, [0] * 12, 12, 2, steps=3)
  np.testing.assert_array_equal(decodes[0], [t for _, t in want])
  np.testing.assert_allclose(scores[0], [s for s, _ in want], rtol=1e-5)
  assert (decodes[0, :, 3:] == 0).all()


def test_low_probabilities_can_end_the_search():
  model = HistoryModel(vocab=5, length=13, eos_bias=-1e6)
  bound = plain_beam_search(model, [0] * 12, 12, 2, steps=4)[-1][0]
  decodes, _ = search(model, np.zeros((1, 12)), num_decodes=2, min_log_prob=bound)
  np.testing.assert_array_equal(
    decodes[0], [t for _, t in plain_beam_search(model, [0] * 12, 12, 2, steps=4)]
  )


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("max_decode_len", [4, 12])
def test_decodes_may_be_shorter_or_longer_than_the_inputs(max_decode_len):
  model = HistoryModel(vocab=5, length=13, eos_bias=-1.0)
  prompts = np.zeros((1, 8), np.int32)
  prompts[0, 1:3] = [4, 3]
  decodes, _ = search(model, prompts, num_decodes=2, max_decode_len=max_decode_len)
  assert decodes.shape == (1, 2, max_decode_len)
  want = plain_beam_search(model, list(prompts[0]), max_decode_len, 2)
  np.testing.assert_array_equal(decodes[0], [t for _, t in want])


def test_caches_may_be_frozen():
  model = HistoryModel(vocab=5, length=7)
  inputs = jnp.zeros((1, 6), jnp.int32)
  run = jax.jit(lambda i, c: beam_search(i, c, model.tokens_to_logits, EOS, num_decodes=2))
  thawed, frozen = (run(inputs, cache)[0] for cache in (model.cache(1), freeze(model.cache(1))))
  np.testing.assert_array_equal(frozen, thawed)


@pytest.mark.slow
@pytest.mark.parametrize("rules", [[("batch", "data")], [("batch", None)]])
def test_a_batch_split_over_devices_is_not_gathered(rules):
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

  def split(x):
    return jax.device_put(x, NamedSharding(mesh, P("data") if x.ndim > 1 else P()))

  model = HistoryModel(vocab=6, length=9)
  inputs, cache = jnp.zeros((8, 8), jnp.int32), model.cache(8)
  want = jax.jit(lambda i, c: beam_search(i, c, model.tokens_to_logits, EOS))(inputs, cache)
  args = jax.tree.map(split, (inputs, cache))
  with jax.set_mesh(mesh), axis_rules(rules):
    run = jax.jit(lambda i, c: beam_search(i, c, model.tokens_to_logits, EOS))
    text = run.lower(*args).compile().as_text()
    got = run(*args)
  moved = re.findall(r"\[([\d,]+)\]\S* (?:all-gather|all-to-all|collective-permute)\(", text)
  # By default XLA gathers what top_k chooses from: all continuations, the best 8, and 4 + 8 finished
  # ones.
  assert set(moved) == ({"8,24", "8,8", "8,12"} if rules == [("batch", None)] else set())
  np.testing.assert_array_equal(got[0], want[0])
  np.testing.assert_array_equal(got[1], want[1])


def test_brevity_penalty_is_that_of_wu_et_al():
  np.testing.assert_allclose(brevity_penalty(0.6, 7), 2**0.6, rtol=1e-6)
