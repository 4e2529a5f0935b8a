"""Schedules against the factors' formulas in plain Python."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rosetta_t5.training.schedules import create_learning_rate_scheduler

BASE, WARMUP, DECAY, PER_DECAY, PER_CYCLE = 0.5, 100, 0.01, 50, 400
STEPS = (0, 1, 50, 99, 100, 101, 149, 150, 500, 900, 123456)

FORMULAS = {
  "constant": lambda s: BASE,
  "linear_warmup": lambda s: min(1, s / WARMUP),
  "linear_decay": lambda s: BASE * min(s / WARMUP, 1 + DECAY * (WARMUP - s)),
  "rsqrt_decay": lambda s: 1 / math.sqrt(max(s, WARMUP)),
  "rsqrt_normalized_decay": lambda s: math.sqrt(WARMUP) / math.sqrt(max(s, WARMUP)),
  "decay_every": lambda s: DECAY ** (s // PER_DECAY),
  "cosine_decay": lambda s: max(
    0, (1 + math.cos(math.pi * (max(0, (s - WARMUP) / PER_CYCLE) % 1))) / 2
  ),
}


def schedule(factors, **overrides):
  numbers = {
    "base_learning_rate": BASE,
    "warmup_steps": WARMUP,
    "decay_factor": DECAY,
    "steps_per_decay": PER_DECAY,
    "steps_per_cycle": PER_CYCLE,
  }
  return create_learning_rate_scheduler(factors, **numbers | overrides)


@pytest.mark.parametrize("factor", FORMULAS)
def test_each_factor_follows_its_formula(factor):
  rate = schedule(factor, min_learning_rate=1e-8)
  for step in STEPS:
    np.testing.assert_allclose(rate(step), max(1e-8, FORMULAS[factor](step)), rtol=5e-5, atol=1e-8)


def test_factors_multiply():
  rate = schedule("constant * linear_warmup * rsqrt_decay")
  for step in STEPS:
    product = BASE * min(1, step / WARMUP) / math.sqrt(max(step, WARMUP))
    np.testing.assert_allclose(rate(step), max(1e-8, product), rtol=2e-6)


def test_step_offset_starts_the_schedule_later():
  rate, late = schedule("linear_decay"), schedule("linear_decay", step_offset=1000)
  assert late(1050) == rate(50)
  assert late(999) == rate(0)


def test_minimum_applies_where_linear_decay_would_be_negative():
  rate = schedule("linear_decay", min_learning_rate=1e-5)
  assert FORMULAS["linear_decay"](500) < 0
  assert rate(500) == jnp.float32(1e-5)


def test_rate_is_a_float32_scalar_also_under_jit():
  rate = create_learning_rate_scheduler()
  for value in (rate(7), rate(jnp.int32(7)), jax.jit(rate)(jnp.int32(7))):
    assert value.dtype == jnp.float32
    assert value.shape == ()
    np.testing.assert_allclose(value, 0.5 * 7 / 1000 / math.sqrt(1000), rtol=1e-6)


def test_error_names_the_unknown_factor_and_a_similar_one():
  with pytest.raises(
    ValueError, match=r"'linear_warmpu'.*did you mean 'linear_warmup'.*factors = "
  ):
    create_learning_rate_scheduler("constant * linear_warmpu")


@pytest.mark.parametrize("factors", ["constant * linear_warmup", "rsqrt_decay"])
def test_the_warmup_that_a_factor_divides_by_must_be_positive(factors):
  with pytest.raises(ValueError, match="warmup_steps must be positive for the factor"):
    create_learning_rate_scheduler(factors, warmup_steps=0)


@pytest.mark.parametrize(
  "factors", ["constant * linear_warmup * linear_decay", "linear_decay*constant"]
)
def test_linear_decay_which_contains_the_base_is_not_combined_with_constant(factors):
  with pytest.raises(ValueError, match=r"base_learning_rate twice.* factors = 'linear_decay', and"):
    create_learning_rate_scheduler(factors)


def test_constant_does_not_need_warmup():
  assert create_learning_rate_scheduler("constant", 0.25, warmup_steps=0)(3) == 0.25


def test_steps_that_float32_cannot_represent_are_exact():
  rate = schedule("cosine_decay", step_offset=2**24, warmup_steps=0, steps_per_cycle=2)
  assert float(rate(jnp.int32(2**24 + 1))) == pytest.approx(0.5)
