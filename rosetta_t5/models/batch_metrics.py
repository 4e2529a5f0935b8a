"""T5X's training metrics of a batch, as metric objects that can be merged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from clu import metrics as clu_metrics
from jaxtyping import Array, Bool, Float, Int, Shaped

from rosetta_t5.kernels.cross_entropy import correct_predictions
from rosetta_t5.telemetry import metrics as metrics_lib

Metrics = dict[str, Any]


def count_packed_examples(segment_ids: Int[Array, "B T"]) -> Int[Array, ""]:
  """Returns the number of packed examples, which are runs of equal nonzero segment ids."""
  previous = jnp.pad(segment_ids, ((0, 0), (1, 0)))[:, :-1]
  return jnp.sum((segment_ids != 0) & (segment_ids != previous))


def compute_weighted_accuracy(
  logits: Float[Array, "..."],
  targets: Int[Array, "..."],
  weights: Shaped[Array, "..."] | None = None,
) -> Shaped[Array, ""]:
  """Returns the total weight of the targets with the highest logit, for users of T5X's function.

  Args:
    logits: the model's output.
    targets: the ids to predict.
    weights: each target's weight; None for 1.

  Raises:
    ValueError: the shapes of logits and targets do not match.
  """
  if logits.ndim != targets.ndim + 1:
    raise ValueError(
      "logits must have one dimension more than targets, the vocabulary, got shapes "
      f"{logits.shape} and {targets.shape}"
    )
  correct = correct_predictions(logits, targets)
  return jnp.sum(correct if weights is None else correct * weights)


def compute_metrics(
  logits: Float[Array, "B T V"],
  targets: Int[Array, "B T"],
  weights: Shaped[Array, "B T"] | None,
  loss: Float[Array, ""],
  weight_sum: Shaped[Array, ""],
  additional_metrics: Metrics,
) -> Metrics:
  """Returns the metrics that T5X had before `compute_base_metrics`, and the additional ones."""
  sums: dict[str, Any] = {
    "loss": loss,
    "accuracy": compute_weighted_accuracy(logits, targets, weights),
    "weight_sum": weight_sum,
    "num_examples": targets.shape[0],
    "num_tokens": targets.size,
  }
  return {**metrics_lib.create_metrics_dict(sums), **additional_metrics}


def compute_base_metrics(
  logits: Float[Array, "*tokens V"] | None,
  targets: Int[Array, "*tokens"],
  mask: Shaped[Array, "*tokens"] | None,
  loss: Float[Array, ""],
  z_loss: Float[Array, ""] | float | None = None,
  segment_ids: Mapping[str, Int[Array, "B L"] | None] | None = None,
  correct: Bool[Array, "*tokens"] | None = None,
) -> Metrics:
  """Returns T5X's metrics of one batch.

  Args:
    logits: the model's output; not needed if `correct` is given.
    targets: the ids to predict.
    mask: each target's weight; None for 1.
    loss: the loss including z-loss.
    z_loss: the z-loss part of the loss.
    segment_ids: for each feature, the example that each position belongs to; 0 is padding. Features
      that are None or have no positions are left out.
    correct: whether each target has the highest logit; None computes it from the logits.
  """
  if correct is None:
    assert logits is not None
    correct = correct_predictions(logits, targets)
  mask = jnp.ones(targets.shape, jnp.float32) if mask is None else mask
  # Counts are float32, since int32 would overflow over a long period.
  num_sequences, num_tokens = jnp.float32(targets.shape[0]), jnp.float32(targets.size)
  num_devices = jax.device_count()
  num_weighted = jnp.sum(mask)
  average, per_step, rate = clu_metrics.Average, metrics_lib.AveragePerStep, metrics_lib.TimeRate
  correct = correct * mask
  metrics: Metrics = {
    "accuracy": clu_metrics.Accuracy(total=jnp.sum(correct), count=num_weighted),
    "loss": per_step(total=loss),
    "loss_per_nonpadding_target_token": average(total=loss, count=num_weighted),
    "loss_per_all_target_tokens": average(total=loss, count=num_tokens),
    "timing/seqs_per_second": rate(numerator=num_sequences),
    "timing/steps_per_second": metrics_lib.StepsPerTime(),
    "timing/seconds": metrics_lib.Time(),
    "timing/seqs": metrics_lib.Sum(total=num_sequences),
    "timing/seqs_per_second_per_core": rate(numerator=num_sequences / num_devices),
    "timing/target_tokens_per_second": rate(numerator=num_tokens),
    "timing/target_tokens_per_second_per_core": rate(numerator=num_tokens / num_devices),
    "non_padding_fraction/loss_weights": average(total=num_weighted, count=num_tokens),
  }
  if z_loss is not None:
    cross_entropy = loss - z_loss
    metrics |= {
      "z_loss": per_step(total=z_loss),
      "z_loss_per_all_target_tokens": average(total=z_loss, count=num_tokens),
      "cross_ent_loss": per_step(total=cross_entropy),
      "cross_ent_loss_per_all_target_tokens": average(total=cross_entropy, count=num_tokens),
    }
  present = {n: ids for n, ids in (segment_ids or {}).items() if ids is not None and ids.shape[1]}
  return metrics | _padding_metrics(present)


def _padding_metrics(segment_ids: Mapping[str, Int[Array, "B L"]]) -> Metrics:
  """Returns the share of positions that are not padding, per feature and overall."""
  if not segment_ids:
    return {}
  metrics: Metrics = {}
  real = {feature: jnp.sum(ids != 0) for feature, ids in segment_ids.items()}
  for feature, ids in segment_ids.items():
    examples = count_packed_examples(ids)
    metrics[f"effective_batch_size/{feature}"] = metrics_lib.AveragePerStep(total=examples)
    metrics[f"non_padding_fraction/{feature}"] = clu_metrics.Average(
      total=real[feature], count=jnp.float32(ids.size)
    )
  metrics["non_padding_fraction/overall"] = clu_metrics.Average(
    total=sum(real.values()), count=jnp.float32(sum(ids.size for ids in segment_ids.values()))
  )
  return metrics
