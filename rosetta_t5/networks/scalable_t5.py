"""T5 for many layers and many devices: the layers of `networks.t5` in T5X's scalable parameter tree.

Each layer has a relative bias of its own, attention kernels keep heads as a dimension, and layers are
scanned with stacked parameters, so that the compiled program is as small for 24 layers as for 2.
Parameters have the names, shapes and initial values of T5X's scalable T5.
"""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
import jax
from flax import struct
from jaxtyping import Array, Bool, Float

from rosetta_t5.networks import t5
from rosetta_t5.networks.expert_settings import expert_layers
from rosetta_t5.networks.layers import attention, dense
from rosetta_t5.networks.layers.dense import Initializer, nd_dense_init
from rosetta_t5.networks.layers.layer_stack import call_layers
from rosetta_t5.networks.t5_config import T5Config as PlainT5Config

# T5X's layers whose kernels keep heads and head size as separate dimensions; only defaults differ.


class DenseGeneral(dense.DenseGeneral):
  """A projection whose kernel is stored as [*inputs, *outputs]; see `dense.DenseGeneral`."""

  kernel_init: Initializer = nd_dense_init(1.0, "fan_in", "truncated_normal")
  nd_kernel: bool = True


class MlpBlock(dense.MlpBlock):
  """T5's feed-forward block; see `dense.MlpBlock`."""

  kernel_init: Initializer = nd_dense_init(1.0, "fan_in", "truncated_normal")
  nd_kernel: bool = True


class MultiHeadDotProductAttention(attention.MultiHeadDotProductAttention):
  """T5's attention with kernels [embed, heads, kv] and [heads, kv, embed]; see `attention`."""

  kernel_init: Initializer = nd_dense_init(1.0, "fan_in", "normal")
  nd_kernel: bool = True


@struct.dataclass
class T5Config(PlainT5Config):
  """The sizes and settings of a scalable T5: those of T5, and how its layers are stacked.

  Attributes:
    scan_layers: whether layers are scanned and their parameters stacked under `encoder/encoder` and
      `decoder/decoder`; otherwise each layer has parameters of its own, `layers_0`, ... Initial values
      differ between the two, as in T5X.
    param_scan_axis: the axis that parameters are stacked along, 0 or 1.
  """

  scan_layers: bool = True
  param_scan_axis: int = 1

  attention_class: ClassVar[type] = MultiHeadDotProductAttention

  def __post_init__(self) -> None:
    """Refuses settings that T5 cannot be trained with, and axes that parameters cannot have."""
    super().__post_init__()
    if self.param_scan_axis not in (0, 1):
      raise ValueError(
        f"T5Config.param_scan_axis must be 0 or 1, got {self.param_scan_axis!r}: the scale of a norm "
        "has one dimension, so layers can be stacked before or after it"
      )


class EncoderLayer(t5.EncoderLayer):
  """T5's encoder layer with a relative bias of its own."""

  config: T5Config

  @nn.compact
  def __call__(  # type: ignore[override]
    self,
    inputs: Float[Array, "X Y D"],
    encoder_mask: Bool[Array, "B 1 S S"] | None = None,
    deterministic: bool = False,
  ) -> Any:
    """Returns the layer's output, or (output, None) as a scan requires if layers are scanned."""
    length = t5.bias_length(self.config, inputs)
    bias_1HSS = t5.make_relative_bias(self.config)(length, length, True)
    y = super().__call__(inputs, encoder_mask, bias_1HSS, deterministic)
    return (y, None) if self.config.scan_layers else y


class DecoderLayer(t5.DecoderLayer):
  """T5's decoder layer with a relative bias of its own."""

  config: T5Config

  @nn.compact
  def __call__(  # type: ignore[override]
    self,
    inputs: Float[Array, "X Y D"],
    encoded: Float[Array, "_ _ D"],
    decoder_mask: Bool[Array, "B 1 T T"] | None = None,
    encoder_decoder_mask: Bool[Array, "B 1 T S"] | None = None,
    deterministic: bool = False,
    decode: bool = False,
    max_decode_length: int | None = None,
  ) -> Any:
    """Returns the layer's output, or (output, None) as a scan requires if layers are scanned."""
    length = t5.bias_length(self.config, inputs, decode, max_decode_length)
    bias_1HLL = t5.make_relative_bias(self.config)(length, length, False)
    y = super().__call__(
      inputs, encoded, decoder_mask, encoder_decoder_mask, bias_1HLL, deterministic, decode
    )
    return (y, None) if self.config.scan_layers else y


class Encoder(t5.Encoder):
  """The stack of encoder layers."""

  config: T5Config

  def _layers(self, x: jax.Array, *call: Any) -> jax.Array:
    num_layers = self.config.num_encoder_layers
    options: Any = {"scan_name": "encoder", "expert_layers": expert_layers(self.config, "encoder")}
    return call_layers(self, EncoderLayer, (3,), num_layers, x, *call, **options)


class Decoder(t5.Decoder):
  """The stack of decoder layers, and the output layer."""

  config: T5Config

  def _layers(self, y: jax.Array, *call: Any) -> jax.Array:
    num_layers = self.config.num_decoder_layers
    options: Any = {"scan_name": "decoder", "expert_layers": expert_layers(self.config, "decoder")}
    return call_layers(self, DecoderLayer, (5, 6, 7), num_layers, y, *call, **options)


class Transformer(t5.Transformer):
  """The encoder-decoder network.

  Attributes:
    config: sizes and settings.
  """

  config: T5Config

  def setup(self) -> None:
    """Creates the encoder, the decoder and the embedding that they share."""
    self.token_embedder = t5.make_token_embedder(self.config)
    self.encoder = Encoder(self.config, self.token_embedder)
    self.decoder = Decoder(self.config, self.token_embedder)

  @property
  def scan_layers(self) -> bool:
    """Whether the cache has the layers as its first dimension and the batch as its second."""
    return bool(self.config.scan_layers)
