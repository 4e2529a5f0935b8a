"""Models: the interface that runs use, encoder-decoder models and decoder-only models."""

from rosetta_t5.models.base_model import BaseModel
from rosetta_t5.models.base_transformer import BaseTransformerModel
from rosetta_t5.models.decoder_only import DecoderOnlyModel
from rosetta_t5.models.encoder import DualEncoderModel, EncoderModel
from rosetta_t5.models.encoder_decoder import EncoderDecoderModel
