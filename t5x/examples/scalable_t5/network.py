"""T5X's `examples.scalable_t5.network`."""

from rosetta_t5.networks.config import ScalableT5Config as T5Config
from rosetta_t5.networks.transformer import Decoder, Encoder, Transformer
from t5x.examples.t5.network import DecoderLayer, EncoderLayer
