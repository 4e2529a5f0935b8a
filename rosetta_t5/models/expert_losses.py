"""The auxiliary losses and the metrics of mixtures of experts, with T5X's names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from clu import metrics as clu_metrics
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float

from rosetta_t5.models.batch_metrics import Metrics
from rosetta_t5.networks.expert_settings import LEFT_BEHIND_BY_ROW
from rosetta_t5.telemetry import metrics as metrics_lib

# What layers with experts sow in the collection `intermediates`.
_LOSSES = ("auxiliary_loss", "router_z_loss")
_STATISTICS = ("fraction_tokens_left_behind", "expert_usage", "router_confidence")
_LOAD = "highest_load"
# The auxiliary value of predictions and scores: the fraction of an example's tokens without an expert.
LEFT_BEHIND = "tokens_left_behind"


@dataclasses.dataclass(frozen=True)
class ExpertLosses:
  """The auxiliary losses of a batch.

  Attributes:
    auxiliary_loss: the mean load balancing loss of the layers, times its factor.
    router_z_loss: the mean z-loss of the layers' routers, times its factor.
    statistics: the mean over layers of other values, by T5X's names.
    loads: the highest load of an expert by layer, such as "encoder/layers_1".
  """

  auxiliary_loss: Float[Array, ""]
  router_z_loss: Float[Array, ""]
  statistics: Mapping[str, Float[Array, ""]]
  loads: Mapping[str, Float[Array, ""]]

  @property
  def total(self) -> Float[Array, ""]:
    """What is added to the loss."""
    return self.auxiliary_loss + self.router_z_loss

  def metrics(self, loss: Float[Array, ""], z_loss: Float[Array, ""], num_tokens: int) -> Metrics:
    """Returns the metrics of the experts, and those of the cross-entropy without these losses.

    Args:
      loss: the loss, auxiliary losses and z-loss included.
      z_loss: the z-loss of the output layer.
      num_tokens: the number of target tokens, including padding.
    """
    average, per_step = clu_metrics.Average, metrics_lib.AveragePerStep
    one = jnp.float32(1.0)
    cross_entropy = loss - z_loss - self.total
    values = {**self.statistics, **{f"{_LOAD}/{n}": value for n, value in self.loads.items()}}
    return {
      "experts/auxiliary_loss": per_step(total=self.auxiliary_loss),
      "experts/router_z_loss": per_step(total=self.router_z_loss),
      **{f"experts/{n}": average(total=value, count=one) for n, value in values.items()},
      "cross_ent_loss": per_step(total=cross_entropy),
      "cross_ent_loss_per_all_target_tokens": average(
        total=cross_entropy, count=jnp.float32(num_tokens)
      ),
    }


def expert_losses(
  intermediates: Mapping[str, Any],
  config: Any,
  aux_loss_factor: float,
  router_z_loss_factor: float,
) -> ExpertLosses:
  """Returns the auxiliary losses that layers with experts have sown.

  Args:
    intermediates: the collection `intermediates`; scanned layers are stacked.
    config: the network's config, which has the number of layers; None gives no loads by layer.
    aux_loss_factor: the weight of the mean load balancing loss.
    router_z_loss_factor: the weight of the mean router z-loss.

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
        "with experts needs: set num_experts of the network's config to the number of experts, or use a "
        "model without experts"
      )
    means[name] = jnp.mean(jnp.concatenate(values))
  return ExpertLosses(
    auxiliary_loss=aux_loss_factor * means["auxiliary_loss"],
    router_z_loss=router_z_loss_factor * means["router_z_loss"],
    statistics={name: means[name] for name in _STATISTICS},
    loads=_loads_by_layer(flat, config),
  )


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
    num_layers: int = getattr(config, f"num_{side}_layers", getattr(config, "num_layers", 0))
    # An iteration of a scan calls one layer or, under their names, several.
    matches = [match for part in path if (match := re.fullmatch(r"layers_(\d+)", part))]
    first, step = int(matches[0][1]) if matches else 0, num_layers // len(vector)
    for iteration in range(len(vector)):
      loads[f"{side}/layers_{first + iteration * step}"] = vector[iteration]
  return loads
