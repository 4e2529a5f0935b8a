"""Classes of flaxformer by the names that gin files use; `EncoderDecoder` makes a T5 of this project from them.

The parameters have flaxformer's names, shapes and initial values, so its checkpoints of T5 1.1 and mT5 can be
read. Arguments that are not read here, such as initializers, must have the values of flaxformer's T5 1.1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn

from rosetta_t5 import adapters
from rosetta_t5.argument_types import Positive, Rate
from rosetta_t5.networks.config import T5Config
from rosetta_t5.networks.transformer import Transformer

Factory = Callable[[], Any]


@dataclasses.dataclass(kw_only=True)
class Embed:
  """The token embedding, with `num_embeddings` rows of `features`."""

  num_embeddings: Positive
  features: Positive
  cast_input_dtype: Any = None
  dtype: Any = "float32"
  attend_dtype: Any = None
  embedding_init: Any = dataclasses.field(default=None, compare=False)
  one_hot: bool = True
  name: str | None = None


@dataclasses.dataclass(kw_only=True)
class T5LayerNorm:
  """T5's norm."""

  dtype: Any = "float32"
  epsilon: float = 1e-6


@dataclasses.dataclass(kw_only=True)
class RelativePositionBiases:
  """T5's relative bias, which the layers of a stack share."""

  num_heads: Positive
  num_buckets: Positive = 32
  max_distance: Positive = 128
  dtype: Any = "float32"
  embedding_init: Any = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(kw_only=True)
class DenseGeneral:
  """The output layer."""

  features: Positive
  use_bias: bool = False
  dtype: Any = "float32"
  kernel_init: Any = dataclasses.field(default=None, compare=False)
  bias_init: Any = dataclasses.field(default=None, compare=False)
  kernel_axis_names: Sequence[str] = ("embed", "vocab")


@dataclasses.dataclass(kw_only=True)
class MlpBlock:
  """A feed-forward block; with `intermediate_conv`, an `IA3` scales its hidden layer."""

  intermediate_dim: Positive
  use_bias: bool = False
  activations: Sequence[str] = ("relu",)
  kernel_init: Any = dataclasses.field(default=None, compare=False)
  bias_init: Any = dataclasses.field(default=None, compare=False)
  intermediate_dropout_rate: Rate = 0.0
  final_dropout_rate: Rate = 0.0
  dtype: Any = "float32"
  intermediate_conv: Any = None


@dataclasses.dataclass(kw_only=True)
class MultiHeadDotProductAttention:
  """Attention; with `k_conv` and `v_conv`, `IA3Attention` scales its keys and values."""

  num_heads: Positive
  head_dim: Positive
  use_bias: bool = False
  dtype: Any = "float32"
  kernel_init: Any = dataclasses.field(default=None, compare=False)
  bias_init: Any = dataclasses.field(default=None, compare=False)
  broadcast_dropout: bool = True
  dropout_rate: Rate = 0.0
  k_conv: Any = None
  v_conv: Any = None


@dataclasses.dataclass(kw_only=True)
class EncoderLayer:
  """A layer of the encoder."""

  attention: MultiHeadDotProductAttention
  mlp: MlpBlock
  dropout_factory: Factory
  layer_norm_factory: Factory = T5LayerNorm
  activation_partitioning_dims: int = 1


@dataclasses.dataclass(kw_only=True)
class DecoderLayer:
  """A layer of the decoder."""

  self_attention: MultiHeadDotProductAttention
  encoder_decoder_attention: MultiHeadDotProductAttention
  mlp: MlpBlock
  dropout_factory: Factory
  layer_norm_factory: Factory = T5LayerNorm
  activation_partitioning_dims: int = 1


@dataclasses.dataclass(kw_only=True)
class Encoder:
  """The stack of encoder layers."""

  num_layers: Positive
  layer_factory: Callable[[], EncoderLayer]
  shared_relative_position_bias_factory: Callable[[], RelativePositionBiases]
  input_dropout_factory: Factory | None = None
  output_dropout_factory: Factory | None = None
  layer_norm_factory: Factory = T5LayerNorm
  position_embedder_factory: None = None
  dtype: Any = "float32"

  def settings(self) -> dict[str, Any]:
    """Returns the settings of `T5Config` that the stack makes."""
    bias = self.shared_relative_position_bias_factory()
    buckets = {"num_buckets": bias.num_buckets, "max_distance": bias.max_distance}
    return {"num_encoder_layers": self.num_layers, **buckets}


@dataclasses.dataclass(kw_only=True)
class Decoder:
  """The stack of decoder layers; without `output_logits_factory`, logits are tied to the embedding."""

  num_layers: Positive
  layer_factory: Callable[[], DecoderLayer]
  shared_relative_position_bias_factory: Callable[[], RelativePositionBiases]
  output_logits_factory: Callable[[], DenseGeneral] | None = None
  dropout_factory: Factory | None = None
  layer_norm_factory: Factory = T5LayerNorm
  position_embedder_factory: None = None
  dtype: Any = "float32"


def EncoderDecoder(
  encoder_factory: Callable[[], Encoder],
  decoder_factory: Callable[[], Decoder],
  shared_token_embedder_factory: Callable[[], Embed],
  dtype: Any = "float32",
) -> nn.Module:
  """Returns the network.

  Args:
    encoder_factory: makes the encoder.
    decoder_factory: makes the decoder, whose layers must have the sizes of the encoder's.
    shared_token_embedder_factory: makes the embedding of both.
    dtype: the type of activations.

  Raises:
    ValueError: T5 has no such layers.
  """
  encoder, decoder, embed = encoder_factory(), decoder_factory(), shared_token_embedder_factory()
  layer, decoder_layer = encoder.layer_factory(), decoder.layer_factory()
  attention, mlp = layer.attention, layer.mlp
  others = (
    decoder_layer.self_attention,
    decoder_layer.encoder_decoder_attention,
    decoder_layer.mlp,
  )
  rates = {attention.dropout_rate, mlp.intermediate_dropout_rate, layer.dropout_factory().rate}
  if (attention, attention, mlp) != others or attention.use_bias or mlp.use_bias or len(rates) > 1:
    raise ValueError(
      "EncoderLayer and DecoderLayer must have the same attention and mlp, one dropout rate and no biases, as "
      f"in T5, got {attention}, {mlp} and in the decoder {others}, with dropout rates {rates}"
    )
  network = Transformer(
    T5Config(
      vocab_size=embed.num_embeddings,
      emb_dim=embed.features,
      num_heads=attention.num_heads,
      head_dim=attention.head_dim,
      mlp_dim=mlp.intermediate_dim,
      mlp_activations=tuple(mlp.activations),
      num_decoder_layers=decoder.num_layers,
      dropout_rate=rates.pop(),
      dtype=dtype,
      logits_via_embedding=decoder.output_logits_factory is None,
      **encoder.settings(),
    )
  )
  scaled = (attention.k_conv, attention.v_conv, mlp.intermediate_conv)
  if not any(scaled):
    return network
  if not all(scaled):
    raise ValueError(
      "(IA)³ scales keys, values and the hidden layer: set all of MultiHeadDotProductAttention.k_conv and "
      f"v_conv and MlpBlock.intermediate_conv, got {scaled}"
    )
  return adapters.IA3().adapt(network)
