"""Models: the interface that runs use, encoder-decoder models and decoder-only models."""

from rosetta_t5.models.base_model import (
  BaseModel,
  DecodeFnCallable,
  TokensIdsToLogitsCallable,
  get_input_vocabulary,
  get_output_vocabulary,
)
from rosetta_t5.models.base_transformer import BaseTransformerModel
from rosetta_t5.models.batch_metrics import (
  compute_base_metrics,
  compute_metrics,
  compute_weighted_accuracy,
  count_packed_examples,
)
from rosetta_t5.models.decoder_only import DecoderOnlyModel, remove_prefix
from rosetta_t5.models.encoder_decoder import DecoderParams, EncoderDecoderModel
