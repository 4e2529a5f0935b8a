"""The settings of mixtures of experts, which all networks share."""

from __future__ import annotations

from typing import Annotated, Any

from flax import struct

from rosetta_t5.argument_types import NonNegative, Positive, PositiveNumber, Rate, one_of
from rosetta_t5.kernels.expert_routing import expert_slots
from rosetta_t5.networks.other_networks import setting_of

# What each layer with experts sows, [B, 2]: the tokens of a row that no expert computes, and all tokens.
LEFT_BEHIND_BY_ROW = "left_behind_by_row"
ROUTERS = ("switch", "top_2", "expert_choice")


@struct.dataclass(kw_only=True)
class ExpertSettings:
  """Which layers have several feed-forward blocks (experts), and which of them computes a token.

  Attributes:
    num_experts: the number of experts of a layer that has them; 0 for no such layers.
    expert_layer_period: every layer of this period has experts; 1 for all layers.
    expert_layer_offset: which layer of each period has experts, counted from 0, modulo the period: in
      Switch Transformer the second, and in ST-MoE the last.
    router: with 'switch' a token chooses one expert (Fedus et al. 2021), with 'top_2' two (Lepikhin et al.
      2020); with 'expert_choice' each expert chooses its tokens (Zhou et al. 2022), except in decoders,
      which use 'top_2', as in Komatsuzaki et al. 2022.
    capacity_factor: in training, an expert has this many times its equal share of a group's tokens as
      slots. A token without a slot skips the block: only the residual passes.
    eval_capacity_factor: the same without dropout: in evaluation, scoring and prediction.
    expert_capacity: the number of slots in both cases instead of the factors; None for the factors.
    router_group_size: tokens compete for slots in groups of whole rows with at most this many tokens;
      None for groups of one row, with which results do not depend on the other rows of a batch.
    router_jitter: in training, the router's inputs are multiplied by random factors that differ from 1
      by at most this.
    route_padding: whether padding has experts too and counts in losses and statistics, as in T5X and
      Transformers.
    expert_dropout_rate: the dropout of the experts' hidden layer; None for `dropout_rate`. Fedus et al.
      finetune with 0.4, and with 0.1 elsewhere.
    normalize_expert_weights: whether the weights of a token's experts add up to 1; None for yes with
      'top_2' and no with the others.
  """

  num_experts: NonNegative = 0
  expert_layer_period: Positive = 2
  expert_layer_offset: NonNegative = 1
  router: Annotated[str, one_of(ROUTERS)] = "switch"
  capacity_factor: PositiveNumber = 1.25
  eval_capacity_factor: PositiveNumber = 2.0
  expert_capacity: Positive | None = None
  router_group_size: Positive | None = None
  router_jitter: Rate = 0.01
  route_padding: bool = False
  expert_dropout_rate: Rate | None = None
  normalize_expert_weights: bool | None = None

  def count_slots(self, tokens: int, deterministic: bool = False) -> int:
    """Returns the number of slots of each expert for a group of tokens.

    Args:
      tokens: the number of tokens in the group.
      deterministic: whether dropout is off, as in evaluation.
    """
    if self.expert_capacity is not None:
      return min(tokens, self.expert_capacity)
    factor = self.eval_capacity_factor if deterministic else self.capacity_factor
    return expert_slots(tokens, self.num_experts, factor)


def has_experts(config: Any) -> bool:
  """Returns whether a network's config, which may be a user's own or None, has layers with experts."""
  number = setting_of(config, "num_experts")
  return isinstance(number, int) and number > 0


def expert_layers(config: Any, side: str) -> range:
  """Returns the numbers of the layers with experts in the stack `side`, "encoder" or "decoder"."""
  if not has_experts(config):
    return range(0)
  period = config.expert_layer_period
  if side == "decoder":
    period = config.decoder_expert_layer_period or period
  return range(config.expert_layer_offset % period, config.layers_of(side), period)
