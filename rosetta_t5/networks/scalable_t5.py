"""T5 for many layers and many devices: the layers of `networks.t5` in T5X's other tree.

A layer has a relative bias of its own, its attention kernels keep heads apart, and one program serves
all layers: they are scanned, their parameters stacked. A program then has one size for 2 layers and
for 24. Parameters have the names, shapes and initial values of T5X's scalable T5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
from flax import struct
from jaxtyping import Array, Bool, Float

from rosetta_t5.networks import t5
from rosetta_t5.networks.kernel_choice import SegmentMask
from rosetta_t5.networks.layers import nd_layers
from rosetta_t5.networks.layers.layer_stack import scanned_stack
from rosetta_t5.networks.layers.remat import remat_layer
from rosetta_t5.networks.t5_config import T5Config as PlainT5Config


@struct.dataclass
class T5Config(PlainT5Config):
  """The sizes and switches of a scalable T5: those of T5, and how its layers are stacked.

  Attributes:
    scan_layers: whether one program serves all layers, whose parameters are then stacked under
      `encoder/encoder` and `decoder/decoder`; else each layer has parameters `layers_0`, ... of its
      own. Initial values differ between the two, as in T5X.
    param_scan_axis: the axis that parameters are stacked on, 0 or 1.
  """

  scan_layers: bool = True
  param_scan_axis: int = 1

  attention_class: ClassVar[type] = nd_layers.MultiHeadDotProductAttention

  def __post_init__(self) -> None:
    """Refuses what cannot be stacked, and what T5 refuses."""
    super().__post_init__()
    if self.param_scan_axis not in (0, 1):
      raise ValueError(
        f"T5Config.param_scan_axis = {self.param_scan_axis!r} must be 0 or 1: a norm's scale has one "
        "dimension, so layers can be stacked before it or after it"
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
    """Returns the layer's output; where layers are scanned, (output, None), a step of the scan."""
    length = t5.length_of(self.config, inputs)
    bias_1HSS = t5.relative_bias(self.config)(length, length, True)
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
    """Returns the layer's output; where layers are scanned, (output, None), a step of the scan."""
    length = t5.bias_length(t5.length_of(self.config, inputs), decode, max_decode_length)
    bias_1HLL = t5.relative_bias(self.config)(length, length, False)
    y = super().__call__(
      inputs, encoded, decoder_mask, encoder_decoder_mask, bias_1HLL, deterministic, decode
    )
    return (y, None) if self.config.scan_layers else y


class Encoder(t5.Encoder):
  """The stack of encoder layers."""

  config: T5Config

  def _layers(
    self, x_BSD: jax.Array, mask_B1SS: jax.Array | SegmentMask | None, deterministic: bool
  ) -> jax.Array:
    cfg = self.config
    layer_cls = remat_layer(EncoderLayer, cfg.remat_policy, (3,), scanned=cfg.scan_layers)
    layers = _stack(self, layer_cls, "encoder", cfg.num_encoder_layers)
    return t5.transposed(cfg, layers(t5.transposed(cfg, x_BSD), mask_B1SS, deterministic))


class Decoder(t5.Decoder):
  """The stack of decoder layers, and the output layer."""

  config: T5Config

  def _layers(self, y_BTD: jax.Array, encoded_BSD: jax.Array, *arguments: Any) -> jax.Array:
    cfg = self.config
    layer_cls = remat_layer(DecoderLayer, cfg.remat_policy, (5, 6, 7), scanned=cfg.scan_layers)
    layers = _stack(self, layer_cls, "decoder", cfg.num_decoder_layers)
    y, encoded = t5.transposed(cfg, y_BTD), t5.transposed(cfg, encoded_BSD)
    return t5.transposed(cfg, layers(y, encoded, *arguments))


def _stack(
  module: Encoder | Decoder, layer_cls: Any, name: str, num_layers: int
) -> Callable[..., jax.Array]:
  """Returns a function that calls all layers of `module` on activations and arguments they share."""

  def loop(x: jax.Array, *arguments: Any) -> jax.Array:
    for layer in range(num_layers):
      x = layer_cls(module.config, name=f"layers_{layer}")(x, *arguments)
    return x

  return scanned_stack(module, layer_cls, name, num_layers) if module.config.scan_layers else loop


class Transformer(t5.Transformer):
  """The whole encoder-decoder model.

  Attributes:
    config: sizes and switches.
  """

  config: T5Config

  def setup(self) -> None:
    """Creates the embedding that encoder, decoder and tied logits share."""
    self.token_embedder = t5.token_embedder(self.config)
    self.encoder = Encoder(self.config, self.token_embedder)
    self.decoder = Decoder(self.config, self.token_embedder)

  @property
  def scan_layers(self) -> bool:
    """Whether a cache has its layers first, the batch second."""
    return bool(self.config.scan_layers)
