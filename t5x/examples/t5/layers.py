"""T5X's `examples.t5.layers`."""

from rosetta_t5.networks.layers.attention import MultiHeadDotProductAttention
from rosetta_t5.networks.layers.dense import DenseGeneral, MlpBlock
from rosetta_t5.networks.layers.dot_product_attention import dot_product_attention
from rosetta_t5.networks.layers.embedding import Embed
from rosetta_t5.networks.layers.norms import LayerNorm
from rosetta_t5.networks.layers.positions import *
