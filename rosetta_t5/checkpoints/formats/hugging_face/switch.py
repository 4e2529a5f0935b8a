"""The weights and the config of experts in Transformers' Switch Transformer, whose other weights are T5's.

There, each expert has weights of its own, and a feed-forward block is called `mlp`.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Mapping
from typing import Any

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray, index_axis, stack, transpose
from rosetta_t5.checkpoints.formats.hugging_face.weight_mapping import count_layers
from rosetta_t5.networks.expert_settings import ExpertSettings

FAMILY = "switch_transformers"
_EXPERT_CAPACITY = 64  # the default of Transformers

_THEIRS = re.compile(
  r"(encoder|decoder)\.block\.(\d+)\.layer\.\d+\.mlp\."
  r"(?:experts\.expert_(\d+)\.(wi|wo)|router\.classifier)\.weight"
)
_THEIR_MLP = re.compile(r"(\.layer\.\d+)\.mlp\.")
_T5_MLP = re.compile(r"(\.layer\.\d+)\.DenseReluDense\.")
_OURS = re.compile(
  r"target/(encoder|decoder)/layers_(\d+)/mlp/(expert/(wi|wo)|router/router_weights/w)/kernel"
)


def has_experts(names: Iterable[str]) -> bool:
  """Returns whether one of our parameters belongs to experts."""
  return any("/mlp/expert/" in name for name in names)


def split_weights(
  weights: Mapping[str, StoredArray], config: Mapping[str, Any]
) -> tuple[dict[str, StoredArray], dict[str, StoredArray]]:
  """Returns T5's weights by Transformers' names of them, and the experts' arrays by our names.

  Raises:
    ValueError: weights are missing, or the router has a bias.
  """
  if config.get("router_bias"):
    raise ValueError(
      "router_bias must be false, got true: the routers of this project have no bias"
    )
  rest: dict[str, StoredArray] = {}
  experts: dict[str, dict[int, StoredArray]] = collections.defaultdict(dict)
  arrays: dict[str, StoredArray] = {}
  for name, weight in weights.items():
    match = _THEIRS.fullmatch(name)
    if match is None:
      rest[_THEIR_MLP.sub(r"\1.DenseReluDense.", name)] = weight
      continue
    side, layer, number, kernel = match.groups()
    ours = f"target/{side}/layers_{layer}/mlp"
    if number is None:
      arrays[f"{ours}/router/router_weights/w/kernel"] = transpose(weight)
    else:
      experts[f"{ours}/expert/{kernel}/kernel"][int(number)] = transpose(weight)
  routers = [name for name in arrays if "/router/" in name]
  for name in routers:
    count = arrays[name].shape[1]
    for kernel in ("wi", "wo"):
      stacked = name.replace("router/router_weights/w", f"expert/{kernel}")
      found = experts.pop(stacked, {})
      if sorted(found) != list(range(count)):
        raise ValueError(
          f"{stacked} must have {count} experts, as the router has, got {sorted(found)}"
        )
      arrays[stacked] = stack([found[number] for number in range(count)], 0)
  if experts:
    raise ValueError(f"the folder lacks the router of {', '.join(sorted(experts))}")
  return rest, arrays


def split_arrays(
  arrays: Mapping[str, StoredArray],
) -> tuple[dict[str, StoredArray], dict[str, StoredArray]]:
  """Returns the arrays that a T5 has too by our names, and the experts' by Transformers' names."""
  rest: dict[str, StoredArray] = {}
  weights: dict[str, StoredArray] = {}
  for name, array in arrays.items():
    match = _OURS.fullmatch(name)
    if match is None:
      rest[name] = array
      continue
    side, layer, _, kernel = match.groups()
    theirs = f"{side}.block.{layer}.layer.{1 if side == 'encoder' else 2}.mlp"
    if kernel is None:
      weights[f"{theirs}.router.classifier.weight"] = transpose(array)
      continue
    for number in range(array.shape[0]):
      weight = transpose(index_axis(array, 0, number))
      weights[f"{theirs}.experts.expert_{number}.{kernel}.weight"] = weight
  return rest, weights


def rename_mlp(weights: Mapping[str, StoredArray]) -> dict[str, StoredArray]:
  """Returns T5's weights with the name that feed-forward blocks have in a Switch Transformer."""
  return {_T5_MLP.sub(r"\1.mlp.", name): weight for name, weight in weights.items()}


def network_settings(
  config: Mapping[str, Any], arrays: Mapping[str, StoredArray]
) -> dict[str, Any]:
  """Returns the fields of T5Config about experts, for a config.json and arrays in the plain tree."""
  if not has_experts(arrays):
    return {}
  layers = _expert_layers(arrays)
  return {
    "num_experts": next(x.shape[0] for name, x in arrays.items() if "/mlp/expert/" in name),
    "expert_layer_offset": max(start for start, _ in layers.values()),
    "expert_layer_period": layers["encoder"][1],
    "decoder_expert_layer_period": layers["decoder"][1] if "decoder" in layers else None,
    "expert_capacity": config.get("expert_capacity", _EXPERT_CAPACITY),
    "route_padding": not config.get("router_ignore_padding_tokens"),
  }


def _expert_layers(arrays: Mapping[str, StoredArray]) -> dict[str, tuple[int, int]]:
  """Returns {stack: (the first layer that has experts, the distance between two of them)}.

  Raises:
    ValueError: Transformers cannot have experts in these layers.
  """
  result = {}
  for side in ("encoder", "decoder"):
    layers = count_layers(arrays, rf"target/{side}/layers_")
    found = [n for n in range(layers) if f"target/{side}/layers_{n}/mlp/expert/wi/kernel" in arrays]
    step = layers // len(found) if found else layers
    if layers and (not found or found != list(range(1 % step, layers, step))):
      raise ValueError(
        f"Transformers has experts in the layers 1, 1 + n, … of a stack of m·n layers, but the {side}'s "
        f"{layers} layers have them in {found}"
      )
    if layers:
      result[side] = (found[0], step)
  return result


def config_entries(arrays: Mapping[str, StoredArray], network: ExpertSettings) -> dict[str, Any]:
  """Returns the entries of config.json that describe the experts.

  Raises:
    ValueError: Transformers does not have the model's routing, or cannot have experts in these layers.
  """
  if not has_experts(arrays):
    return {}
  if network.router != "switch" or network.normalize_expert_weights:
    raise ValueError(
      "Transformers' Switch Transformer needs router = 'switch' and normalize_expert_weights = None, got "
      f"{network.router!r} and {network.normalize_expert_weights}"
    )
  entries: dict[str, Any] = {}
  for side, (_, step) in _expert_layers(arrays).items():
    layers = count_layers(arrays, rf"target/{side}/layers_")
    entries |= {f"num_sparse_{side}_layers": layers // step, f"{side}_sparse_step": step}
  return entries | {
    "num_experts": next(x.shape[0] for name, x in arrays.items() if "/mlp/expert/" in name),
    "expert_capacity": network.expert_capacity or _EXPERT_CAPACITY,
    "router_bias": False,
    "router_dtype": "float32",
    "router_ignore_padding_tokens": not network.route_padding,
  }
