"""T5X's `examples.scalable_t5.layers`, whose kernels keep heads and head size as separate dimensions."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from rosetta_t5.networks.layers import dense
from rosetta_t5.networks.layers.dense import Initializer
from rosetta_t5.networks.layers.embedding import Embed
from rosetta_t5.networks.layers.norms import LayerNorm
from rosetta_t5.networks.layers.positions import RelativePositionBiases
from t5x.examples.t5 import layers
from t5x.examples.t5.layers import (
  combine_biases,
  combine_masks,
  dot_product_attention,
  make_attention_mask,
  make_causal_mask,
  make_decoder_mask,
)


def nd_dense_init(scale: float, mode: str, distribution: str) -> Initializer:
  """Returns an initializer of kernels, which may be called with their input and output dimensions.

  Args:
    scale: a factor on the variance.
    mode: `fan_in`, `fan_out` or `fan_avg`.
    distribution: `normal`, `truncated_normal` or `uniform`.
  """

  def initialize(
    key: Any, shape: Any, dtype: Any = jnp.float32, in_axis: Any = -2, out_axis: Any = -1
  ) -> Any:
    scaling: Any = nn.initializers.variance_scaling
    return scaling(scale, mode, distribution, in_axis, out_axis)(key, shape, dtype)

  return initialize


class DenseGeneral(dense.DenseGeneral):
  """A projection whose kernel is stored as [*inputs, *outputs]; see `dense.DenseGeneral`."""

  kernel_init: Initializer = nd_dense_init(1.0, "fan_in", "truncated_normal")
  nd_kernel: bool = True

  def __post_init__(self) -> None:
    """Lets `kernel_init` be one that needs the input and output dimensions, as in T5X."""
    init: Any = self.kernel_init
    self.kernel_init = lambda key, shape, dtype, *_: init(key, shape, dtype, 0, 1)
    super().__post_init__()


class MlpBlock(dense.MlpBlock):
  """T5's feed-forward block; see `dense.MlpBlock`."""

  kernel_init: Initializer = nd_dense_init(1.0, "fan_in", "truncated_normal")


class MultiHeadDotProductAttention(layers.MultiHeadDotProductAttention):
  """T5's attention with kernels [embed, heads, kv] and [heads, kv, embed]; see `attention`."""

  kernel_init: Initializer = nd_dense_init(1.0, "fan_in", "normal")
  nd_kernel: bool = True
