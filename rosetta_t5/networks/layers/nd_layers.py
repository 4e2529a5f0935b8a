"""T5X's scalable layers, whose kernels keep heads and head size as separate dimensions.

They compute the same as the layers of `attention` and `dense`; only their defaults differ.
"""

from __future__ import annotations

from rosetta_t5.networks.layers import attention, dense
from rosetta_t5.networks.layers.dense import Initializer, nd_dense_init


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
