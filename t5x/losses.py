"""T5X's `losses`: weighted cross-entropy with z-loss and label smoothing, and its normalizing factors."""

from rosetta_t5.training.losses import (
  SpecialLossNormalizingFactor,
  compute_weighted_cross_entropy,
  convert_special_loss_normalizing_factor_to_enum,
  cross_entropy_with_logits,
  get_loss_normalizing_factor_and_weights,
)
