"""What decodes may contain: controls of the next token's logits, with Transformers' names and definitions.

A token that a control forbids gets the logit NEG_INF. The tokens so far begin with the start token, and
contain the prompt, if there is one. Both count, as in Transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rosetta_t5.decoding.state import NEG_INF

_ANY, _NONE = -1, -2  # In place of a token: one that equals every token, and one that equals none.


class Controls(NamedTuple):
  """The controls of a decode; the defaults change nothing.

  Attributes:
    repetition_penalty: positive logits of the tokens so far are divided by it, and others multiplied
      (Keskar et al. 2019, arXiv:1909.05858).
    no_repeat_ngram_size: no sequence of this many tokens occurs twice; 0 allows all.
    min_length: a decode does not end before it has this many tokens, start token and prompt included.
    min_new_tokens: the same without start token and prompt.
    bad_words_ids: sequences of tokens that do not occur. The token that ends a decode is left out.
  """

  repetition_penalty: float = 1.0
  no_repeat_ngram_size: int = 0
  min_length: int = 0
  min_new_tokens: int = 0
  bad_words_ids: Sequence[Sequence[int]] = ()


NO_CONTROLS = Controls()


def apply_controls(
  logits: Float[Array, "decodes vocab"],
  tokens: Int[Array, "decodes length"],
  position: Int[Array, " decodes"],
  prompts: Int[Array, "decodes prompt_length"],
  eos_id: int,
  controls: Controls,
) -> Float[Array, "decodes vocab"]:
  """Returns the logits, or log probabilities, of the next tokens with all controls applied.

  Args:
    logits: those of the model.
    tokens: the tokens so far, from the start token at position 0; later positions are ignored.
    position: the position of each decode's newest token.
    prompts: the start token, and the prompt's tokens up to the first 0.
    eos_id: the token that ends a decode.
    controls: what to apply. Defaults add nothing to the program.

  Raises:
    ValueError: a bad word is empty, or has a token that is not in the vocabulary.
  """
  position_Nx1 = position[:, None]
  if controls.repetition_penalty != 1.0:
    logits = _penalize_repetition(logits, tokens, position_Nx1, controls.repetition_penalty)
  if controls.no_repeat_ngram_size:
    logits = _forbid_ngrams(logits, tokens, position_Nx1, controls.no_repeat_ngram_size)
  if words := [word for word in map(tuple, controls.bad_words_ids) if word != (eos_id,)]:
    logits = _forbid_words(logits, tokens, position_Nx1, words)
  if controls.min_length or controls.min_new_tokens:
    new_Nx1 = position_Nx1 - jnp.sum(prompts[:, 1:] != 0, axis=1, keepdims=True)
    is_short = (position_Nx1 + 1 < controls.min_length) | (new_Nx1 < controls.min_new_tokens)
    logits = _forbid(logits, jnp.full_like(position_Nx1, eos_id), is_short)
  return logits


def _penalize_repetition(
  logits_NV: jax.Array, tokens_NL: jax.Array, position_Nx1: jax.Array, penalty: float
) -> jax.Array:
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
