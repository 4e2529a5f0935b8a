"""Models: what a run asks of one, and T5."""

from rosetta_t5.models.base import (
  BaseModel,
  BaseTransformerModel,
  get_input_vocabulary,
  get_output_vocabulary,
)
from rosetta_t5.models.encoder_decoder import DecoderParams, EncoderDecoderModel
from rosetta_t5.models.metrics import compute_base_metrics, count_packed_examples

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
