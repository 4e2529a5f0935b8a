"""T5X's `examples.t5.network`."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax

from rosetta_t5.networks.block import Block
from rosetta_t5.networks.config import T5Config
from rosetta_t5.networks.layer_kinds import LayerKind
from rosetta_t5.networks.layers.stack import LayerInputs
from rosetta_t5.networks.transformer import Decoder, Encoder, Transformer


def call_block(layer: Any, side: str, x: jax.Array, inputs: LayerInputs) -> jax.Array:
  """Returns the output of a layer of a user's stack, which has `config` and `relative_embedding`."""
  length = x.shape[layer.config.row_axes.index("length")]
  if inputs.decode and inputs.cache_length:
    length = inputs.cache_length
  bias = layer.relative_embedding and layer.relative_embedding(length, length, side == "encoder")
  block = Block(layer.config, LayerKind(side, crosses=inputs.encoded is not None))
  nn.share_scope(layer, block)
  output: jax.Array = block(x, dataclasses.replace(inputs, bias=bias))[0]
  return output


class EncoderLayer(nn.Module):
  """An encoder layer for users' encoders.

  Attributes:
    config: sizes and settings.
    relative_embedding: returns the bias, such as `layers.RelativePositionBiases`; None for no bias.
  """

  config: T5Config
  relative_embedding: Any = None

  @nn.compact
  def __call__(
    self, inputs: jax.Array, encoder_mask: Any = None, deterministic: bool = False
  ) -> jax.Array:
    """Returns the layer's output, [batch, length, features] as the inputs."""
    options = LayerInputs(visible=encoder_mask, deterministic=deterministic)
    return call_block(self, "encoder", inputs, options)


class DecoderLayer(nn.Module):
  """A decoder layer for users' decoders; its attributes are those of `EncoderLayer`."""

  config: T5Config
  relative_embedding: Any = None

  @nn.compact
  def __call__(
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
    options = LayerInputs(
      visible=decoder_mask,
      cross_visible=encoder_decoder_mask,
      encoded=encoded,
      deterministic=deterministic,
      decode=decode,
      cache_length=max_decode_length,
    )
    return call_block(self, "decoder", inputs, options)
