"""Sampling with temperature, top-k and top-p, as in T5X; temperature 0 is greedy decoding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.core import unfreeze
from jaxtyping import Array, Float, Int

from rosetta_t5.argument_types import (
  NonNegative,
  NonNegativeNumber,
  Positive,
  PositiveNumber,
  Probability,
)
from rosetta_t5.decoding import beams, next_token

# Lower temperatures count as 0.
MIN_TEMPERATURE = np.array(1e-4)


class SamplingLoopState(struct.PyTreeNode):
  """The loop's state, which callbacks may change; B is batch · decodes.

  Attributes:
    step: int32 number of completed steps.
    cur_index: [B] position of each `cur_token`.
    sequences: [B, length + 2] a start token, the tokens, and one position for discarded tokens.
    cache: the model's cache.
    cur_token: [B, 1] the newest tokens.
    ended: [B, 1] whether the sequence has ended.
    rng: the random key for the remaining steps.
    log_prob: [B] log probability of the sampled tokens.
  """

  step: jax.Array
  cur_index: jax.Array
  sequences: jax.Array
  cache: Any
  cur_token: jax.Array
  ended: jax.Array
  rng: jax.Array
  log_prob: jax.Array


StateCallbackFn = Callable[[SamplingLoopState], SamplingLoopState]
LogitCallbackFn = Callable[[jax.Array, SamplingLoopState], jax.Array]


def temperature_sample(
  inputs: Int[Array, "batch length"],
  cache: beams.Cache,
  tokens_to_logits: next_token.TokensToLogits,
  eos_id: next_token.EndIds,
  decode_rng: jax.Array | None = None,
  num_decodes: Positive = 1,
  temperature: NonNegativeNumber | Float[Array, "..."] = 1.0,
  topk: NonNegative | Int[Array, ""] = 1,
  topp: Probability | Float[Array, ""] = 0.0,
  cache_offset: int = 0,
  initial_index: Int[Array, " batch"] | None = None,
  max_decode_steps: Positive | Int[Array, ""] | None = None,
  max_decode_steps_hard_limit: NonNegative | None = None,
  rescale_log_probs: bool = True,
  state_callback_fn: StateCallbackFn | None = None,
  logit_callback_fn: LogitCallbackFn | None = None,
  repetition_penalty: PositiveNumber = 1.0,
  no_repeat_ngram_size: NonNegative = 0,
  min_length: NonNegative = 0,
  min_new_tokens: NonNegative = 0,
  bad_words_ids: Sequence[Sequence[int]] = (),
  pad_id: NonNegative = 0,
) -> tuple[Int[Array, "batch decodes length"], Float[Array, "batch decodes"]]:
  """Returns sampled sequences and their log probabilities, the most probable last.

  Tokens after the end are `pad_id`. Decoding stops when every sequence has ended or is full.

  Args:
    inputs: a prompt, shifted right by one position; its tokens other than padding are kept, and
      their probabilities are not counted.
    cache: the model's cache for `batch` sequences.
    tokens_to_logits: returns the next token's logits, and the cache with one more position.
    eos_id: the token that ends a sequence, or several that do. Occurrences in the prompt do not end it.
    decode_rng: the random key; None for PRNGKey(0).
    num_decodes: the number of samples per sequence of the batch.
    temperature: divides the logits; 0 selects the most probable token. A scalar, or [batch].
    topk: only the k most probable tokens are sampled; 0 for all tokens.
    topp: only the smallest set of tokens with this total probability is sampled; 0 for all tokens.
    cache_offset: 1 if the batch is the cache's second dimension, after scanned layers.
    initial_index: [batch] the number of positions of `inputs` that the cache already has.
    max_decode_steps: the maximum number of tokens after the prompt, if so many fit; None for as many as fit.
    max_decode_steps_hard_limit: an upper bound for a traced `max_decode_steps`.
    rescale_log_probs: whether the returned log probabilities are those after temperature, top-k and
      top-p (all are 0 with k = 1), or the model's.
    state_callback_fn: called with the state before each step and at the end; returns the state to use.
    logit_callback_fn: called with the logits and the state; returns the logits to sample from.
    repetition_penalty: see `Controls` for this and the following arguments. They change the logits
      first, before `logit_callback_fn` and the temperature.
    no_repeat_ngram_size: see `Controls`.
    min_length: see `Controls`.
    min_new_tokens: see `Controls`.
    bad_words_ids: see `Controls`.
    pad_id: the token that is padding.

  Raises:
    ValueError: `topp` is set with a `topk` of 1.
  """
  if max_decode_steps is not None and max_decode_steps_hard_limit:
    minimum = min if isinstance(max_decode_steps, int) else jnp.minimum
    max_decode_steps = minimum(max_decode_steps, max_decode_steps_hard_limit)
  if isinstance(topk, int) and topk == 1 and not isinstance(topp, jax.core.Tracer) and topp:
    raise ValueError(
      f"topp={topp} has no effect with topk=1, the default of temperature_sample: set topk=0"
    )
  temperature = jnp.asarray(temperature, jnp.float32)
  if temperature.ndim:
    temperature = jnp.repeat(temperature, num_decodes)[:, None]
  controls = next_token.Controls(
    repetition_penalty, no_repeat_ngram_size, min_length, min_new_tokens, bad_words_ids, pad_id
  )
  start = _initial_state(
    inputs, cache, num_decodes, cache_offset, initial_index, decode_rng, pad_id
  )
  prompts = start.sequences[:, :-2]
  max_len: int | jax.Array = prompts.shape[1]
  if max_decode_steps is not None:
    # Position 0 has the start token, or the first token of a text without one, which is not counted.
    lengths = jnp.sum(prompts[:, 1:] != pad_id, axis=1)
    max_len = jnp.minimum(max_len, lengths + max_decode_steps)

  def count_eos(sequences: jax.Array) -> jax.Array:
    return jnp.sum(next_token.is_end(sequences, eos_id), axis=-1, keepdims=True)

  eos_in_prompt = count_eos(start.sequences)
  change_state = state_callback_fn or (lambda state: state)
  change_logits = logit_callback_fn or (lambda logits, state: logits)

  def step(state: SamplingLoopState) -> SamplingLoopState:
    state = change_state(state)
    sample_rng, rng = jax.random.split(state.rng)
    logits_BV, new_cache = tokens_to_logits(
      next_token.DecodingState(
        state.cur_index, state.sequences[:, :-2], state.cur_token, state.cache
      )
    )
    logits_BV = next_token.apply_controls(
      logits_BV, state.sequences, state.cur_index, prompts, eos_id, controls
    )
    logits_BV = change_logits(logits_BV, state)
    sampled = _sample(logits_BV, sample_rng, temperature, topk, topp, rescale_log_probs)
    new_state = _append(
      state, *sampled, max_len, lambda sequences: count_eos(sequences) > eos_in_prompt, pad_id
    )
    return new_state.replace(cache=unfreeze(new_cache), rng=rng)

  final = jax.lax.while_loop(lambda state: ~jnp.all(state.ended), step, start)
  final = change_state(final)
  batch_size = inputs.shape[0]
  decodes = beams.unflatten_beam_dim(final.sequences[:, 1:-1], batch_size, num_decodes)
  log_prob = beams.unflatten_beam_dim(final.log_prob, batch_size, num_decodes)
  best_last = jnp.argsort(log_prob, axis=-1)
  ordered_decodes = jnp.take_along_axis(decodes, best_last[..., None], axis=1)
  return ordered_decodes, jnp.take_along_axis(log_prob, best_last, axis=1)


def _initial_state(
  inputs_BL: jax.Array,
  cache: Any,
  num_decodes: int,
  offset: int,
  initial_index_B: Any,
  rng: Any,
  pad_id: int,
) -> SamplingLoopState:
  """Returns the state before the first step, with each sequence `num_decodes` times."""
  is_prefilled = initial_index_B is not None
  index = jnp.zeros(inputs_BL.shape[0], jnp.int32) if initial_index_B is None else initial_index_B
  if num_decodes > 1:
    expand = functools.partial(beams.flat_batch_beam_expand, beam_size=num_decodes)
    expand_cache = functools.partial(expand, offset=offset)
    cache = beams.cache_map(expand_cache, cache, apply_to_index=is_prefilled)
    inputs_BL, index = expand(inputs_BL), expand(index)
  # Two more positions: one because position 0 is the start token, and one for the tokens of sequences
  # that are full while others are not.
  sequences = jnp.pad(inputs_BL, ((0, 0), (0, 2)), constant_values=pad_id)
  token = jnp.take_along_axis(sequences, index[:, None], axis=1)
  return SamplingLoopState(
    step=jnp.int32(0),
    cur_index=index,
    sequences=sequences,
    cache=unfreeze(cache),
    cur_token=token if is_prefilled else jnp.full_like(token, pad_id),
    ended=jnp.zeros(token.shape, bool),
    rng=jax.random.PRNGKey(0) if rng is None else rng,
    log_prob=jnp.zeros(token.shape[0], jnp.float32),
  )


def _sample(
  logits_BV: jax.Array, rng: jax.Array, temperature: jax.Array, topk: Any, topp: Any, rescale: bool
) -> tuple[jax.Array, jax.Array]:
  """Returns the next tokens [B] and their log probabilities [B]."""

  def sample() -> tuple[jax.Array, jax.Array]:
    scaled_BV = logits_BV / jnp.maximum(temperature, MIN_TEMPERATURE)
    if not isinstance(topk, int) or topk:
      masked_BV = next_token.topk_mask(scaled_BV, topk, next_token.NEG_INF)
      scaled_BV = jnp.where(jnp.asarray(topk) > 0, masked_BV, scaled_BV)
    if not isinstance(topp, (int, float)) or topp:
      masked_BV = next_token.topp_mask(scaled_BV, topp, next_token.NEG_INF)
      scaled_BV = jnp.where(jnp.asarray(topp) > 0, masked_BV, scaled_BV)
    tokens_B = jax.random.categorical(rng, scaled_BV).astype(jnp.int32)
    return tokens_B, _log_prob_of(scaled_BV if rescale else logits_BV, tokens_B)

  def take_best() -> tuple[jax.Array, jax.Array]:
    tokens_B = beams.top_k_two_stage(logits_BV, 1)[1][:, 0]
    if rescale:
      return tokens_B, jnp.zeros(tokens_B.shape, jnp.float32)
    return tokens_B, _log_prob_of(logits_BV, tokens_B)

  if isinstance(topk, int) and topk == 1:
    return take_best()  # noise for the whole vocabulary would cost a third of the time
  if temperature.ndim == 0:
    return jax.lax.cond(temperature > MIN_TEMPERATURE, sample, take_best)
  is_warm_B = temperature[:, 0] > MIN_TEMPERATURE
  return jax.tree.map(functools.partial(jnp.where, is_warm_B), sample(), take_best())


def _log_prob_of(logits_BV: jax.Array, tokens_B: jax.Array) -> jax.Array:
  log_probs_BV = jax.nn.log_softmax(logits_BV.astype(jnp.float32))
  return jnp.take_along_axis(log_probs_BV, tokens_B[:, None], axis=1)[:, 0]


def _append(
  state: SamplingLoopState,
  tokens_B: jax.Array,
  log_probs_B: jax.Array,
  max_len: Any,
  has_ended: Any,
  pad_id: int,
) -> SamplingLoopState:
  """Returns the state with the tokens, or the prompt's, at the next position; padding after the end."""
  # A sequence that is full while others are not repeatedly writes to its last position.
  index_B = jnp.minimum(state.cur_index, max_len)
  prompt_B = jnp.take_along_axis(state.sequences, index_B[:, None] + 1, axis=1)[:, 0]
  ended_B = state.ended[:, 0]
  is_sampled_B = prompt_B == pad_id
  tokens_B = jnp.where(is_sampled_B, tokens_B.astype(prompt_B.dtype), prompt_B)
  tokens_B = jnp.where(ended_B, pad_id, tokens_B)
  log_prob = state.log_prob + jnp.where(is_sampled_B & ~ended_B, log_probs_B, 0.0)
  sequences = state.sequences.at[jnp.arange(index_B.size), index_B + 1].set(tokens_B)
  is_full_Bx1 = (index_B >= max_len - 1)[:, None]
  return state.replace(
    step=state.step + 1,
    cur_index=index_B + 1,
    sequences=sequences,
    cur_token=tokens_B[:, None],
    ended=state.ended | is_full_Bx1 | has_ended(sequences),
    log_prob=log_prob,
  )
