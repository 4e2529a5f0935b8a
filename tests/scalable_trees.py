"""One model's parameters in T5X's three trees: plain T5, unscanned scalable T5, and scanned scalable T5."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from tiny_models import T5_1_1

from rosetta_t5.networks.config import ScalableT5Config, T5Config

PLAIN = dataclasses.replace(T5_1_1, num_encoder_layers=2, num_decoder_layers=2)


def scalable(config: T5Config = PLAIN, **changes: Any) -> ScalableT5Config:
  """Returns the config of a scalable T5 with the sizes of a plain T5."""
  own = ("scan_layers", "bias_per_layer")
  fields = [field.name for field in dataclasses.fields(config) if field.name not in own]
  return ScalableT5Config(**{**{name: getattr(config, name) for name in fields}, **changes})


def to_unscanned(params: Any, config: T5Config = PLAIN) -> Any:
  """Returns plain parameters in the unscanned tree: kernels by heads, the bias in every layer."""
  result = {}
  heads = (config.num_heads, config.head_dim)
  layers = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
  for path, value in flatten_dict(params).items():
    if path[-2] in ("query", "key", "value"):
      value = value.reshape(-1, *heads)
    if path[-2] == "out":
      value = value.reshape(*heads, -1)
    if path[1] == "relpos_bias":
      result |= {(path[0], f"layers_{i}", *path[1:]): value for i in range(layers[path[0]])}
    else:
      result[path] = value
  return unflatten_dict(result)


def to_scanned(unscanned: Any, axis: int = 1) -> Any:
  """Returns unscanned parameters stacked on `axis` under `encoder/encoder` and `decoder/decoder`."""
  result = {}
  for stack, value in unscanned.items():
    layers = [value[f"layers_{i}"] for i in range(len(value)) if f"layers_{i}" in value]
    rest = {name: part for name, part in value.items() if not name.startswith("layers_")}
    if layers:
      rest[stack] = jax.tree.map(lambda *parts: jnp.stack(parts, axis), *layers)
    result[stack] = rest
  return result
