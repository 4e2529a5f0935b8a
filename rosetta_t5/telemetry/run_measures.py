"""What a line of metrics tells of a run beyond what its steps measure: samples, MFU, norms, skipped steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rosetta_t5.telemetry.flops import flops_of_model, model_flops_utilization, peak_flops

PyTree = Any

SAMPLES = "data/consumed_samples"
UTILIZATION = "timing/model_flops_utilization"
GRADIENT_NORM = "weight_gradient_norm"
WEIGHT_NORM = "weight_norm"
SKIPPED_STEPS = "skipped_steps"

_SEQUENCES = "timing/seqs_per_second"


def global_norm(tree: PyTree) -> Float[Array, ""]:
  """Returns the square root of the sum of all squares, in float32."""
  squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
  return jnp.sqrt(sum(squares, start=jnp.float32(0)))


class RunMeasures:
  """Measured once a line, outside the step, which costs it nothing."""

  def __init__(self, model: Any, batch: Mapping[str, Any], devices: Iterable[jax.Device]):
    """Builds it.

    Args:
      model: the model; its module's config gives the FLOPs.
      batch: a batch's arrays or shapes, by feature.
      devices: those that share the work.
    """
    self._batch_size = int(next(iter(batch.values())).shape[0])
    self._flops = flops_of_model(model, batch)
    self._peak = peak_flops(devices)
    self._norm = jax.jit(global_norm)

  def __call__(self, step: int, values: Mapping[str, float], train_state: Any) -> dict[str, float]:
    """Returns the measures, by name.

    Args:
      step: updates made.
      values: what the steps up to it measured.
      train_state: the state after it.
    """
    measures = {
      SAMPLES: float(step * self._batch_size),
      WEIGHT_NORM: float(self._norm(train_state.params)),
    }
    if self._flops and self._peak and values.get(_SEQUENCES):
      measures[UTILIZATION] = model_flops_utilization(self._flops, values[_SEQUENCES], self._peak)
    skipped = skipped_steps(train_state.param_states)
    return measures if skipped is None else {**measures, SKIPPED_STEPS: float(skipped)}


def skipped_steps(param_states: PyTree) -> int | None:
  """Returns how many updates `optax.apply_if_finite` has left out; None where it has no part in it."""

  def counts(node: Any) -> bool:
    return hasattr(node, "total_notfinite")

  nodes = filter(counts, jax.tree.leaves(param_states, is_leaf=counts))
  totals = [int(node.total_notfinite) for node in nodes]
  return max(totals) if totals else None
