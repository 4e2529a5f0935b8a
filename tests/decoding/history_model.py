"""A tiny language model whose logits depend on the whole history, which it stores in its cache.

Any mistake in the cache (a beam not moved with its sequence, a position skipped) changes its logits.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

_STATES = 997


@dataclasses.dataclass
class HistoryModel:
  """Random but fixed logits for each history of tokens.

  Attributes:
    vocab: the number of tokens; 0 is padding and 1 ends a sequence.
    length: the number of positions in the cache.
    seed: the seed of the random logits.
    offset: 1 puts a dimension for layers before the batch, as scanned layers do.
    per_sequence_index: whether the cache's index is [batch] instead of a scalar.
    eos_bias: added to the logit of the token that ends a sequence.
  """

  vocab: int
  length: int
  seed: int = 0
  offset: int = 0
  per_sequence_index: bool = False
  eos_bias: float = 0.0

  def __post_init__(self):
    rng = np.random.default_rng(self.seed)
    self.table = rng.normal(size=(_STATES, self.vocab)).astype(np.float32) * 2
    self.table[:, 1] += self.eos_bias
    self.weights = rng.integers(1, _STATES, self.length).astype(np.int32)

  def cache(self, batch: int) -> dict:
    """Returns an empty cache, with an entry that has no batch dimension."""
    layers = (2,) * self.offset
    index = jnp.zeros((*layers, batch), jnp.int32) if self.per_sequence_index else jnp.int32(0)
    tokens = jnp.zeros((*layers, batch, self.length), jnp.int32)
    return {"layer": {"cached_key": tokens, "cache_index": index, "cached_bias": jnp.ones(3)}}

  def tokens_to_logits(self, state):
    """Returns the logits after `cur_token`, which is written into the cache."""
    layer = state.cache["layer"]
    assert layer["cached_bias"].shape == (3,)
    tokens = layer["cached_key"]
    index = layer["cache_index"][..., None] if layer["cache_index"].ndim else layer["cache_index"]
    position = jnp.broadcast_to(jnp.arange(self.length), tokens.shape)
    tokens = jnp.where(position == index, jnp.broadcast_to(state.cur_token, tokens.shape), tokens)
    new = layer | {"cached_key": tokens, "cache_index": layer["cache_index"] + 1}
    history_BL = tokens[-1] if self.offset else tokens
    return self._logits(history_BL), {"layer": new}

  def _logits(self, history_BL: jax.Array) -> jax.Array:
    return jnp.asarray(self.table)[(history_BL * self.weights[None]).sum(-1) % _STATES]

  def log_probs(self, history: list[int]) -> np.ndarray:
    """Returns the log probabilities of the token after a history that begins with the start token 0."""
    padded = np.zeros(self.length, np.int64)
    padded[: len(history)] = history
    logits = self.table[(padded * self.weights).sum() % _STATES].astype(np.float64)
    return logits - np.log(np.exp(logits).sum())
