"""Losses over tokens and their normalizing factors, as in T5X."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from rosetta_t5.argument_types import PositiveNumber, near_hint
from rosetta_t5.kernels.cross_entropy import cross_entropy

Scalar = float | int | Num[Array, ""]


def cross_entropy_with_logits(
  logits: Float[Array, "*tokens vocab"], targets: Float[Array, "*tokens vocab"], z_loss: Scalar
) -> tuple[Float[Array, "*tokens"], Float[Array, "*tokens"]]:
  """Returns each token's cross-entropy with soft targets plus z-loss, and the z-loss alone.

  For integer targets, `compute_weighted_cross_entropy` needs only a fraction of the memory.

  Args:
    logits: the logits; their dtype is the dtype of the computation.
    targets: probabilities that sum to one over the vocabulary.
    z_loss: the weight of the squared log of the softmax denominator.
  """
  lse = jax.nn.logsumexp(logits, axis=-1)
  z_term = z_loss * jnp.square(lse)
  return z_term - jnp.sum(targets * (logits - lse[..., None]), axis=-1), z_term


def compute_weighted_cross_entropy(
  logits: Float[Array, "*tokens vocab"],
  targets: Int[Array, "*tokens"],
  weights: Num[Array, "*tokens"] | None = None,
  label_smoothing: float = 0.0,
  z_loss: float = 0.0,
  loss_normalizing_factor: Scalar | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""], Scalar]:
  """Returns the sums over all tokens of loss (z-loss included), z-loss and weights, in float32.

  Args:
    logits: the logits, in any float dtype.
    targets: the index of each token in the vocabulary.
    weights: the weight of each token; None for 1.
    label_smoothing: the probability that is spread over the other tokens of the vocabulary.
    z_loss: the weight of the squared log of the softmax denominator.
    loss_normalizing_factor: the divisor of both losses; None for a plain sum.

  Raises:
    ValueError: the shapes do not match.
  """
  if logits.shape[:-1] != targets.shape:
    raise ValueError(f"targets must have shape {logits.shape[:-1]}, got {targets.shape}")
  loss, z_term = cross_entropy(logits, targets, z_loss, label_smoothing)
  return weighted_sums(loss, z_term, weights, loss_normalizing_factor)


def weighted_sums(
  loss: jax.Array, z_term: jax.Array, weights: jax.Array | None, factor: Scalar | None
) -> tuple[Float[Array, ""], Float[Array, ""], Scalar]:
  """Returns the sums over all tokens of loss, z-loss and weights; the losses divided by the factor.

  Args:
    loss: each token's loss, *tokens.
    z_term: the z-loss that is a part of it, *tokens.
    weights: the weight of each token; None for 1.
    factor: the divisor of both losses; None for a plain sum.
  """
  weight_sum: Scalar = float(math.prod(loss.shape))
  if weights is not None:
    loss, z_term, weight_sum = loss * weights, z_term * weights, jnp.sum(weights)
  scale = 1.0 if factor is None else 1.0 / factor
  return jnp.sum(loss) * scale, jnp.sum(z_term) * scale, weight_sum


@enum.unique
class SpecialLossNormalizingFactor(enum.Enum):
  """The divisor of a loss that depends on the batch.

  NUM_REAL_TARGET_TOKENS: the sum of the loss weights of the batch, or without weights the number of
    target tokens that are not padding.
  NUM_TOTAL_TARGET_TOKENS: the number of target tokens, including padding.
  AVERAGE_PER_SEQUENCE: the loss is averaged over the tokens of each sequence and then over the
    sequences, so that short and long sequences have the same weight. Packed sequences count
    separately.
  MEAN_PER_TOKEN: NUM_REAL_TARGET_TOKENS of the whole batch, also for its microbatches, whose losses
    are summed. As in T5X, the others take those of each microbatch, which multiplies loss and
    gradients by the number of microbatches.
  MEAN_PER_SEQUENCE: AVERAGE_PER_SEQUENCE of the whole batch in the same way.
  """

  NUM_REAL_TARGET_TOKENS = 1
  NUM_TOTAL_TARGET_TOKENS = 2
  AVERAGE_PER_SEQUENCE = 3
  MEAN_PER_TOKEN = 4
  MEAN_PER_SEQUENCE = 5


# The factors that are a mean over the whole batch, and the factor of one microbatch that each replaces.
_MEANS = {
  SpecialLossNormalizingFactor.MEAN_PER_TOKEN: SpecialLossNormalizingFactor.NUM_REAL_TARGET_TOKENS,
  SpecialLossNormalizingFactor.MEAN_PER_SEQUENCE: SpecialLossNormalizingFactor.AVERAGE_PER_SEQUENCE,
}

# The metric that is the loss in nats per target token, for factors that have one.
METRIC_PER_TOKEN: dict[Any, str] = {
  None: "loss_per_nonpadding_target_token",
  SpecialLossNormalizingFactor.MEAN_PER_TOKEN: "loss",
}
# The divisor of a loss: a number, or a special factor or its name.
LossNormalizingFactor = PositiveNumber | str | SpecialLossNormalizingFactor


def convert_special_loss_normalizing_factor_to_enum(x: Any) -> Any:
  """Returns the special factor with this name, in upper or lower case; other factors as they are.

  Raises:
    ValueError: no factor has this name.
  """
  names = SpecialLossNormalizingFactor.__members__
  if not isinstance(x, str):
    return x
  if x.upper() in names:
    return names[x.upper()]
  raise ValueError(
    f"unknown loss_normalizing_factor {x!r}{near_hint(x.upper(), names)}: set "
    f"LOSS_NORMALIZING_FACTOR to a number, None, or one of {', '.join(names)}"
  )


def get_loss_normalizing_factor_and_weights(
  loss_normalizing_factor: LossNormalizingFactor | None, batch: Mapping[str, Array], pad_id: int = 0
) -> tuple[Scalar | None, Num[Array, "batch length"] | None]:
  """Returns the divisor of the loss, and the weight of each target token.

  A number or None is returned unchanged, with the weights of the batch or None. For a special
  factor, a batch without weights gets the weight 0 for padding and 1 for other tokens.

  Args:
    loss_normalizing_factor: a number, None, or a special factor or its name.
    batch: `decoder_target_tokens` [batch, length], optionally `decoder_loss_weights`, and
      `decoder_segment_ids` if sequences are packed.
    pad_id: the token that is padding.

  Raises:
    ValueError: no special factor has this name.
  """
  weights = batch.get("decoder_loss_weights")
  factor = convert_special_loss_normalizing_factor_to_enum(loss_normalizing_factor)
  if not isinstance(factor, SpecialLossNormalizingFactor):
    return factor, weights
  targets = batch["decoder_target_tokens"]
  if weights is None:
    weights = (targets != pad_id).astype(jnp.float32)
  if factor is SpecialLossNormalizingFactor.NUM_TOTAL_TARGET_TOKENS:
    return float(math.prod(targets.shape)), weights
  if _MEANS.get(factor, factor) is SpecialLossNormalizingFactor.AVERAGE_PER_SEQUENCE:
    weights = _average_per_sequence(weights, batch.get("decoder_segment_ids"))
  return batch[factor.name][0] if factor.name in batch else jnp.sum(weights), weights


def with_divisors(batch: Mapping[str, jax.Array], pad_id: int = 0) -> dict[str, jax.Array]:
  """Returns a batch of B rows with the divisors of the whole batch, which its microbatches then have too.

  The divisor of MEAN_PER_TOKEN, for example, is the feature of this name: B equal numbers. `pad_id` is the
  token that has no weight in a batch without weights.
  """
  if (targets := batch.get("decoder_target_tokens")) is None:
    return dict(batch)
  divisors: dict[str, Any] = {
    mean.name: get_loss_normalizing_factor_and_weights(mean, batch, pad_id)[0] for mean in _MEANS
  }
  return {**batch, **{name: jnp.full(len(targets), value) for name, value in divisors.items()}}


def share_of_batch(factor: LossNormalizingFactor | None, divisor: Any, weights: Any) -> Scalar:
  """Returns what a loss that is not one of tokens is multiplied by, so that microbatches can be summed.

  It is 1 for T5X's factors, which multiply such losses by the number of microbatches.
  """
  return jnp.sum(weights) / divisor if factor in _MEANS else 1.0


def microbatch_warning(factor: LossNormalizingFactor | None, num_microbatches: int) -> list[str]:
  """Returns a warning if the factor multiplies the loss by the number of microbatches, else nothing."""
  is_harmless = num_microbatches == 1 or factor in _MEANS
  if is_harmless or not isinstance(factor, SpecialLossNormalizingFactor):
    return []
  return [
    f"LOSS_NORMALIZING_FACTOR = '{factor.name}' is a mean over each microbatch, as in T5X: "
    f"{num_microbatches} microbatches multiply loss and gradients by {num_microbatches}. "
    "'MEAN_PER_TOKEN' and 'MEAN_PER_SEQUENCE' are means over the whole batch"
  ]


def _average_per_sequence(
  weights_BT: jax.Array, segment_ids_BT: jax.Array | None
) -> Float[Array, "batch length"]:
  """Divides the weights by their sum over each sequence; padding and empty sequences get 0."""
  if segment_ids_BT is None:
    sums_BT = jnp.sum(weights_BT, axis=-1, keepdims=True)
  else:
    num_segments = weights_BT.shape[-1] + 1
    sum_row = functools.partial(jax.ops.segment_sum, num_segments=num_segments)
    sums_BS = jax.vmap(sum_row)(weights_BT, segment_ids_BT)
    sums_BT = jnp.take_along_axis(sums_BS, segment_ids_BT, axis=1)
    weights_BT = jnp.where(segment_ids_BT > 0, weights_BT, 0.0)
  return weights_BT / jnp.where(sums_BT == 0, 1.0, sums_BT)
