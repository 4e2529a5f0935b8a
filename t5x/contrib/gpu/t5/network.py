"""T5X's `contrib.gpu.t5.network`."""

from rosetta_t5.networks.t5 import (
  Decoder,
  DecoderLayer,
  Encoder,
  EncoderLayer,
  T5Config,
  Transformer,
)
