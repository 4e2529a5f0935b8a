"""A run's train state as shapes, traced without computing any value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rosetta_t5.training import InferenceState, TrainState

# Stands in for an unknown length: the parameters do not depend on it.
_ANY_LENGTH = 8


def input_lengths(model: Any, task_lengths: Mapping[str, int] | None) -> dict[str, int]:
  """Returns the lengths of the model's inputs: {"encoder": S, "decoder": T}, or {"decoder": T}.

  Without an encoder, T5X's feature converters concatenate inputs and targets.
  """
  lengths = dict(task_lengths or {})
  if _has_encoder(model):
    return {
      "encoder": lengths.get("inputs", _ANY_LENGTH),
      "decoder": lengths.get("targets", _ANY_LENGTH),
    }
  return {"decoder": sum(lengths.values()) or _ANY_LENGTH}


def state_shapes(model: Any, batch_size: int, lengths: Mapping[str, int], trained: bool) -> Any:
  """Returns the train state with a ShapeDtypeStruct for each array.

  Args:
    model: the model.
    batch_size: examples in a batch.
    lengths: see `input_lengths`.
    trained: whether the state includes the optimizer's.
  """
  shapes = {
    f"{side}_{kind}_tokens": (batch_size, lengths.get(side, lengths["decoder"]))
    for side, kind in (("encoder", "input"), ("decoder", "input"), ("decoder", "target"))
  }
  types = dict.fromkeys(shapes, jnp.int32)

  def make(key: jax.Array) -> Any:
    variables = model.get_initial_variables(rng=key, input_shapes=shapes, input_types=types)
    if not trained:
      return InferenceState.create(variables)
    return TrainState.create(model.optimizer_def, variables)

  # The shape of a key: a real key would initialize a device.
  return jax.eval_shape(make, jax.ShapeDtypeStruct((2,), jnp.uint32))


def _has_encoder(model: Any) -> bool:
  config = model.network_config
  if hasattr(config, "num_layers") or hasattr(config, "num_encoder_layers"):
    return hasattr(config, "num_encoder_layers")
  return hasattr(model.module, "encode")
