"""Mixtures of experts: which expert computes which token, and moving tokens to experts and back.

Letters: G groups of tokens, N tokens in a group, E experts, C slots of an expert in a group, D features.
Tokens compete for slots only within their group. Tokens that `real_GN` excludes, such as padding, have no
expert and count in no loss and no statistic.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Routing(NamedTuple):
  """The decision of a router.

  Attributes:
    token_GEC: the token in each slot; N where the slot is empty.
    weight_GEC: the factor of the expert's output; 0 where the slot is empty.
    first_choice_GN: the expert with the highest probability for each token; E for excluded ones.
  """

  token_GEC: Int[Array, "G E C"]
  weight_GEC: Float[Array, "G E C"]
  first_choice_GN: Int[Array, "G N"]


def expert_slots(num_tokens: int, num_experts: int, capacity_factor: float) -> int:
  """Returns the number of slots that each expert has for a group of tokens, at least 1."""
  return min(num_tokens, max(1, math.ceil(capacity_factor * num_tokens / num_experts)))


def route_tokens(
  probs_GNE: Float[Array, "G N E"],
  real_GN: Bool[Array, "G N"],
  choices: int,
  slots: int,
  normalize: bool,
) -> Routing:
  """Returns the routing in which each token chooses its most probable experts.

  Slots are taken in the order of the tokens; the first choices of all tokens come before the second
  ones. A token without a slot is not computed by that expert (Fedus et al. 2021, arXiv:2101.03961, for
  one choice; Lepikhin et al. 2020, arXiv:2006.16668, for two).

  Args:
    probs_GNE: the probabilities of the experts for each token.
    real_GN: which tokens have experts.
    choices: the number of experts that a token chooses.
    slots: the number of slots of each expert.
    normalize: whether the weights of a token's chosen experts are divided by their sum.
  """
  groups, tokens, experts = probs_GNE.shape
  remaining_GNE, chosen = probs_GNE, []
  for _ in range(choices):
    expert_GN = jnp.argmax(remaining_GNE, axis=-1)
    chosen.append(jnp.where(real_GN, expert_GN, experts))
    is_chosen_GNE = jax.nn.one_hot(expert_GN, experts, dtype=bool)
    remaining_GNE = jnp.where(is_chosen_GNE, -1.0, remaining_GNE)
  is_chosen_GNE = remaining_GNE < 0
  # K choices of N tokens, in the order in which they take slots.
  expert_GM = jnp.concatenate(chosen, axis=1)
  is_expert_GME = jax.nn.one_hot(expert_GM, experts, dtype=jnp.int32)
  position_GME = jnp.cumsum(is_expert_GME, axis=1) - 1
  position_GM = jnp.sum(position_GME * is_expert_GME, axis=-1)
  has_slot_GM = (expert_GM < experts) & (position_GM < slots)
  slot_GM = jnp.where(has_slot_GM, expert_GM * slots + position_GM, experts * slots)
  token_M = jnp.tile(jnp.arange(tokens, dtype=jnp.int32), choices)
  empty_S = jnp.full((experts * slots,), tokens, jnp.int32)
  token_GS = jax.vmap(lambda slot_M: empty_S.at[slot_M].set(token_M, mode="drop"))(slot_GM)
  token_GEC = token_GS.reshape(groups, experts, slots)
  weight_GEC = _weights(probs_GNE, is_chosen_GNE, token_GEC, normalize)
  return Routing(token_GEC, weight_GEC, chosen[0])


def route_experts(
  probs_GNE: Float[Array, "G N E"], real_GN: Bool[Array, "G N"], slots: int, normalize: bool
) -> Routing:
  """Returns the routing in which each expert chooses its most probable tokens, as many as it has slots.

  A token may have several experts, or none (Zhou et al. 2022, arXiv:2202.09368).

  Args:
    probs_GNE: the probabilities of the experts for each token.
    real_GN: which tokens have experts.
    slots: the number of slots of each expert.
    normalize: whether the weights of the experts that chose a token are divided by their sum.
  """
  tokens, experts = probs_GNE.shape[1:]
  score_GEN = jnp.where(real_GN[:, None], probs_GNE.swapaxes(1, 2), -1.0)
  order_GEC = jnp.argsort(-score_GEN, axis=-1, stable=True)[..., :slots]
  is_real_GEC = jnp.take_along_axis(score_GEN, order_GEC, axis=-1) >= 0
  token_GEC = jnp.where(is_real_GEC, order_GEC, tokens).astype(jnp.int32)
  is_chosen_GNE = jax.vmap(jax.vmap(_mark, (0, None)), (0, None))(token_GEC, tokens).swapaxes(1, 2)
  weight_GEC = _weights(probs_GNE, is_chosen_GNE, token_GEC, normalize)
  first_choice_GN = jnp.where(real_GN, jnp.argmax(probs_GNE, axis=-1), experts)
  return Routing(token_GEC, weight_GEC, first_choice_GN)


def _weights(
  probs_GNE: jax.Array, is_chosen_GNE: Bool[Array, "G N E"], token_GEC: jax.Array, normalize: bool
) -> jax.Array:
  """Returns the weight of each slot: the token's probability of the expert, or its share."""
  if normalize:
    chosen_GNE = jnp.where(is_chosen_GNE, probs_GNE, 0.0)
    total_GN1 = jnp.sum(chosen_GNE, axis=-1, keepdims=True)
    probs_GNE = chosen_GNE / jnp.where(total_GN1 == 0, 1.0, total_GN1)
  return _take(probs_GNE.swapaxes(1, 2), token_GEC, axis=-1)


