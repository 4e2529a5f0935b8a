"""T5X's `examples.scalable_t5.layers`."""

from rosetta_t5.networks.layers.dense import nd_dense_init
from rosetta_t5.networks.layers.dot_product_attention import dot_product_attention
from rosetta_t5.networks.layers.embedding import Embed
from rosetta_t5.networks.layers.norms import LayerNorm
from rosetta_t5.networks.layers.positions import *
from rosetta_t5.networks.scalable_t5 import DenseGeneral, MlpBlock, MultiHeadDotProductAttention
