"""T5X's `examples.scalable_t5.layers`."""

from rosetta_t5.networks.attention import dot_product_attention
from rosetta_t5.networks.dense import nd_dense_init
from rosetta_t5.networks.embedding import (
  Embed,
  LayerNorm,
  RelativePositionBiases,
  default_embed_init,
)
from rosetta_t5.networks.masks import (
  combine_biases,
  combine_masks,
  make_attention_mask,
  make_causal_mask,
  make_decoder_mask,
)
from rosetta_t5.networks.nd_layers import (
  DenseGeneral,
  MlpBlock,
  MultiHeadDotProductAttention,
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
  "default_embed_init",
  "dot_product_attention",
  "make_attention_mask",
  "make_causal_mask",
  "make_decoder_mask",
  "nd_dense_init",
]
