"""T5X's `examples.decoder_only.network`."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax

from rosetta_t5.networks.config import TransformerConfig
from rosetta_t5.networks.layers.stack import LayerInputs
from rosetta_t5.networks.transformer import Decoder, DecoderWrapper
from t5x.examples.t5.network import call_block


class DecoderLayer(nn.Module):
  """A decoder layer for users' decoders.

  Attributes:
    config: sizes and settings.
    relative_embedding: returns the bias, such as `layers.RelativePositionBiases`; None for no bias.
  """

  config: TransformerConfig
  relative_embedding: Any = None

  @nn.compact
  def __call__(
    self,
    inputs: jax.Array,
    decoder_mask: Any = None,
    deterministic: bool = False,
    decode: bool = False,
    max_decode_length: int | None = None,
    prefill: bool = False,
    prefill_lengths: jax.Array | None = None,
  ) -> jax.Array:
    """Returns the layer's output, [batch, length, features] as the inputs."""
    options = LayerInputs(
      visible=decoder_mask,
      deterministic=deterministic,
      decode=decode,
      cache_length=max_decode_length,
      prefill=prefill,
      prefill_lengths=prefill_lengths,
    )
    return call_block(self, "decoder", inputs, options)
