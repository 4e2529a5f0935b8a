"""T5X's `examples.t5.network`."""

from typing import Any

import jax

from rosetta_t5.networks import t5
from rosetta_t5.networks.t5 import Decoder, Encoder, T5Config, Transformer, bias_length


class EncoderLayer(t5.EncoderLayer):
  """An encoder layer for users' encoders.

  Attributes:
    relative_embedding: returns the bias, such as `layers.RelativePositionBiases`; None for no bias.
  """

  relative_embedding: Any = None

  def __call__(  # type: ignore[override]
    self, inputs: jax.Array, encoder_mask: Any = None, deterministic: bool = False
  ) -> jax.Array:
    """Returns the layer's output, [batch, length, features] as the inputs."""
    length = bias_length(self.config, inputs)
    bias = self.relative_embedding and self.relative_embedding(length, length, True)
    return super().__call__(inputs, encoder_mask, bias, deterministic)


class DecoderLayer(t5.DecoderLayer):
  """A decoder layer for users' decoders; `relative_embedding` is that of `EncoderLayer`."""

  relative_embedding: Any = None

  def __call__(  # type: ignore[override]
    self,
    inputs: jax.Array,
    encoded: jax.Array,
    decoder_mask: Any = None,
    encoder_decoder_mask: Any = None,
    deterministic: bool = False,
    decode: bool = False,
    max_decode_length: int | None = None,
  ) -> jax.Array:
    """Returns the layer's output, [batch, length, features] as the inputs."""
    length = bias_length(self.config, inputs, decode, max_decode_length)
    bias = self.relative_embedding and self.relative_embedding(length, length, False)
    return super().__call__(
      inputs, encoded, decoder_mask, encoder_decoder_mask, bias, deterministic, decode
    )
