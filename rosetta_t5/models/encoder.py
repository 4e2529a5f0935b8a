"""The encoder of an encoder-decoder model, which makes vectors of texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import freeze
from jaxtyping import Array, Float

from rosetta_t5.models.base_model import Batch, PyTree
from rosetta_t5.models.encoder_decoder import EncoderDecoderModel

POOLINGS = ("mean", "first")


class EncoderModel(EncoderDecoderModel):
  """An encoder-decoder model whose parameters are those of its encoder; it predicts nothing."""

  def get_initial_variables(
    self,
    rng: jax.Array,
    input_shapes: Mapping[str, tuple[int, ...]],
    input_types: Mapping[str, Any] | None = None,
  ) -> Mapping[str, PyTree]:
    """Returns the initial variables of the encoder and its embedding table."""
    tokens = jnp.ones(input_shapes["encoder_input_tokens"], jnp.int32)
    encode = self.module.encode
    return freeze(self.module.init(rng, tokens, enable_dropout=False, method=encode))

  def embed_batch(
    self, params: PyTree, batch: Batch, pooling: str = "mean"
  ) -> Float[Array, "B D"] | Float[Array, "B S D"]:
    """Returns one float32 vector of each text, or of each of its tokens.

    Args:
      params: the encoder's parameters.
      batch: `encoder_input_tokens` [B, S].
      pooling: "mean" of the encoder's outputs for all tokens that are not padding, or "first" for
        that of the first token; "none" for all of them, which are zeros for padding.
    """
    tokens_BS = batch["encoder_input_tokens"]
    encode = self.module.encode
    encoded_BSD: jax.Array = self.module.apply(
      {"params": params}, tokens_BS, enable_dropout=False, method=encode
    ).astype(jnp.float32)
    encoded_BSD = encoded_BSD[:, -tokens_BS.shape[1] :]  # after the vectors of a trained prompt
    if pooling == "first":
      return encoded_BSD[:, 0]
    real_BS1 = (tokens_BS != self.pad_id)[..., None]
    if pooling == "none":
      return encoded_BSD * real_BS1
    return jnp.sum(encoded_BSD * real_BS1, 1) / jnp.maximum(jnp.sum(real_BS1, 1), 1)
