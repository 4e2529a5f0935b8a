"""The properties in which layers of one network differ: windows, positions, cross-attention, experts."""

from __future__ import annotations

from typing import NamedTuple

from rosetta_t5.kernels.attention import Window
from rosetta_t5.networks.config import NetworkConfig
from rosetta_t5.networks.expert_settings import expert_layers
from rosetta_t5.networks.layers.positions import Rope


class LayerKind(NamedTuple):
  """The properties of a layer that other layers of the network may not have.

  Attributes:
    side: the stack, "encoder" or "decoder".
    crosses: whether the layer attends to encoded inputs.
    extra_keys: what its self-attention attends to besides tokens, "encoded" inputs (`merged_attention`) or
      sums of "blocks" (`global_block_size`), which only XLA's kernel computes; None for nothing.
    window: see `Visibility`; None for a layer that sees all tokens.
    rope: the frequencies of its rotary positions; None for other positions.
    has_experts: whether its feed-forward block has experts.
  """

  side: str
  crosses: bool = False
  extra_keys: str | None = None
  window: Window | None = None
  rope: Rope | None = None
  has_experts: bool = False


def layer_kinds(config: NetworkConfig, side: str) -> tuple[LayerKind, ...]:
  """Returns the kinds of the layers of the stack `side`, "encoder" or "decoder"."""
  config = config.of_side(side)
  with_experts = expert_layers(config, side)
  scaling = tuple(sorted((config.rope_scaling or {}).items()))
  ropes = {"global": Rope(config.rope_theta, config.rope_interleaved, scaling)}
  ropes["local"] = ropes["global"]
  if config.local_rope_theta is not None:
    ropes["local"] = Rope(config.local_rope_theta, config.rope_interleaved)
  reads_encoder = side == "decoder" and "encoder" in config.sides
  extra_keys = "encoded" if reads_encoder and config.merged_attention else None
  if side == "encoder" and config.global_block_size is not None:
    extra_keys = "blocks"
  kinds = []
  for layer in range(config.layers_of(side)):
    pattern = config.layer_pattern[layer % len(config.layer_pattern)]
    kind = LayerKind(
      side,
      crosses=reads_encoder and not config.merged_attention,
      extra_keys=extra_keys,
      window=config.windows if pattern == "local" else None,
      rope=ropes[pattern] if config.positions == "rotary" else None,
      has_experts=layer in with_experts,
    )
    kinds.append(kind)
  return tuple(kinds)


def has_extra_keys(config: NetworkConfig) -> bool:
  """Returns whether any layer's self-attention attends to more than tokens."""
  return any(kind.extra_keys for side in config.sides for kind in layer_kinds(config, side))
