"""Learning-rate schedules as products of named factors (T5X)."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

Schedule = Callable[[int | jax.Array], jax.Array]


class FactorNumbers(NamedTuple):
  """The numbers that factors read; see `create_learning_rate_scheduler`."""

  base: float
  warmup: int
  decay_factor: float
  steps_per_decay: int
  steps_per_cycle: int


def _linear_decay(step: jax.Array, n: FactorNumbers) -> jax.Array:
  falling = 1.0 + n.decay_factor * (n.warmup - step)
  return n.base * jnp.minimum(step / n.warmup, falling)


def _cosine_decay(step: jax.Array, n: FactorNumbers) -> jax.Array:
  progress = jnp.maximum(0.0, (step - n.warmup) / n.steps_per_cycle)
  return jnp.maximum(0.0, 0.5 * (1.0 + jnp.cos(jnp.pi * (progress % 1.0))))


_FACTORS: dict[str, Callable[[jax.Array, FactorNumbers], jax.Array | float]] = {
  "constant": lambda step, n: n.base,
  "linear_warmup": lambda step, n: jnp.minimum(1.0, step / n.warmup),
  "linear_decay": _linear_decay,
  "rsqrt_decay": lambda step, n: jax.lax.rsqrt(jnp.maximum(step, n.warmup)),
  "rsqrt_normalized_decay": lambda step, n: jnp.sqrt(n.warmup / jnp.maximum(step, n.warmup)),
  "decay_every": lambda step, n: n.decay_factor ** (step // n.steps_per_decay),
  "cosine_decay": _cosine_decay,
}

# What a factor divides by, so that it may not be zero.
_DIVISORS = {
  "linear_warmup": "warmup_steps",
  "linear_decay": "warmup_steps",
  "rsqrt_decay": "warmup_steps",
  "rsqrt_normalized_decay": "warmup_steps",
  "decay_every": "steps_per_decay",
  "cosine_decay": "steps_per_cycle",
}


def create_learning_rate_scheduler(
  factors: str = "constant * linear_warmup * rsqrt_decay",
  base_learning_rate: float = 0.5,
  warmup_steps: int = 1000,
  decay_factor: float = 0.5,
  steps_per_decay: int = 20000,
  steps_per_cycle: int = 100000,
  step_offset: int = 0,
  min_learning_rate: float = 1e-8,
) -> Schedule:
  """Returns a function from a step to its learning rate, a float32 scalar; it can be traced.

  The rate is the product of the factors at max(0, step − step_offset), and at least
  `min_learning_rate`. With s that step and w `warmup_steps` the factors are:

  - constant: base_learning_rate
  - linear_warmup: min(1, s / w)
  - linear_decay: base_learning_rate · min(s / w, 1 + decay_factor · (w − s)); it brings its own base
  - rsqrt_decay: 1 / √max(s, w)
  - rsqrt_normalized_decay: √w / √max(s, w)
  - decay_every: decay_factor ^ ⌊s / steps_per_decay⌋
  - cosine_decay: ½ (1 + cos(π · p)), p the fraction of `steps_per_cycle` passed since the warm-up

  Args:
    factors: names joined by `*`.
    base_learning_rate: see above.
    warmup_steps: see above.
    decay_factor: a slope per step in linear_decay, a ratio in decay_every.
    steps_per_decay: see above.
    steps_per_cycle: see above.
    step_offset: the step at which the schedule starts, for finetuning.
    min_learning_rate: the floor of the product.

  Raises:
    ValueError: a factor is unknown, or the number of steps that it divides by is not positive.
  """
  names = [name.strip() for name in factors.split("*")]
  numbers = FactorNumbers(
    base_learning_rate, warmup_steps, decay_factor, steps_per_decay, steps_per_cycle
  )
  divisors = {
    "warmup_steps": warmup_steps,
    "steps_per_decay": steps_per_decay,
    "steps_per_cycle": steps_per_cycle,
  }
  for name in names:
    _check_factor(name, factors, divisors)

  def learning_rate(step: int | jax.Array) -> jax.Array:
    since = jnp.maximum(0.0, jnp.asarray(step, jnp.float32) - step_offset)
    rate = jnp.float32(1.0)
    for name in names:
      rate = rate * _FACTORS[name](since, numbers)
    return jnp.maximum(rate, min_learning_rate).astype(jnp.float32)

  return learning_rate


def _check_factor(name: str, factors: str, divisors: dict[str, int]) -> None:
  """Raises ValueError unless the factor exists and can be computed."""
  if name not in _FACTORS:
    near = difflib.get_close_matches(name, _FACTORS, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(
      f"unknown factor {name!r}{hint} in create_learning_rate_scheduler.factors = {factors!r}: "
      f"known are {', '.join(_FACTORS)}"
    )
  divisor = _DIVISORS.get(name)
  if divisor is not None and divisors[divisor] <= 0:
    raise ValueError(
      f"create_learning_rate_scheduler.{divisor} must be positive for the factor {name!r}, not "
      f"{divisors[divisor]}: set it to 1 or more, or take {name!r} out of factors = {factors!r}"
    )
