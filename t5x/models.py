"""T5X's `models`: encoder-decoder and decoder-only models."""

from rosetta_t5.models import (
  BaseModel,
  BaseTransformerModel,
  DecodeFnCallable,
  DecoderOnlyModel,
  DecoderParams,
  EncoderDecoderModel,
  TokensIdsToLogitsCallable,
  compute_base_metrics,
  compute_metrics,
  compute_weighted_accuracy,
  count_packed_examples,
  get_input_vocabulary,
  get_output_vocabulary,
  remove_prefix,
)
