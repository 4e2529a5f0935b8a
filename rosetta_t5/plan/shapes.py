"""A run's train state as shapes: traced, never computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rosetta_t5.training import InferenceState, TrainState

# Where nothing says how long a feature is, any length gives the same parameters.
_ANY_LENGTH = 8


def input_lengths(model: Any, task_lengths: Mapping[str, int] | None) -> dict[str, int]:
  """Returns how long the model's inputs are: {"encoder": S, "decoder": T}, without the encoder T only.

  T5X's feature converters make the decoder's tokens of the targets; of inputs and targets behind one
  another where there is no encoder.
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
    trained: whether the state has an optimizer's.
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

  # A key's shape, not a key: making one would touch a device.
  return jax.eval_shape(make, jax.ShapeDtypeStruct((2,), jnp.uint32))


def _has_encoder(model: Any) -> bool:
  config = getattr(getattr(model, "module", None), "config", None)
  if hasattr(config, "num_layers") or hasattr(config, "num_encoder_layers"):
    return hasattr(config, "num_encoder_layers")
  return hasattr(getattr(model, "module", None), "encode")
