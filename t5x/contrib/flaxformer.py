"""Classes of flaxformer by the names that gin files use; `EncoderDecoder` makes a T5 of this project from them.

The parameters have flaxformer's names, shapes and initial values, so its checkpoints of T5 1.1 and mT5 can be
read. Arguments that are not read here, such as initializers, must have the values of flaxformer's T5 1.1.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import flax.linen as nn

from rosetta_t5 import adapters
from rosetta_t5.networks.config import T5Config
from rosetta_t5.networks.transformer import Transformer


class Part(types.SimpleNamespace):
  """A part of a network: it keeps its arguments, of which `EncoderDecoder` reads some.

  Attributes:
    names: the arguments that the part may have, besides `dtype` and `name`.
    compared: those that must be the same in all layers.
  """

  names: str = ""
  compared: str = ""

  def __init__(self, **arguments: Any):
    """Keeps the arguments, which have flaxformer's names; raises ValueError for an unknown one."""
    if unknown := arguments.keys() - {"dtype", "name", *self.names.split()}:
      raise ValueError(
        f"flaxformer's {type(self).__name__} has no argument {sorted(unknown)[0]!r} here"
      )
    super().__init__(**arguments)

  def __eq__(self, other: object) -> bool:
    """Returns whether the types and the arguments in `compared` are equal."""
    same_type = type(self) is type(other)
    return same_type and all(getattr(self, n) == getattr(other, n) for n in self.compared.split())


class Embed(Part):
  """The token embedding, with `num_embeddings` rows of `features`."""

  names = "num_embeddings features cast_input_dtype attend_dtype embedding_init one_hot"


class T5LayerNorm(Part):
  """T5's norm."""

  names = "epsilon"


class RelativePositionBiases(Part):
  """T5's relative bias, which the layers of a stack share."""

  names = "num_heads num_buckets max_distance embedding_init"
  num_buckets = 32
  max_distance = 128


class DenseGeneral(Part):
  """The output layer."""

  names = "features use_bias kernel_init bias_init kernel_axis_names"


class MlpBlock(Part):
  """A feed-forward block; with `intermediate_conv`, an `IA3` scales its hidden layer."""

  names = (
    "intermediate_dim use_bias activations kernel_init bias_init intermediate_dropout_rate "
    "final_dropout_rate intermediate_conv"
  )
  compared = "intermediate_dim activations intermediate_dropout_rate use_bias intermediate_conv"
  use_bias = False
  activations = ("relu",)
  intermediate_dropout_rate = 0.0
  intermediate_conv = None


class MultiHeadDotProductAttention(Part):
  """Attention; with `k_conv` and `v_conv`, `IA3Attention` scales its keys and values."""

  names = (
    "num_heads head_dim use_bias kernel_init bias_init broadcast_dropout dropout_rate k_conv v_conv"
  )
  compared = "num_heads head_dim dropout_rate use_bias k_conv v_conv"
  use_bias = False
  dropout_rate = 0.0
  k_conv = v_conv = None


_OF_LAYERS = "mlp dropout_factory layer_norm_factory activation_partitioning_dims"
_OF_STACKS = (
  "num_layers layer_factory shared_relative_position_bias_factory layer_norm_factory "
  "position_embedder_factory"
)


class EncoderLayer(Part):
  """A layer of the encoder."""

  names = f"attention {_OF_LAYERS}"


class DecoderLayer(Part):
  """A layer of the decoder."""

  names = f"self_attention encoder_decoder_attention {_OF_LAYERS}"


class Encoder(Part):
  """The stack of `num_layers` encoder layers, which `layer_factory` makes."""

  names = f"{_OF_STACKS} input_dropout_factory output_dropout_factory"

  def settings(self) -> dict[str, Any]:
    """Returns the settings of `T5Config` that the stack makes."""
    bias = self.shared_relative_position_bias_factory()
    buckets = {"num_buckets": bias.num_buckets, "max_distance": bias.max_distance}
    return {"num_encoder_layers": self.num_layers, **buckets}


class Decoder(Part):
  """The stack of decoder layers; without `output_logits_factory`, logits are tied to the embedding."""

  names = f"{_OF_STACKS} output_logits_factory dropout_factory"
  output_logits_factory = None


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
  cross_attention = decoder_layer.encoder_decoder_attention
  others = (decoder_layer.self_attention, cross_attention, decoder_layer.mlp)
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