def _mark(token_S: jax.Array, num_tokens: int) -> Bool[Array, " N"]:
  """Returns which tokens are in a slot."""
  return jnp.zeros((num_tokens,), bool).at[token_S].set(True, mode="drop")


def _take(x: jax.Array, index: jax.Array, axis: int) -> jax.Array:
  return jnp.take_along_axis(x, index, axis=axis, mode="fill", fill_value=0)


def send_to_experts(
  x_GND: Float[Array, "G N D"], token_GEC: Int[Array, "G E C"]
) -> Float[Array, "G E C D"]:
  """Returns the token of each slot, or zeros: the tokens sorted by expert, by a gather."""
  groups, experts, slots = token_GEC.shape
  index_GS1 = token_GEC.reshape(groups, experts * slots, 1)
  return _take(x_GND, index_GS1, axis=1).reshape(groups, experts, slots, -1)


def combine_outputs(
  y_GECD: Float[Array, "G E C D"], routing: Routing, num_tokens: int
) -> Float[Array, "G N D"]:
  """Returns the weighted sum of each token's slots, by a scatter."""
  groups, width = y_GECD.shape[0], y_GECD.shape[-1]
  weighted_GECD = y_GECD * routing.weight_GEC[..., None].astype(y_GECD.dtype)

  def add_slots(token_S: jax.Array, y_SD: jax.Array) -> jax.Array:
    return jnp.zeros((num_tokens, width), y_SD.dtype).at[token_S].add(y_SD, mode="drop")

  slots_GSD = weighted_GECD.reshape(groups, -1, width)
  return jax.vmap(add_slots)(routing.token_GEC.reshape(groups, -1), slots_GSD)


def load_balancing_loss(
  probs_GNE: Float[Array, "G N E"], real_GN: Bool[Array, "G N"], first_choice_GN: Int[Array, "G N"]
) -> Float[Array, ""]:
  """Returns E·Σ f_e·p_e, the mean over groups: 1 if all experts have the same load, at most E.

  f_e is the fraction of a group's tokens whose first choice is expert e, whether or not it has a slot
  for them; p_e is the mean probability of the expert (Fedus et al. 2021, equation 4).
  """
  experts = probs_GNE.shape[-1]
  is_first_GNE = jax.nn.one_hot(first_choice_GN, experts, dtype=jnp.float32)
  fraction_GE, probability_GE = (
    jnp.mean(x_GNE, axis=1, where=real_GN[..., None]) for x_GNE in (is_first_GNE, probs_GNE)
  )
  return experts * _mean(jnp.sum(fraction_GE * probability_GE, axis=-1), jnp.any(real_GN, axis=1))


def _mean(x: jax.Array, where: jax.Array) -> jax.Array:
  """Returns the mean over some elements; 0 if there are none."""
  return jnp.sum(jnp.where(where, x, 0.0)) / jnp.maximum(jnp.sum(where), 1)


def router_z_loss(
  logits_GNE: Float[Array, "G N E"], real_GN: Bool[Array, "G N"]
) -> Float[Array, ""]:
  """Returns the mean of (log Σ exp logit)² over tokens (Zoph et al. 2022, arXiv:2202.08906)."""
  return _mean(jnp.square(jax.nn.logsumexp(logits_GNE, axis=-1)), real_GN)


def tokens_left_behind(real_GN: Bool[Array, "G N"], routing: Routing) -> Bool[Array, "G N"]:
  """Returns which tokens no expert computes, although they are not excluded."""
  groups, tokens = real_GN.shape
  is_computed_GN = jax.vmap(_mark, (0, None))(routing.token_GEC.reshape(groups, -1), tokens)
  return real_GN & ~is_computed_GN


def routing_statistics(
  probs_GNE: Float[Array, "G N E"], real_GN: Bool[Array, "G N"], routing: Routing
) -> dict[str, Float[Array, ""]]:
  """Returns facts about a routing, by T5X's names, and the highest load.

  They are the fraction of tokens that no expert computes, the fraction of slots that are used, the mean
  probability of the experts of used slots, and the number of first choices of the most popular expert
  relative to the mean of all experts.
  """
  _, tokens, experts = probs_GNE.shape
  is_used_GEC = routing.token_GEC < tokens
  used = jnp.sum(is_used_GEC)
  probability_GEC = _take(probs_GNE.swapaxes(1, 2), routing.token_GEC, axis=-1)
  load_E = jnp.sum(jax.nn.one_hot(routing.first_choice_GN, experts), axis=(0, 1))
  return {
    "fraction_tokens_left_behind": _mean(tokens_left_behind(real_GN, routing), real_GN),
    "expert_usage": used / is_used_GEC.size,
    "router_confidence": jnp.sum(probability_GEC) / jnp.maximum(used, 1),
    "highest_load": experts * jnp.max(load_E) / jnp.maximum(jnp.sum(real_GN), 1),
  }
