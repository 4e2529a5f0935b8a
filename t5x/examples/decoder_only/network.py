"""T5X's `examples.decoder_only.network`."""

from rosetta_t5.networks.decoder_only import (
  Decoder,
  DecoderLayer,
  DecoderWrapper,
  TransformerConfig,
)

__all__ = [
  "Decoder",
  "DecoderLayer",
  "DecoderWrapper",
  "TransformerConfig",
]
