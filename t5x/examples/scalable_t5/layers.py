"""T5X's `examples.scalable_t5.layers`."""

from rosetta_t5.networks.layers.dense import nd_dense_init
from rosetta_t5.networks.scalable_t5 import (
  DenseGeneral,
  MlpBlock,
  MultiHeadDotProductAttention,
)
from t5x.examples.t5.layers import (
  Embed,
  LayerNorm,
  RelativePositionBiases,
  combine_biases,
  combine_masks,
  default_embed_init,
  dot_product_attention,
  make_attention_mask,
  make_causal_mask,
  make_decoder_mask,
)
