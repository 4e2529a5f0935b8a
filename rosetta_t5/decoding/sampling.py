"""Sampling with temperature, top-k and top-p, as in T5X; temperature 0 is greedy decoding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.core import unfreeze
from jaxtyping import Array, Float, Int

from rosetta_t5.decoding import beams, thresholds
from rosetta_t5.decoding.state import NEG_INF, DecodingState, TokensToLogits

# Below this a temperature counts as 0.
MIN_TEMPERATURE = np.array(1e-4)


class SamplingLoopState(struct.PyTreeNode):
  """What the loop carries and callbacks may change; B is batch · decodes.

  Attributes:
    step: int32 number of steps made.
    cur_index: [B] position of each `cur_token`.
    sequences: [B, length + 2] a dummy, the tokens, and a place for what nobody needs.
    cache: the model's cache.
    cur_token: [B, 1] the newest tokens.
    ended: [B, 1] whether the sequence has ended.
    rng: key for the steps to come.
    log_prob: [B] log probability of the tokens that were sampled.
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
  tokens_to_logits: TokensToLogits,
  eos_id: int,
  decode_rng: jax.Array | None = None,
  num_decodes: int = 1,
  temperature: float | Float[Array, "..."] = 1.0,
  topk: int | Int[Array, ""] = 1,
  topp: float | Float[Array, ""] = 0.0,
  cache_offset: int = 0,
  initial_index: Int[Array, " batch"] | None = None,
  max_decode_steps: int | Int[Array, ""] | None = None,
  max_decode_steps_hard_limit: int | None = None,
  rescale_log_probs: bool = True,
  state_callback_fn: StateCallbackFn | None = None,
  logit_callback_fn: LogitCallbackFn | None = None,
) -> tuple[Int[Array, "batch decodes length"], Float[Array, "batch decodes"]]:
  """Returns sampled sequences and their log probabilities, the most probable last.

  Tokens after the end are 0. Decoding stops when every sequence has ended or is full.

  Args:
    inputs: a prompt, shifted right by one position; its nonzero tokens are kept and their
      probabilities not counted.
    cache: the model's cache for `batch` sequences.
    tokens_to_logits: returns the next token's logits, and the cache with one position more.
    eos_id: the token that ends a sequence, once there are more of it than in the prompt.
    decode_rng: the key; None for PRNGKey(0).
    num_decodes: how many sequences are sampled for each of the batch.
    temperature: logits are divided by it; 0 takes the most probable token; one for all, or [batch].
    topk: only the k most probable tokens are sampled; 0 for all.
    topp: only the fewest tokens that have this probability together are sampled; 0 for all.
    cache_offset: 1 if the cache's batch dimension comes second, after scanned layers.
    initial_index: [batch] for a cache that is filled up to these positions of `inputs`.
    max_decode_steps: how many tokens may follow the prompt; None for as many as fit.
    max_decode_steps_hard_limit: a bound on `max_decode_steps`, where that is traced.
    rescale_log_probs: whether the log probabilities returned are those after temperature, top-k and
      top-p (with k = 1 all are 0), or the model's.
    state_callback_fn: called on the state before each step and at the end; returns the state to use.
    logit_callback_fn: called on the logits and the state; returns the logits to sample from.

  Raises:
    ValueError: both `topk` and `topp` are set, or more steps than positions are asked for.
  """
  limit = max_decode_steps_hard_limit or 0
  if max_decode_steps is not None and limit > 0:
    at_most = min if isinstance(max_decode_steps, int) else jnp.minimum
    max_decode_steps = at_most(max_decode_steps, limit)
  _check_limits(topk, topp, max_decode_steps, inputs.shape[1])
  batch_size, length = inputs.shape
  if num_decodes > 1:
    expand = functools.partial(beams.flat_batch_beam_expand, beam_size=num_decodes)
    is_filled = initial_index is not None
    inputs = expand(inputs)
    cache = beams.cache_map(functools.partial(expand, offset=cache_offset), cache, is_filled)
    initial_index = None if initial_index is None else expand(initial_index)
  max_len: int | jax.Array = length
  if max_decode_steps is not None:
    max_len = jnp.minimum(length, jnp.sum(inputs != 0, axis=1) + max_decode_steps)
  temperature = jnp.asarray(temperature, jnp.float32)
  if temperature.ndim:
    temperature = jnp.repeat(temperature, num_decodes)[:, None]
  start = _initial_state(inputs, cache, initial_index, decode_rng)
  step = functools.partial(
    _step,
    tokens_to_logits=tokens_to_logits,
    sample=functools.partial(_sample, temperature, topk, topp, rescale_log_probs),
    append=functools.partial(_append, max_len, eos_id, _count_eos(start.sequences, eos_id)),
    change_state=state_callback_fn or (lambda state: state),
    change_logits=logit_callback_fn or (lambda logits, state: logits),
  )
  final = jax.lax.while_loop(lambda state: ~jnp.all(state.ended), step, start)
  if state_callback_fn is not None:
    final = state_callback_fn(final)
  decodes = beams.unflatten_beam_dim(final.sequences[:, 1:-1], batch_size, num_decodes)
  log_prob = beams.unflatten_beam_dim(final.log_prob, batch_size, num_decodes)
  best_last = jnp.argsort(log_prob, axis=-1)
  ordered_decodes = jnp.take_along_axis(decodes, best_last[..., None], axis=1)
  return ordered_decodes, jnp.take_along_axis(log_prob, best_last, axis=1)


