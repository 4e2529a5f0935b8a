"""A decoding step: its input, and what restricts its logits (controls, top-k and top-p masks).

The masks search their threshold in binary, as in T5X: sorting a vocabulary takes longer than the 32
counts that find the threshold bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Int32

# Used as log 0. It is finite, so that multiplying by it never gives NaN.
NEG_INF = np.array(-1.0e7)


class DecodingState(struct.PyTreeNode):
  """The input of a step; the decodes of one example are adjacent in the first dimension.

  Attributes:
    cur_index: the position of `cur_token`, from 0: a scalar, or [batch · decodes].
    sequences: [batch · decodes, length] the tokens so far.
    cur_token: [batch · decodes, 1] the token at this position.
    cache: a nested dict of arrays, the attention's cache.
  """

  cur_index: jax.Array
  sequences: jax.Array
  cur_token: jax.Array
  cache: Any


# Returns the next token's logits [batch · decodes, vocabulary] and the cache with one more position.
TokensToLogits = Callable[[DecodingState], tuple[jax.Array, Any]]

EndIds = int | Sequence[int]  # the id of the token that ends a decode, or those of several

_ANY, _NONE = -1, -2  # In place of a token: one that equals every token, and one that equals none.


class Controls(NamedTuple):
  """The controls of a decode; the defaults change nothing.

  Attributes:
    repetition_penalty: positive logits of the tokens so far are divided by it, and others multiplied
      (Keskar et al. 2019, arXiv:1909.05858).
    no_repeat_ngram_size: no sequence of this many tokens occurs twice; 0 allows all.
    min_length: a decode does not end before it has this many tokens, start token and prompt included.
    min_new_tokens: the same without start token and prompt.
    bad_words_ids: sequences of tokens that do not occur. Tokens that end a decode are left out.
    pad_id: the token that is padding.
  """

  repetition_penalty: float = 1.0
  no_repeat_ngram_size: int = 0
  min_length: int = 0
  min_new_tokens: int = 0
  bad_words_ids: Sequence[Sequence[int]] = ()
  pad_id: int = 0


def end_ids(eos_id: EndIds) -> tuple[int, ...]:
  """Returns the ids of all tokens that end a decode."""
  return tuple(eos_id) if isinstance(eos_id, Sequence) else (eos_id,)


def is_end(tokens: Int[Array, "..."], eos_id: EndIds) -> Bool[Array, "..."]:
  """Returns whether each token ends a decode."""
  return jnp.isin(tokens, jnp.array(end_ids(eos_id)))


def apply_controls(
  logits: Float[Array, "decodes vocab"],
  tokens: Int[Array, "decodes length"],
  position: Int[Array, " decodes"],
  prompts: Int[Array, "decodes prompt_length"],
  eos_id: EndIds,
  controls: Controls,
) -> Float[Array, "decodes vocab"]:
  """Returns the logits, or log probabilities, of the next tokens with all controls applied.

  Args:
    logits: those of the model.
    tokens: the tokens so far, from the start token at position 0; later positions are ignored.
    position: the position of each decode's newest token.
    prompts: the start token, and the prompt's tokens up to the first padding.
    eos_id: the token that ends a decode, or several that do.
    controls: what to apply. Defaults add nothing to the program.

  Raises:
    ValueError: a bad word is empty, or has a token that is not in the vocabulary.
  """
  position_Nx1 = position[:, None]
  if controls.repetition_penalty != 1.0:
    logits = penalize_repetition(logits, tokens, position_Nx1, controls.repetition_penalty)
  if controls.no_repeat_ngram_size:
    logits = _forbid_ngrams(logits, tokens, position_Nx1, controls.no_repeat_ngram_size)
  ends = [(end,) for end in end_ids(eos_id)]
  if words := [word for word in map(tuple, controls.bad_words_ids) if word not in ends]:
    logits = _forbid_words(logits, tokens, position_Nx1, words)
  if controls.min_length or controls.min_new_tokens:
    new_Nx1 = position_Nx1 - jnp.sum(prompts[:, 1:] != controls.pad_id, axis=1, keepdims=True)
    is_short = (position_Nx1 + 1 < controls.min_length) | (new_Nx1 < controls.min_new_tokens)
    ends_NE = jnp.broadcast_to(jnp.array(end_ids(eos_id)), (len(logits), len(ends)))
    logits = _forbid(logits, ends_NE, is_short)
  return logits


def penalize_repetition(
  logits_NV: jax.Array, tokens_NL: jax.Array, position_Nx1: jax.Array, penalty: float | jax.Array
) -> jax.Array:
  """Returns the logits [N, V] with those of the tokens so far made smaller; `penalty` may be [N, 1]."""
  is_past = jnp.arange(tokens_NL.shape[1])[None] <= position_Nx1
  scores_NL = jnp.take_along_axis(logits_NV, tokens_NL, axis=1)
  scores_NL = jnp.where(scores_NL < 0, scores_NL * penalty, scores_NL / penalty)
  return _replace(logits_NV, tokens_NL, is_past, scores_NL)


def _forbid_ngrams(
  logits_NV: jax.Array, tokens_NL: jax.Array, position_Nx1: jax.Array, size: int
) -> jax.Array:
  # An n-gram that starts at position s has its last token, which may be forbidden, at s + size - 1.
  is_repeated = jnp.arange(tokens_NL.shape[1])[None, size - 1 :] <= position_Nx1
  latest_NC = _latest(tokens_NL, position_Nx1, size - 1)
  for n in range(size - 1):
    is_repeated &= tokens_NL[:, n : n + is_repeated.shape[1]] == latest_NC[:, n : n + 1]
  return _forbid(logits_NV, tokens_NL[:, size - 1 :], is_repeated)


def _forbid_words(
  logits_NV: jax.Array,
  tokens_NL: jax.Array,
  position_Nx1: jax.Array,
  words: Sequence[tuple[int, ...]],
) -> jax.Array:
  vocab = logits_NV.shape[1]
  for word in words:
    if not word or not all(0 <= token < vocab for token in word):
      raise ValueError(
        f"each of bad_words_ids must be a list of token ids from 0 to {vocab - 1}, got {list(word)}"
      )
  count = max(map(len, words)) - 1
  starts_1WC = np.array([[(_ANY,) * (count + 1 - len(word)) + word[:-1] for word in words]], int)
  latest_Nx1xC = _latest(tokens_NL, position_Nx1, count)[:, None]
  has_begun = ((starts_1WC == latest_Nx1xC) | (starts_1WC == _ANY)).all(axis=-1)
  ends_NW = jnp.broadcast_to(jnp.array([word[-1] for word in words])[None], has_begun.shape)
  return _forbid(logits_NV, ends_NW, has_begun)


def _latest(tokens_NL: jax.Array, position_Nx1: jax.Array, count: int) -> jax.Array:
  """Returns the last tokens [N, count] up to a position, after _NONE where there are fewer."""
  index_NC = position_Nx1 + jnp.arange(1 - count, 1)[None]
  latest_NC = jnp.take_along_axis(tokens_NL, jnp.maximum(index_NC, 0), axis=1)
  return jnp.where(index_NC < 0, _NONE, latest_NC)


def _forbid(logits_NV: jax.Array, tokens_NK: jax.Array, where_NK: jax.Array) -> jax.Array:
  return _replace(logits_NV, tokens_NK, where_NK, jnp.asarray(NEG_INF, logits_NV.dtype))


def _replace(
  logits_NV: jax.Array, tokens_NK: jax.Array, where_NK: jax.Array, values: jax.Array
) -> jax.Array:
  """Returns the logits with `values`, a scalar or [N, K], for some of the tokens."""
  chosen_NK = jnp.where(where_NK, tokens_NK, logits_NV.shape[1])  # This index is dropped.
  rows_Nx1 = jnp.arange(len(tokens_NK))[:, None]
  return logits_NV.at[rows_Nx1, chosen_NK].set(values, mode="drop")


_SIGN = jnp.iinfo(jnp.int32).min
_ALL_BUT_SIGN = jnp.iinfo(jnp.int32).max
_EXPONENT = 0x7F800000


def int32_bsearch(
  batch_shape: Sequence[int], predicate: Callable[[Int32[Array, "..."]], Bool[Array, "..."]]
) -> Int32[Array, "..."]:
  """Returns the largest int32 for which the predicate is false, for each element of the batch.

  Args:
    batch_shape: the shape of the thresholds.
    predicate: a function of thresholds that is false up to some number and true above it. If it is
      true everywhere, the smallest int32 is returned.
  """
  # Starting from the smallest number, set each bit, from the highest, if the predicate stays false.
  smallest = jnp.full(tuple(batch_shape), _SIGN, jnp.int32)
  is_negative = predicate(jnp.zeros(tuple(batch_shape), jnp.int32))
  found = jnp.where(is_negative, smallest, 0)

  def set_bit(i: jax.Array, found: jax.Array) -> jax.Array:
    larger = found | (jnp.int32(1) << (30 - i))
    return jnp.where(predicate(larger), found, larger)

  return jax.lax.fori_loop(0, 31, set_bit, found)


def float32_bsearch(
  batch_shape: Sequence[int], predicate: Callable[[Float[Array, "..."]], Bool[Array, "..."]]
) -> Float[Array, "..."]:
  """Returns the largest finite float32 for which the predicate is false, for each element of the batch.

  Args:
    batch_shape: the shape of the thresholds.
    predicate: see `int32_bsearch`; its thresholds are float32.
  """

  def on_bits(ordered: jax.Array) -> jax.Array:
    bits = _swap_order(ordered)
    is_finite = (bits & _EXPONENT) != _EXPONENT
    # Infinities and NaNs are at both ends: those below count as false, those above as true.
    return jnp.where(is_finite, predicate(_as_float(bits)), ordered >= 0)

  return _as_float(_swap_order(int32_bsearch(batch_shape, on_bits)))


def topk_mask(
  x: Float[Array, "*batch vocab"],
  k: int | Int32[Array, "*#batch"],
  replace_val: float | np.ndarray | Float[Array, ""],
) -> Float[Array, "*batch vocab"]:
  """Returns `x` with all but the k largest entries of each row replaced; ties with the k-th are kept.

  Args:
    x: the rows.
    k: the number of entries to keep, one for all rows or one for each; may be traced.
    replace_val: the value of the other entries.
  """

  # The cutoff is the smallest number with fewer than k entries above it. The search finds the largest
  # number with a property, so it is applied to negated numbers.
  def has_k_above(negated_B: jax.Array) -> jax.Array:
    return jnp.sum(x > -negated_B[..., None], axis=-1) >= k

  cutoff_B = -float32_bsearch(x.shape[:-1], has_k_above)
  return jnp.where(x >= cutoff_B[..., None], x, jnp.asarray(replace_val, x.dtype))


def topp_mask(
  logits: Float[Array, "*batch vocab"],
  p: float | Float[Array, "*#batch"],
  replace_val: float | np.ndarray | Float[Array, ""],
) -> Float[Array, "*batch vocab"]:
  """Returns `logits` with all but the most probable entries, whose total probability is p, replaced.

  Args:
    logits: the rows.
    p: the total probability that the smallest set of kept entries reaches, one for all rows or one
      for each; may be traced.
    replace_val: the value of the other entries.
  """
  probs = jax.nn.softmax(logits, axis=-1)

  def falls_short(threshold_B: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(probs >= threshold_B[..., None], probs, 0.0), axis=-1) < p

  threshold_B = float32_bsearch(logits.shape[:-1], falls_short)
  return jnp.where(probs >= threshold_B[..., None], logits, jnp.asarray(replace_val, logits.dtype))


def _swap_order(x: jax.Array) -> jax.Array:
  """Maps int32 to the bits of float32 in the order of the floats, and back.

  Among negative floats larger bits are smaller numbers, so those bits are flipped.
  """
  return x ^ jnp.where(x < 0, jnp.int32(_ALL_BUT_SIGN), jnp.int32(0))


def _as_float(bits: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(bits, jnp.float32)
