"""T5X's `models`."""

from rosetta_t5.models import (
  BaseModel,
  BaseTransformerModel,
  DecoderParams,
  EncoderDecoderModel,
  compute_base_metrics,
  count_packed_examples,
  get_input_vocabulary,
  get_output_vocabulary,
)

__all__ = [
  "BaseModel",
  "BaseTransformerModel",
  "DecoderParams",
  "EncoderDecoderModel",
  "compute_base_metrics",
  "count_packed_examples",
  "get_input_vocabulary",
  "get_output_vocabulary",
]