def _step(
  state: SamplingLoopState,
  tokens_to_logits: TokensToLogits,
  sample: Callable[..., tuple[jax.Array, jax.Array]],
  append: Callable[..., SamplingLoopState],
  change_state: StateCallbackFn,
  change_logits: LogitCallbackFn,
) -> SamplingLoopState:
  """Returns the state with one token more."""
  state = change_state(state)
  sample_rng, rng = jax.random.split(state.rng)
  logits_BV, new_cache = tokens_to_logits(
    DecodingState(state.cur_index, state.sequences[:, :-2], state.cur_token, state.cache)
  )
  tokens_B, log_probs_B = sample(change_logits(logits_BV, state), sample_rng)
  return append(state, tokens_B, log_probs_B).replace(cache=unfreeze(new_cache), rng=rng)


def _check_limits(topk: Any, topp: Any, max_decode_steps: Any, length: int) -> None:
  """Raises ValueError for arguments that contradict each other, as far as they are not traced."""
  traced = jax.core.Tracer
  if not isinstance(topk, traced) and not isinstance(topp, traced) and topk and topp:
    raise ValueError(
      f"temperature_sample takes topk or topp, not both (topk={topk}, topp={topp}): set topk=0 to "
      "sample by topp"
    )
  if isinstance(max_decode_steps, int) and max_decode_steps > length:
    raise ValueError(
      f"max_decode_steps={max_decode_steps} is more than the {length} positions of the decoder "
      "inputs: make these longer (task_feature_lengths['targets']) or take fewer steps"
    )


def _initial_state(
  inputs_BL: jax.Array, cache: Any, initial_index_B: jax.Array | None, rng: jax.Array | None
) -> SamplingLoopState:
  """Returns the state before the first step."""
  batch_size = inputs_BL.shape[0]
  # One place for the last token, as position 0 is a dummy; one for the tokens of sequences that are
  # full while others are not.
  sequences = jnp.pad(inputs_BL, ((0, 0), (0, 2)))
  if initial_index_B is None:
    index = jnp.zeros(batch_size, jnp.int32)
    token = jnp.zeros((batch_size, 1), jnp.int32)
  else:
    index = initial_index_B
    token = jnp.take_along_axis(sequences, index[:, None], axis=1)
  return SamplingLoopState(
    step=jnp.int32(0),
    cur_index=index,
    sequences=sequences,
    cache=unfreeze(cache),
    cur_token=token.astype(inputs_BL.dtype),
    ended=jnp.zeros((batch_size, 1), bool),
    rng=jax.random.PRNGKey(0) if rng is None else rng,
    log_prob=jnp.zeros(batch_size, jnp.float32),
  )


