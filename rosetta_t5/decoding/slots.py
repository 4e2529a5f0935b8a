"""Decoding steps of independent requests, each of which joins a slot of the batch and leaves it at its end.

Unlike a decode function, which starts and ends a whole batch, a step advances every slot by one token,
wherever its sequence stands and whatever its controls are. Shapes use N for slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.tree_util import tree_map_with_path
from jaxtyping import Array, Bool, Float, Int

from rosetta_t5.decoding import beams, next_token

PyTree = Any
# Returns logits [N, V] and the new cache, from the input of a step and the other arrays of the slots.
StepFn = Callable[[next_token.DecodingState], tuple[jax.Array, PyTree]]

NUM_TOP = 5  # The number of most probable tokens that a step reports.
INDICES = frozenset({"cache_index", "position_embedder_index"})


def _control(default: Any, low: Any, high: Any) -> Any:
  return struct.field(default=default, metadata={"range": (low, high)})


class SlotControls(struct.PyTreeNode):
  """How each slot is decoded; all are [N], or one number for a single sequence. The defaults change nothing.

  The metadata of each field that a request may set is the range of its values.

  Attributes:
    temperature: divides the logits; 0 takes the most probable token.
    top_k: only the k most probable tokens are sampled; 0 or less for all.
    top_p: only the smallest set of tokens with this total probability is sampled; 1 for all.
    seed: the seed of the noise, which does not depend on the other slots.
    min_tokens: the number of generated tokens before which the end token cannot occur.
    repetition_penalty: see `Controls`.
    presence_penalty: is subtracted from the logits of the tokens generated so far.
    frequency_penalty: the same, times how often each was generated.
    reports_probabilities: whether the step reports log probabilities.
  """

  temperature: Any = _control(np.float32(0), 0, 2)
  top_k: Any = _control(np.int32(0), -1, 2**31 - 1)
  top_p: Any = _control(np.float32(1), 1e-6, 1)
  seed: Any = _control(np.uint32(0), -(2**63), 2**63 - 1)
  min_tokens: Any = _control(np.int32(0), 0, 2**31 - 1)
  repetition_penalty: Any = _control(np.float32(1), 0.01, 100)
  presence_penalty: Any = _control(np.float32(0), -2, 2)
  frequency_penalty: Any = _control(np.float32(0), -2, 2)
  reports_probabilities: Any = np.bool_(False)


class SlotState(struct.PyTreeNode):
  """The sequences of all slots.

  Attributes:
    tokens: [N, T + 1] the sequences, with the start token at position 0.
    position: [N] that of the newest token; the next step computes the token after it.
    start: [N] the first position that is generated; those before it are given.
    end: [N] the position after the last one that may be generated.
    controls: the controls of each slot.
    is_running: [N] whether the slot has a request that has not ended.
    arrays: the model's arrays, which a step of the caller's `next_logits` reads and writes.
  """

  tokens: Any
  position: Any
  start: Any
  end: Any
  controls: SlotControls
  is_running: Any
  arrays: Any = ()


class StepOutput(NamedTuple):
  """What a step computed.

  Attributes:
    token: [N] the new token.
    is_new: [N] whether the slot generated it in this step.
    has_ended: [N] whether it is the last one.
    log_prob: [N] its log probability by the model, before temperature, top-k and top-p.
    top_tokens: [N, NUM_TOP] the most probable tokens.
    top_log_probs: [N, NUM_TOP] their log probabilities.
  """

  token: jax.Array
  is_new: jax.Array
  has_ended: jax.Array
  log_prob: jax.Array
  top_tokens: jax.Array
  top_log_probs: jax.Array


def with_index(cache: PyTree, index_N: Int[Array, " N"], has_layer_axis: bool) -> PyTree:
  """Returns a cache in which each slot is at a position of its own.

  Args:
    cache: a model's cache.
    index_N: the positions.
    has_layer_axis: whether layers are scanned, so that their arrays have a dimension before the slots'.
  """

  def replace(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
    if path[-1].key not in INDICES:
      return x
    return jnp.broadcast_to(index_N, (x.shape[0], *index_N.shape)) if has_layer_axis else index_N

  return tree_map_with_path(replace, cache)


def step(
  state: SlotState,
  is_kept_N: Bool[Array, " N"],
  next_logits: StepFn,
  cache: PyTree,
  eos_id: next_token.EndIds,
  controls: next_token.Controls,
) -> tuple[SlotState, PyTree, StepOutput]:
  """Returns the state, whose `arrays` are still the old ones, the new cache, and the output of one step.

  Args:
    state: the sequences.
    is_kept_N: False stops the request of a slot.
    next_logits: the model's decoding step.
    cache: the model's cache, with the slots' positions.
    eos_id: the tokens that end a sequence.
    controls: those of all slots besides their own.
  """
  is_running_N = state.is_running & is_kept_N
  current_N1 = jnp.take_along_axis(state.tokens, state.position[:, None], axis=1)
  sequences = state.tokens[:, :-1]
  logits_NV, cache = next_logits(
    next_token.DecodingState(state.position, sequences, current_N1, cache)
  )
  logits_NV = logits_NV.astype(jnp.float32)
  next_N = state.position + 1
  is_new_N = is_running_N & (next_N >= state.start)
  chosen_N = _choose(_restrict(logits_NV, state, eos_id, controls), state)
  given_N = jnp.take_along_axis(state.tokens, next_N[:, None], axis=1)[:, 0]
  token_N = jnp.where(is_new_N, chosen_N, given_N)
  tokens = state.tokens.at[jnp.arange(len(token_N)), next_N].set(token_N)
  has_ended_N = is_new_N & (next_token.is_end(token_N, eos_id) | (next_N + 1 >= state.end))
  is_reported = jnp.any(state.controls.reports_probabilities & state.is_running)
  state = state.replace(
    tokens=tokens,
    position=jnp.where(is_running_N & ~has_ended_N, next_N, state.position),
    is_running=is_running_N & ~has_ended_N,
  )
  reported = _report(logits_NV, token_N, is_reported)
  return state, cache, StepOutput(token_N, is_new_N, has_ended_N, *reported)


def _restrict(
  logits_NV: jax.Array, state: SlotState, eos_id: next_token.EndIds, shared: next_token.Controls
) -> jax.Array:
  """Returns the logits with the controls of all slots and of each."""
  own, tokens, index_N = state.controls, state.tokens[:, :-1], state.position
  if shared != next_token.Controls(pad_id=shared.pad_id):
    is_given = jnp.arange(tokens.shape[1])[None] < state.start[:, None]
    prompts = jnp.where(is_given, tokens, shared.pad_id)
    logits_NV = next_token.apply_controls(logits_NV, tokens, index_N, prompts, eos_id, shared)

  def apply(logits_NV: jax.Array) -> jax.Array:
    logits_NV = next_token.penalize_repetition(
      logits_NV, tokens, index_N[:, None], own.repetition_penalty[:, None]
    )
    positions = jnp.arange(tokens.shape[1])[None]
    is_counted = (positions >= state.start[:, None]) & (positions <= index_N[:, None])
    rows_N1 = jnp.arange(len(tokens))[:, None]
    counts_NV = jnp.zeros_like(logits_NV).at[rows_N1, tokens].add(is_counted)
    logits_NV -= own.frequency_penalty[:, None] * counts_NV
    logits_NV -= own.presence_penalty[:, None] * (counts_NV > 0)
    is_end_1V = next_token.is_end(jnp.arange(logits_NV.shape[1])[None], eos_id)
    is_early_N1 = (index_N + 1 - state.start < own.min_tokens)[:, None]
    return jnp.where(is_end_1V & is_early_N1, next_token.NEG_INF, logits_NV)

  is_neutral_N = (
    (own.repetition_penalty == 1)
    & (own.presence_penalty == 0)
    & (own.frequency_penalty == 0)
    & (own.min_tokens == 0)
  )
  is_changed = jnp.any(~is_neutral_N & state.is_running)
  return jax.lax.cond(is_changed, apply, lambda x: x, logits_NV)


def _choose(logits_NV: jax.Array, state: SlotState) -> jax.Array:
  """Returns the next token of each slot, [N]."""
  own = state.controls

  best = lambda: beams.top_k_two_stage(logits_NV, 1)[1][:, 0]  # noqa: E731

  def sample() -> jax.Array:
    is_warm_N = own.temperature > 0
    scaled_NV = logits_NV / jnp.where(is_warm_N, own.temperature, 1.0)[:, None]
    most_N = jnp.where(own.top_k > 0, own.top_k, logits_NV.shape[1])
    scaled_NV = next_token.topk_mask(scaled_NV, most_N, next_token.NEG_INF)
    top_p_NV = next_token.topp_mask(scaled_NV, own.top_p, next_token.NEG_INF)
    scaled_NV = jnp.where((own.top_p < 1)[:, None], top_p_NV, scaled_NV)
    keys = jax.vmap(lambda seed, n: jax.random.fold_in(jax.random.PRNGKey(seed), n))(
      own.seed, state.position
    )
    return jnp.where(is_warm_N, jax.vmap(jax.random.categorical)(keys, scaled_NV), best())

  is_sampled = jnp.any((own.temperature > 0) & state.is_running)
  return jax.lax.cond(is_sampled, sample, best).astype(state.tokens.dtype)


def _report(
  logits_NV: Float[Array, "N V"], token_N: Int[Array, " N"], is_wanted: Bool[Array, ""]
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns log probabilities [N], and the most probable tokens with theirs, if they are wanted."""

  def compute() -> tuple[jax.Array, jax.Array, jax.Array]:
    log_probs_NV = jax.nn.log_softmax(logits_NV)
    values, indices = beams.top_k_two_stage(log_probs_NV, NUM_TOP)
    log_prob_N = jnp.take_along_axis(log_probs_NV, token_N[:, None], axis=1)[:, 0]
    return log_prob_N, indices.astype(jnp.int32), values

  shapes = jax.eval_shape(compute)
  skip = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)  # noqa: E731
  return jax.lax.cond(is_wanted, compute, skip)
