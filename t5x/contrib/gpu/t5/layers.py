"""T5X's `contrib.gpu.t5.layers`."""

from rosetta_t5.networks.attention import (
  MultiHeadDotProductAttention,
  dot_product_attention,
)
from rosetta_t5.networks.dense import (
  DenseGeneral,
  MlpBlock,
)
from rosetta_t5.networks.embedding import (
  Embed,
  LayerNorm,
  RelativePositionBiases,
)
from rosetta_t5.networks.masks import (
  combine_biases,
  combine_masks,
  make_attention_mask,
  make_causal_mask,
  make_decoder_mask,
)

__all__ = [
  "DenseGeneral",
  "Embed",
  "LayerNorm",
  "MlpBlock",
  "MultiHeadDotProductAttention",
  "RelativePositionBiases",
  "combine_biases",
  "combine_masks",
  "dot_product_attention",
  "make_attention_mask",
  "make_causal_mask",
  "make_decoder_mask",
]
