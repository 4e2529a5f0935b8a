"""Learning-rate schedules as products of named factors (as in T5X)."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

Schedule = Callable[[int | jax.Array], jax.Array]


class _Arguments(NamedTuple):
  """The arguments of `create_learning_rate_scheduler` that factors depend on."""

  base_learning_rate: float
  warmup_steps: int
  decay_factor: float
  steps_per_decay: int
  steps_per_cycle: int


def _linear_warmup(step: jax.Array, args: _Arguments) -> jax.Array:
  return jnp.minimum(1.0, step / args.warmup_steps)


def _linear_decay(step: jax.Array, args: _Arguments) -> jax.Array:
  decay = 1.0 + args.decay_factor * (args.warmup_steps - step)
  return args.base_learning_rate * jnp.minimum(step / args.warmup_steps, decay)


def _rsqrt_decay(step: jax.Array, args: _Arguments) -> jax.Array:
  return jax.lax.rsqrt(jnp.maximum(step, args.warmup_steps))


def _rsqrt_normalized_decay(step: jax.Array, args: _Arguments) -> jax.Array:
  return jnp.sqrt(args.warmup_steps / jnp.maximum(step, args.warmup_steps))


def _cosine_decay(step: jax.Array, args: _Arguments) -> jax.Array:
  progress = jnp.maximum(0.0, (step - args.warmup_steps) / args.steps_per_cycle)
  return jnp.maximum(0.0, 0.5 * (1.0 + jnp.cos(jnp.pi * (progress % 1.0))))


# Each factor, and the argument that it divides by, which must be positive.
_FACTORS: dict[str, tuple[Callable[[jax.Array, _Arguments], jax.Array | float], str | None]] = {
  "constant": (lambda step, args: args.base_learning_rate, None),
  "linear_warmup": (_linear_warmup, "warmup_steps"),
  "linear_decay": (_linear_decay, "warmup_steps"),
  "rsqrt_decay": (_rsqrt_decay, "warmup_steps"),
  "rsqrt_normalized_decay": (_rsqrt_normalized_decay, "warmup_steps"),
  "decay_every": (
    lambda step, args: args.decay_factor ** (step // args.steps_per_decay),
    "steps_per_decay",
  ),
  "cosine_decay": (_cosine_decay, "steps_per_cycle"),
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
  """Returns a function from a step to its learning rate, a float32 scalar; which can be traced.

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
    ValueError: a factor is unknown, or an argument that it divides by is not positive.
  """
  names = [name.strip() for name in factors.split("*")]
  args = _Arguments(
    base_learning_rate=base_learning_rate,
    warmup_steps=warmup_steps,
    decay_factor=decay_factor,
    steps_per_decay=steps_per_decay,
    steps_per_cycle=steps_per_cycle,
  )
  for name in names:
    _check_factor(name, factors, args)

  def learning_rate(step: int | jax.Array) -> jax.Array:
    since = jnp.maximum(0.0, jnp.asarray(step, jnp.float32) - step_offset)
    rate = jnp.float32(1.0)
    for name in names:
      factor, _ = _FACTORS[name]
      rate = rate * factor(since, args)
    return jnp.maximum(rate, min_learning_rate).astype(jnp.float32)

  return learning_rate


def _check_factor(name: str, factors: str, args: _Arguments) -> None:
  if name not in _FACTORS:
    near = difflib.get_close_matches(name, _FACTORS, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(
      f"unknown factor {name!r}{hint} in create_learning_rate_scheduler.factors = {factors!r}: "
      f"it must be one of {', '.join(_FACTORS)}"
    )
  _, divisor = _FACTORS[name]
  if divisor is not None and getattr(args, divisor) <= 0:
    raise ValueError(
      f"create_learning_rate_scheduler.{divisor} must be positive for the factor {name!r}, got "
      f"{getattr(args, divisor)}: set it to 1 or more, or remove {name!r} from factors = {factors!r}"
    )
