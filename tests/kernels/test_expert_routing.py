"""Routers against a definition that treats one token at a time, and losses against published formulas."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rosetta_t5.kernels.expert_routing import (
  combine_outputs,
  expert_slots,
  load_balancing_loss,
  route_experts,
  route_tokens,
  router_z_loss,
  routing_statistics,
  send_to_experts,
)

GROUPS, TOKENS, EXPERTS, WIDTH = 3, 12, 4, 5
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(GROUPS, TOKENS, EXPERTS)).astype(np.float32) * 2
PROBS = np.asarray(jax.nn.softmax(LOGITS))
X = RNG.normal(size=(GROUPS, TOKENS, WIDTH)).astype(np.float32)
ALL = np.ones((GROUPS, TOKENS), bool)
SOME = RNG.random((GROUPS, TOKENS)) < 0.7


def experts_of_tokens(probs_NE, real_N, choices, slots, normalize):
  """Returns {(token, expert): weight} for tokens that choose experts, one token at a time."""
  order = [np.argsort(-p_E, kind="stable")[:choices] for p_E in probs_NE]
  taken, weights = [0] * probs_NE.shape[1], {}
  for choice, token in itertools.product(range(choices), range(len(probs_NE))):
    if not real_N[token]:
      continue
    expert = order[token][choice]
    taken[expert] += 1
    if taken[expert] <= slots:
      total = sum(probs_NE[token][e] for e in order[token]) if normalize else 1
      weights[token, expert] = probs_NE[token, expert] / total
  return weights


def tokens_of_experts(probs_NE, real_N, slots, normalize):
  """Returns {(token, expert): weight} for experts that choose tokens, one expert at a time."""
  weights = {}
  for expert in range(probs_NE.shape[1]):
    real = [token for token in range(len(probs_NE)) if real_N[token]]
    for token in sorted(real, key=lambda token: -probs_NE[token, expert])[:slots]:
      weights[token, expert] = probs_NE[token, expert]
  if not normalize:
    return weights
  totals = np.zeros(len(probs_NE))
  for (token, _), weight in weights.items():
    totals[token] += weight
  return {(token, expert): weight / totals[token] for (token, expert), weight in weights.items()}


def routed(router, real, slots, normalize=False):
  """Returns the routing of a router, and its definition for each group."""
  if router == "expert_choice":
    routing = jax.jit(route_experts, static_argnums=(2, 3))(
      jnp.asarray(PROBS), real, slots, normalize
    )
    return routing, [tokens_of_experts(*g, slots, normalize) for g in zip(PROBS, real, strict=True)]
  choices = {"switch": 1, "top_2": 2}[router]
  routing = jax.jit(route_tokens, static_argnums=(2, 3, 4))(
    jnp.asarray(PROBS), real, choices, slots, normalize
  )
  groups = zip(PROBS, real, strict=True)
  return routing, [experts_of_tokens(*g, choices, slots, normalize) for g in groups]


@pytest.mark.parametrize("router", ["switch", "top_2", "expert_choice"])
@pytest.mark.parametrize(("slots", "normalize"), [(1, False), (3, True), (TOKENS, False)])
@pytest.mark.parametrize("real", [ALL, SOME], ids=["all", "some"])
def test_a_router_gives_each_token_the_experts_and_weights_of_its_definition(
  router, slots, normalize, real
):
  routing, definition = routed(router, jnp.asarray(real), slots, normalize)
  for group, weights in enumerate(definition):
    got = {
      (int(token), expert): float(weight)
      for expert in range(EXPERTS)
      for token, weight in zip(
        routing.token_GEC[group, expert], routing.weight_GEC[group, expert], strict=True
      )
      if token < TOKENS
    }
    assert got.keys() == weights.keys()
    for key, weight in weights.items():
      np.testing.assert_allclose(got[key], weight, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("router", ["switch", "top_2", "expert_choice"])
def test_outputs_and_gradients_are_those_of_the_definition(router):
  scale_E = jnp.arange(1.0, EXPERTS + 1)[None, :, None, None]
  routing, definition = routed(router, jnp.asarray(SOME), 3)

  def output(x_GND):
    return combine_outputs(send_to_experts(x_GND, routing.token_GEC) * scale_E, routing, TOKENS)

  factors = np.zeros(X.shape[:2])
  for group, weights in enumerate(definition):
    for (token, expert), weight in weights.items():
      factors[group, token] += weight * (expert + 1)
  want = factors[..., None] * X
  np.testing.assert_allclose(output(jnp.asarray(X)), want, atol=1e-6)
  grad = jax.grad(lambda x: jnp.sum(jnp.sin(output(x))))(jnp.asarray(X))
  np.testing.assert_allclose(grad, factors[..., None] * np.cos(want), atol=1e-6)


def test_an_expert_has_its_share_of_slots_times_the_capacity_factor():
  assert expert_slots(64, 8, 1.25) == 10
  assert expert_slots(10, 4, 1.25) == math.ceil(3.125)
  assert expert_slots(1, 128, 1.25) == 1
  assert expert_slots(6, 2, 100.0) == 6


def test_the_load_balancing_loss_is_that_of_switch_transformer():
  first = PROBS.argmax(-1)
  want = []
  for probs_NE, first_N, real_N in zip(PROBS, first, SOME, strict=True):
    count = real_N.sum()
    fractions = [np.sum(real_N & (first_N == expert)) / count for expert in range(EXPERTS)]
    means = [probs_NE[real_N, expert].mean() for expert in range(EXPERTS)]
    want.append(EXPERTS * sum(f * p for f, p in zip(fractions, means, strict=True)))
  got = load_balancing_loss(jnp.asarray(PROBS), jnp.asarray(SOME), jnp.where(SOME, first, EXPERTS))
  np.testing.assert_allclose(got, np.mean(want), rtol=1e-6)


def test_the_load_balancing_loss_is_1_for_equal_loads_and_their_number_for_one_expert():
  even = jnp.full((1, EXPERTS, EXPERTS), 1 / EXPERTS)
  real = jnp.ones((1, EXPERTS), bool)
  assert load_balancing_loss(even, real, jnp.arange(EXPERTS)[None]) == pytest.approx(1)
  collapsed = jax.nn.one_hot(jnp.zeros((1, EXPERTS), int), EXPERTS)
  assert load_balancing_loss(collapsed, real, jnp.zeros((1, EXPERTS), int)) == EXPERTS


def test_the_router_z_loss_is_that_of_st_moe():
  terms = np.log(np.exp(LOGITS).sum(-1)) ** 2
  for real in (ALL, SOME):
    got = router_z_loss(jnp.asarray(LOGITS), jnp.asarray(real))
    np.testing.assert_allclose(got, terms[real].mean(), rtol=1e-6)


def test_statistics_count_tokens_slots_probabilities_and_loads():
  slots = 2
  routing, definition = routed("switch", jnp.asarray(SOME), slots)
  got = routing_statistics(jnp.asarray(PROBS), jnp.asarray(SOME), routing)
  computed = sum(len(weights) for weights in definition)
  first = PROBS.argmax(-1)[SOME]
  want = {
    "fraction_tokens_left_behind": 1 - computed / SOME.sum(),
    "expert_usage": computed / (GROUPS * EXPERTS * slots),
    "router_confidence": sum(sum(weights.values()) for weights in definition) / computed,
    "highest_load": EXPERTS * np.bincount(first).max() / len(first),
  }
  assert {name: float(value) for name, value in got.items()} == pytest.approx(want, rel=1e-6)


def test_padding_takes_no_slot_and_has_no_loss():
  none = jnp.zeros((GROUPS, TOKENS), bool)
  for router in ("switch", "expert_choice"):
    routing, _ = routed(router, none, 2)
    assert jnp.all(routing.token_GEC == TOKENS)
    assert not jnp.any(routing.weight_GEC)
  assert load_balancing_loss(jnp.asarray(PROBS), none, jnp.full((GROUPS, TOKENS), EXPERTS)) == 0
  assert router_z_loss(jnp.asarray(LOGITS), none) == 0
