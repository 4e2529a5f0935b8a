"""Beam search with a brevity penalty, as in T5X and flax (after Wu et al. 2016, arXiv:1609.08144)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from flax.core import unfreeze
from jaxtyping import Array, Float, Int

from rosetta_t5.argument_types import NonNegative, Positive, PositiveNumber
from rosetta_t5.decoding import beams, next_token

# The default of `min_log_prob`: the search never ends early.
NEG_INF_VALUE = float(next_token.NEG_INF)


class BeamState(struct.PyTreeNode):
  """The loop's state; beams are sorted, the best last.

  Attributes:
    cur_index: int32 position of the newest token: a scalar, or [batch] if the cache was prefilled.
    live_logprobs: [batch, beam] log probabilities of the unfinished sequences.
    finished_scores: [batch, beam] log probabilities over the brevity penalty.
    live_seqs: [batch, beam, length + 1] unfinished sequences; position 0 is the start token.
    finished_seqs: [batch, beam, length + 1] finished sequences.
    finished_flags: [batch, beam] whether an entry of `finished_seqs` is a finished sequence.
    cache: the model's cache of the unfinished sequences; [batch · beam] in the loop.
    initial_index: [batch] the position where decoding started; None for position 0.
  """

  cur_index: jax.Array
  live_logprobs: jax.Array
  finished_scores: jax.Array
  live_seqs: jax.Array
  finished_seqs: jax.Array
  finished_flags: jax.Array
  cache: Any
  initial_index: jax.Array | None = None


class _Candidates(NamedTuple):
  """The best continuations of the live beams, the best first: 2·beams of them with one end token.

  Each live beam has one continuation that ends for each end token. There are as many candidates as these
  and the beams, so enough unfinished ones remain for all beams.
  """

  log_probs_BC: jax.Array
  seqs_BCL: jax.Array
  parents_BC: jax.Array
  ended_BC: jax.Array


def brevity_penalty(alpha: float | jax.Array, length: int | jax.Array) -> jax.Array:
  """Returns ((5 + length) / 6) ** alpha, the divisor of log probabilities of this length."""
  return jnp.power((5.0 + length) / 6.0, alpha)


def beam_init(
  batch_size: int,
  beam_size: int,
  max_decode_len: int,
  cache: beams.Cache,
  offset: int = 0,
  live_seqs: Int[Array, "batch beam length"] | None = None,
  initial_index: Int[Array, " batch"] | None = None,
  pad_id: int = 0,
) -> BeamState:
  """Returns the state before the first step. Only the first beam is live; the others have probability 0.

  Args:
    batch_size: the number of sequences.
    beam_size: the number of beams per sequence.
    max_decode_len: the length of the sequences including the start token.
    cache: the model's cache without beams.
    offset: the index of the cache's batch dimension.
    live_seqs: sequences to start from, whose first positions a prefilled cache has; None for padding.
    initial_index: the position of each sequence's newest token in that cache.
    pad_id: the token that is padding.
  """
  beam = functools.partial(beams.add_beam_dim, beam_size=beam_size, offset=offset)
  seqs = jnp.full((batch_size, beam_size, max_decode_len), pad_id, jnp.int32)
  return BeamState(
    cur_index=jnp.int32(0),
    live_logprobs=jnp.broadcast_to(_first_only(beam_size), (batch_size, beam_size)),
    finished_scores=jnp.full((batch_size, beam_size), NEG_INF_VALUE, jnp.float32),
    live_seqs=seqs if live_seqs is None else live_seqs,
    finished_seqs=seqs,
    finished_flags=jnp.zeros((batch_size, beam_size), bool),
    cache=beams.cache_map(beam, cache, apply_to_index=live_seqs is not None),
    initial_index=initial_index,
  )


def beam_search(
  inputs: Int[Array, "batch length"],
  cache: beams.Cache,
  tokens_to_logits: next_token.TokensToLogits,
  eos_id: next_token.EndIds,
  num_decodes: Positive = 4,
  alpha: float | Float[Array, ""] = 0.6,
  max_decode_len: Positive | None = None,
  max_decode_step: int = -1,
  min_log_prob: float | Float[Array, ""] = NEG_INF_VALUE,
  decode_rng: jax.Array | None = None,
  cache_offset: int = 0,
  initial_index: Int[Array, " batch"] | None = None,
  repetition_penalty: PositiveNumber = 1.0,
  no_repeat_ngram_size: NonNegative = 0,
  min_length: NonNegative = 0,
  min_new_tokens: NonNegative = 0,
  bad_words_ids: Sequence[Sequence[int]] = (),
  pad_id: NonNegative = 0,
) -> tuple[Int[Array, "batch beam decode_len"], Float[Array, "batch beam"]]:
  """Returns the best sequences found and their scores, the best last.

  Scores are log probabilities divided by `brevity_penalty`. If no sequence of an example has ended, its
  live ones are returned with their log probabilities. Tokens after the end are `pad_id`.

  Args:
    inputs: a prompt, shifted right by one position; decodes begin with its tokens up to its first padding.
    cache: the model's cache for `batch` sequences.
    tokens_to_logits: returns the next token's logits, and the cache with one more position.
    eos_id: the token that ends a sequence, or several that do.
    num_decodes: the number of beams, and of sequences returned.
    alpha: the strength of the brevity penalty.
    max_decode_len: the maximum length of a decode; None for the length of `inputs`.
    max_decode_step: the maximum number of steps after `initial_index`; negative for no limit.
    min_log_prob: the search ends when no live sequence has a higher log probability.
    decode_rng: ignored; it makes the signature that of a sampler.
    cache_offset: 1 if the batch is the cache's second dimension, after scanned layers.
    initial_index: [batch] the number of positions of `inputs` that the cache already has.
    repetition_penalty: see `Controls` for this and the following arguments. As in Transformers, they
      change log probabilities, which are not normalized again.
    no_repeat_ngram_size: see `Controls`.
    min_length: see `Controls`.
    min_new_tokens: see `Controls`.
    bad_words_ids: see `Controls`.
    pad_id: the token that is padding.
  """
  batch_size, length = inputs.shape
  # Position 0 is the start token.
  max_len = (length if max_decode_len is None else max_decode_len) + 1
  padding = ((0, 0), (0, max(0, max_len - length)))
  prompts_BL = jnp.pad(inputs.astype(jnp.int32), padding, constant_values=pad_id)[:, :max_len]
  is_prefilled = initial_index is not None
  live_seqs = beams.add_beam_dim(prompts_BL, num_decodes) if is_prefilled else None
  start = beam_init(
    batch_size,
    num_decodes,
    max_len,
    unfreeze(cache),
    cache_offset,
    live_seqs,
    initial_index,
    pad_id,
  )
  start = start.replace(live_seqs=start.live_seqs.at[:, :, 0].set(prompts_BL[:, :1]))
  if initial_index is not None:
    start = start.replace(cur_index=initial_index)
  last = jnp.int32(max_len - 1)
  if max_decode_step >= 0:
    last = jnp.minimum(last, start.cur_index + max_decode_step)
  controls = next_token.Controls(
    repetition_penalty, no_repeat_ngram_size, min_length, min_new_tokens, bad_words_ids, pad_id
  )
  # In the loop the cache has beams in its batch dimension, as the model expects. With a separate
  # dimension for beams XLA would copy the whole cache in every step.
  start = start.replace(cache=beams.flatten_cache(start.cache, cache_offset, is_prefilled))

  def should_continue(state: BeamState) -> jax.Array:
    can_improve = _can_improve(state, brevity_penalty(alpha, max_len))
    if isinstance(min_log_prob, jax.Array) or min_log_prob > NEG_INF_VALUE:
      can_improve &= jnp.any(state.live_logprobs > min_log_prob)
    return jnp.any(state.cur_index < last) & can_improve

  def step(state: BeamState) -> BeamState:
    log_probs_BKV, new_cache = _next_log_probs(
      state, tokens_to_logits, prompts_BL, eos_id, controls
    )
    candidates = _best_continuations(state, log_probs_BKV, prompts_BL, eos_id, pad_id)
    new_state = _select_live(state, candidates, new_cache, cache_offset)
    new_state = _select_finished(new_state, candidates, alpha, state.cur_index + 1)
    return _keep_where(state.cur_index >= last, state, new_state) if is_prefilled else new_state

  final = jax.lax.while_loop(should_continue, step, start)
  any_finished_B = jnp.any(final.finished_flags, axis=1)
  seqs = jnp.where(any_finished_B[:, None, None], final.finished_seqs, final.live_seqs)
  scores = jnp.where(any_finished_B[:, None], final.finished_scores, final.live_logprobs)
  return seqs[:, :, 1:], scores


def _can_improve(state: BeamState, longest_penalty: jax.Array) -> jax.Array:
  """Returns whether a live sequence could still replace a finished one, even at full length."""
  best_live_B1 = state.live_logprobs[:, -1:] / longest_penalty
  worst_B1 = jnp.min(state.finished_scores, axis=1, keepdims=True)
  worst_BK = jnp.where(state.finished_flags, worst_B1, NEG_INF_VALUE)
  return ~jnp.all(worst_BK > best_live_B1)


def _next_log_probs(
  state: BeamState,
  tokens_to_logits: next_token.TokensToLogits,
  prompts_BL: jax.Array,
  eos_id: next_token.EndIds,
  controls: next_token.Controls,
) -> tuple[jax.Array, Any]:
  """Returns the log probabilities [batch, beam, vocabulary] of the next tokens, and the new cache."""
  batch_size, beam_size, _ = state.live_seqs.shape
  index_BKx1 = _index_like(state.cur_index, state.live_seqs)[..., :1]
  tokens_BK1 = jnp.take_along_axis(state.live_seqs, index_BKx1, axis=2)
  index_N, seqs_NL = index_BKx1.reshape(-1), beams.flatten_beam_dim(state.live_seqs)
  decoding_state = next_token.DecodingState(
    cur_index=state.cur_index if state.initial_index is None else index_N,
    sequences=seqs_NL,
    cur_token=beams.flatten_beam_dim(tokens_BK1),
    cache=state.cache,
  )
  logits_NV, cache = tokens_to_logits(decoding_state)
  log_probs_NV = next_token.apply_controls(
    jax.nn.log_softmax(logits_NV.astype(jnp.float32)),
    seqs_NL,
    index_N,
    beams.flat_batch_beam_expand(prompts_BL, beam_size),
    eos_id,
    controls,
  )
  return beams.unflatten_beam_dim(log_probs_NV, batch_size, beam_size), unfreeze(cache)


def _best_continuations(
  state: BeamState,
  log_probs_BKV: jax.Array,
  prompts_BL: jax.Array,
  eos_id: next_token.EndIds,
  pad_id: int,
) -> _Candidates:
  """Returns the best continuations by one token; in a prompt, the continuation by its token."""
  batch_size, beam_size, vocab = log_probs_BKV.shape
  log_probs_BKV = log_probs_BKV + state.live_logprobs[..., None]
  count = (1 + len(next_token.end_ids(eos_id))) * beam_size
  log_probs_BC, chosen_BC = beams.top_k_two_stage(log_probs_BKV.reshape(batch_size, -1), count)
  tokens_BC, parents_BC = chosen_BC % vocab, chosen_BC // vocab
  index_B1 = _index_like(state.cur_index, prompts_BL)[:, :1] + 1
  prompt_B1 = jnp.take_along_axis(prompts_BL, index_B1, axis=1)
  # The prompt's token has probability 1, and only one beam continues with it.
  log_probs_BC = jnp.where(prompt_B1 == pad_id, log_probs_BC, _first_only(count)[None])
  tokens_BC = jnp.where(prompt_B1 == pad_id, tokens_BC, prompt_B1)
  seqs_BCL = beams.gather_beams(state.live_seqs, parents_BC, batch_size, beam_size, count)
  position_BCL = jnp.broadcast_to(jnp.arange(seqs_BCL.shape[-1]), seqs_BCL.shape)
  is_next = position_BCL == _index_like(state.cur_index, seqs_BCL) + 1
  seqs_BCL = jnp.where(is_next, tokens_BC[..., None], seqs_BCL)
  return _Candidates(log_probs_BC, seqs_BCL, parents_BC, next_token.is_end(tokens_BC, eos_id))


def _select_live(
  state: BeamState, candidates: _Candidates, new_cache: Any, offset: int
) -> BeamState:
  """Returns the state with the best unfinished continuations as live beams."""
  batch_size, beam_size = state.live_logprobs.shape
  unfinished_BC = candidates.log_probs_BC + jnp.where(candidates.ended_BC, NEG_INF_VALUE, 0.0)
  seqs, log_probs, parents = beams.gather_topk_beams(
    (candidates.seqs_BCL, unfinished_BC, candidates.parents_BC),
    unfinished_BC,
    batch_size,
    beam_size,
  )
  if beam_size > 1:  # a single beam is its own parent
    new_cache = beams.flat_cache_gather_beams(new_cache, parents, offset)
  return state.replace(
    cur_index=state.cur_index + 1, live_logprobs=log_probs, live_seqs=seqs, cache=new_cache
  )


def _select_finished(
  state: BeamState, candidates: _Candidates, alpha: float | jax.Array, length: jax.Array
) -> BeamState:
  """Returns the state with the best of the old and the newly finished sequences."""
  batch_size, beam_size = state.finished_scores.shape
  penalty = brevity_penalty(alpha, _index_like(length, candidates.log_probs_BC))
  scores_BC = candidates.log_probs_BC / penalty
  scores_BC = scores_BC + jnp.where(candidates.ended_BC, 0.0, NEG_INF_VALUE)
  old = (state.finished_seqs, state.finished_scores, state.finished_flags)
  new = (candidates.seqs_BCL, scores_BC, candidates.ended_BC)
  both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), old, new)
  seqs, scores, flags = beams.gather_topk_beams(both, both[1], batch_size, beam_size)
  return state.replace(finished_seqs=seqs, finished_scores=scores, finished_flags=flags)


def _keep_where(done_B: jax.Array, old: BeamState, new: BeamState) -> BeamState:
  """Returns `new`, except for sequences that are already full, which keep `old`."""

  def keep(name: str) -> jax.Array:
    before, after = getattr(old, name), getattr(new, name)
    return jnp.where(_index_like(done_B, after), before, after)

  live = ("cur_index", "live_logprobs", "live_seqs")
  finished = ("finished_scores", "finished_seqs", "finished_flags")
  return new.replace(**{name: keep(name) for name in live + finished})


def _first_only(size: int) -> jax.Array:
  """Returns log probabilities of 0 for the first of `size` beams and −∞ for the others."""
  return jnp.where(jnp.arange(size) == 0, 0.0, NEG_INF_VALUE).astype(jnp.float32)


def _index_like(index: jax.Array, x: jax.Array) -> jax.Array:
  """Returns a scalar or [batch] array broadcast to the shape of `x`, whose first dimension is batch."""
  return jnp.broadcast_to(index.reshape(index.shape + (1,) * (x.ndim - index.ndim)), x.shape)