def _sample(
  temperature_Bx1: jax.Array,
  topk: Any,
  topp: Any,
  rescale_log_probs: bool,
  logits_BV: jax.Array,
  rng: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns the next tokens [B] and their log probabilities [B]."""

  def sampled() -> tuple[jax.Array, jax.Array]:
    scaled_BV = logits_BV / jnp.maximum(temperature_Bx1, MIN_TEMPERATURE)
    if not isinstance(topk, int) or topk:
      masked_BV = thresholds.topk_mask(scaled_BV, topk, NEG_INF)
      scaled_BV = jnp.where(jnp.asarray(topk) > 0, masked_BV, scaled_BV)
    if not isinstance(topp, (int, float)) or topp:
      scaled_BV = thresholds.topp_mask(scaled_BV, topp, NEG_INF)
    tokens_B = jax.random.categorical(rng, scaled_BV).astype(jnp.int32)
    return tokens_B, _picked_log_prob(scaled_BV if rescale_log_probs else logits_BV, tokens_B)

  def greedy() -> tuple[jax.Array, jax.Array]:
    tokens_B = beams.top_k_two_stage(logits_BV, 1)[1][:, 0]
    if rescale_log_probs:
      return tokens_B, jnp.zeros(tokens_B.shape, jnp.float32)
    return tokens_B, _picked_log_prob(logits_BV, tokens_B)

  if isinstance(topk, int) and topk == 1:
    return (
      greedy()
    )  # Only one token is left, and noise for the whole vocabulary would cost a third.
  if temperature_Bx1.ndim == 0:
    return jax.lax.cond(temperature_Bx1 > MIN_TEMPERATURE, sampled, greedy)
  is_warm_B = temperature_Bx1[:, 0] > MIN_TEMPERATURE
  return jax.tree.map(functools.partial(jnp.where, is_warm_B), sampled(), greedy())


def _picked_log_prob(logits_BV: jax.Array, tokens_B: jax.Array) -> jax.Array:
  log_probs_BV = jax.nn.log_softmax(logits_BV.astype(jnp.float32))
  return jnp.take_along_axis(log_probs_BV, tokens_B[:, None], axis=1)[:, 0]


def _append(
  max_len: int | jax.Array,
  eos_id: int,
  eos_in_prompt_Bx1: jax.Array,
  state: SamplingLoopState,
  tokens_B: jax.Array,
  log_probs_B: jax.Array,
) -> SamplingLoopState:
  """Returns the state with the tokens, or the prompt's, at the next position; 0 after the end."""
  # A sequence that is full while others are not writes to its last place again and again.
  index_B = jnp.minimum(state.cur_index, max_len)
  prompt_B = jnp.take_along_axis(state.sequences, index_B[:, None] + 1, axis=1)[:, 0]
  ended_B = state.ended[:, 0]
  is_free_B = prompt_B == 0
  tokens_B = jnp.where(is_free_B, tokens_B.astype(prompt_B.dtype), prompt_B)
  tokens_B = jnp.where(ended_B, 0, tokens_B)
  log_prob = state.log_prob + jnp.where(is_free_B & ~ended_B, log_probs_B, 0.0)
  sequences = state.sequences.at[jnp.arange(index_B.size), index_B + 1].set(tokens_B)
  is_full_Bx1 = (index_B >= max_len - 1)[:, None]
  return state.replace(
    step=state.step + 1,
    cur_index=index_B + 1,
    sequences=sequences,
    cur_token=tokens_B[:, None],
    ended=state.ended | is_full_Bx1 | (_count_eos(sequences, eos_id) > eos_in_prompt_Bx1),
    log_prob=log_prob,
  )


def _count_eos(sequences_BL: jax.Array, eos_id: int) -> jax.Array:
  return jnp.sum(sequences_BL == eos_id, axis=-1, keepdims=True)
