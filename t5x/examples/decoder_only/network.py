"""T5X's `examples.decoder_only.network`."""

from rosetta_t5.networks.decoder import Decoder, DecoderLayer, DecoderWrapper, TransformerConfig
