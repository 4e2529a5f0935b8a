"""T5X's `examples.t5.network`."""

from rosetta_t5.compat.t5_layers import DecoderLayer, EncoderLayer
from rosetta_t5.networks.t5 import Decoder, Encoder, T5Config, Transformer
