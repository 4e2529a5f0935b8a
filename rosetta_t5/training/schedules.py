"""Learning-rate schedules as products of named factors (as in T5X)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from rosetta_t5.argument_types import NonNegative, NonNegativeNumber, Positive, near_hint

Schedule = Callable[[int | jax.Array], jax.Array]


def create_learning_rate_scheduler(
  factors: str = "constant * linear_warmup * rsqrt_decay",
  base_learning_rate: NonNegativeNumber = 0.5,
  warmup_steps: NonNegative = 1000,
  decay_factor: NonNegativeNumber = 0.5,
  steps_per_decay: Positive = 20000,
  steps_per_cycle: Positive = 100000,
  step_offset: int = 0,
  min_learning_rate: NonNegativeNumber = 1e-8,
) -> Schedule:
  """Returns a function from a step to its learning rate, a float32 scalar; jax can trace it.

  The rate is the product of the factors at max(0, step − step_offset), and at least
  `min_learning_rate`. With s that step and w `warmup_steps` the factors are:

  - constant: base_learning_rate
  - linear_warmup: min(1, s / w)
  - linear_decay: base_learning_rate · min(s / w, 1 + decay_factor · (w − s)); do not combine it with
    constant
  - rsqrt_decay: 1 / √max(s, w)
  - rsqrt_normalized_decay: √w / √max(s, w)
  - decay_every: decay_factor ^ ⌊s / steps_per_decay⌋
  - cosine_decay: ½ (1 + cos(π · p)), p is the fraction of `steps_per_cycle` since the warm-up

  Args:
    factors: names of factors, joined by `*`.
    base_learning_rate: see above.
    warmup_steps: see above.
    decay_factor: the slope per step of linear_decay, or the ratio of decay_every.
    steps_per_decay: see above.
    steps_per_cycle: see above.
    step_offset: the step at which the schedule starts, which is useful for finetuning.
    min_learning_rate: the minimum of the product.

  Raises:
    ValueError: a factor is unknown, `linear_decay` is combined with `constant`, or a factor divides by
      `warmup_steps` = 0.
  """

  def linear_decay(s: jax.Array) -> jax.Array:
    decay = 1.0 + decay_factor * (warmup_steps - s)
    return base_learning_rate * jnp.minimum(s / warmup_steps, decay)

  def cosine_decay(s: jax.Array) -> jax.Array:
    progress = jnp.maximum(0.0, (s - warmup_steps) / steps_per_cycle)
    return jnp.maximum(0.0, 0.5 * (1.0 + jnp.cos(jnp.pi * (progress % 1.0))))

  formulas: dict[str, Callable[[jax.Array], jax.Array | float]] = {
    "constant": lambda s: base_learning_rate,
    "linear_warmup": lambda s: jnp.minimum(1.0, s / warmup_steps),
    "linear_decay": linear_decay,
    "rsqrt_decay": lambda s: jax.lax.rsqrt(jnp.float32(jnp.maximum(s, warmup_steps))),
    "rsqrt_normalized_decay": lambda s: jnp.sqrt(warmup_steps / jnp.maximum(s, warmup_steps)),
    "decay_every": lambda s: decay_factor ** (s // steps_per_decay),
    "cosine_decay": cosine_decay,
  }
  names = [name.strip() for name in factors.split("*")]
  for name in names:
    if name not in formulas:
      raise ValueError(
        f"unknown factor {name!r}{near_hint(name, formulas)} in "
        f"create_learning_rate_scheduler.factors = {factors!r}: it must be one of {', '.join(formulas)}"
      )
    if warmup_steps <= 0 and name not in ("constant", "decay_every", "cosine_decay"):
      raise ValueError(
        f"create_learning_rate_scheduler.warmup_steps must be positive for the factor {name!r}, got "
        f"{warmup_steps}: set it to 1 or more, or remove {name!r} from factors = {factors!r}"
      )
  if {"constant", "linear_decay"} <= {*names}:
    others = " * ".join(name for name in names if name not in ("constant", "linear_warmup"))
    raise ValueError(
      f"create_learning_rate_scheduler.factors = {factors!r} multiplies by base_learning_rate twice: "
      f"'linear_decay' contains it, and the warm-up. Set factors = {others!r}, and decay_factor, its "
      "slope per step, to 1 / (TRAIN_STEPS - warmup_steps) for a rate that ends at 0"
    )

  def learning_rate(step: int | jax.Array) -> jax.Array:
    # The step stays an integer, because float32 cannot represent every step beyond 2**24.
    since = jnp.maximum(0, step - step_offset)
    rate = jnp.float32(1.0)
    for name in names:
      rate = rate * formulas[name](since)
    return jnp.maximum(rate, min_learning_rate).astype(jnp.float32)

  return learning_rate
