"""T5X's training metrics of a batch and of its experts, as metric objects that can be merged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from clu import metrics as clu_metrics
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Bool, Float, Int, Shaped

from rosetta_t5.kernels.cross_entropy import correct_predictions
from rosetta_t5.networks.expert_settings import LEFT_BEHIND_BY_ROW
from rosetta_t5.telemetry import metrics as metrics_lib

Metrics = dict[str, Any]


def count_packed_examples(segment_ids: Int[Array, "B T"]) -> Int[Array, ""]:
  """Returns the number of packed examples, which are runs of equal nonzero segment ids."""
  previous = jnp.pad(segment_ids, ((0, 0), (1, 0)))[:, :-1]
  return jnp.sum((segment_ids != 0) & (segment_ids != previous))


def compute_weighted_accuracy(
  logits: Float[Array, "..."], targets: Int[Array, "..."], weights: Array | None = None
) -> Shaped[Array, ""]:
  """Returns the total weight of the targets with the highest logit, for users of T5X's function.

  Args:
    logits: the model's output.
    targets: the ids to predict.
    weights: each target's weight; None for 1.
  """
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


# What layers with experts sow in the collection `intermediates`.
_LOSSES = ("auxiliary_loss", "router_z_loss")
_STATISTICS = ("fraction_tokens_left_behind", "expert_usage", "router_confidence")
_LOAD = "highest_load"
# The auxiliary value of predictions and scores: the fraction of an example's tokens without an expert.
LEFT_BEHIND = "tokens_left_behind"


def add_expert_losses(
  loss: Float[Array, ""],
  z_loss: Float[Array, ""],
  intermediates: Mapping[str, Any],
  factors: tuple[Any, Any],
  config: Any,
  num_tokens: int,
) -> tuple[Float[Array, ""], Metrics]:
  """Returns the loss with the auxiliary losses that layers with experts have sown, and their metrics.

  The metrics include those of the cross-entropy, which is without these losses.

  Args:
    loss: the loss of the tokens, z-loss included.
    z_loss: the z-loss of the output layer.
    intermediates: the collection `intermediates`; scanned layers are stacked.
    factors: the weights of the mean load balancing loss and of the mean router z-loss.
    config: the network's config, which has the number of layers; None gives no loads by layer.
    num_tokens: the number of target tokens, including padding.

  Raises:
    ValueError: no layer has sown a value.
  """
  flat = {path: _as_vector(sown) for path, sown in flatten_dict(dict(intermediates)).items()}
  means = {}
  for name in (*_LOSSES, *_STATISTICS):
    values = [vector for path, vector in flat.items() if path[-1] == name]
    if not values:
      raise ValueError(
        f"no layer of the network has sown {name!r} in the collection 'intermediates', which a model "
        "with experts needs: set num_experts of the network's config, or use a model without experts"
      )
    means[name] = jnp.mean(jnp.concatenate(values))
  losses = {name: factor * means[name] for name, factor in zip(_LOSSES, factors, strict=True)}
  auxiliary = sum(losses.values(), jnp.float32(0))
  loss = loss + auxiliary
  cross_entropy = loss - z_loss - auxiliary
  statistics = {name: means[name] for name in _STATISTICS} | _loads_by_layer(flat, config)
  average, per_step = clu_metrics.Average, metrics_lib.AveragePerStep
  all_tokens, one = jnp.float32(num_tokens), jnp.float32(1.0)
  return loss, {
    **{f"experts/{name}": per_step(total=value) for name, value in losses.items()},
    **{f"experts/{name}": average(total=x, count=one) for name, x in statistics.items()},
    "cross_ent_loss": per_step(total=cross_entropy),
    "cross_ent_loss_per_all_target_tokens": average(total=cross_entropy, count=all_tokens),
  }


def fraction_left_behind(intermediates: Mapping[str, Any]) -> dict[str, Float[Array, " B"]]:
  """Returns {LEFT_BEHIND: the fraction of each example's tokens that no expert computed}.

  It is the mean over the layers that have sown it, and {} if none has.

  Args:
    intermediates: what layers have sown, by module.
  """
  counts_SB2 = [
    counts.reshape(-1, *counts.shape[-2:])
    for path, sown in flatten_dict(dict(intermediates)).items()
    if path[-1] == LEFT_BEHIND_BY_ROW
    for counts in jax.tree.leaves(sown)
  ]
  if not counts_SB2:
    return {}
  left_B, all_B = jnp.moveaxis(jnp.concatenate(counts_SB2).sum(0), -1, 0)
  return {LEFT_BEHIND: left_B / jnp.maximum(all_B, 1)}


def _as_vector(sown: Any) -> jax.Array:
  """Returns the values that were sown under one name, one for each scanned layer."""
  return jnp.concatenate([jnp.ravel(value).astype(jnp.float32) for value in jax.tree.leaves(sown)])


def _loads_by_layer(
  flat: Mapping[tuple[str, ...], jax.Array], config: Any
) -> dict[str, Float[Array, ""]]:
  """Returns the highest load by layer."""
  loads = {}
  for path, vector in flat.items():
    if path[-1] != _LOAD:
      continue
    side = path[0]
    # An iteration of a scan calls one layer or, under their names, several.
    first = next((int(part[7:]) for part in path if part.startswith("layers_")), 0)
    step = config.layers_of(side) // len(vector)
    for iteration in range(len(vector)):
      loads[f"{_LOAD}/{side}/layers_{first + iteration * step}"] = vector[iteration]
  return loads
