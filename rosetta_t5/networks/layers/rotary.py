"""Rotary positions: pairs of a head's features turned by angles that grow with the position."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotated(
  x_BTHK: Float[Array, "B T H K"], positions_BT: Int[Array, "#B T"], base: float = 10_000.0
) -> Float[Array, "B T H K"]:
  """Returns queries or keys turned to their positions (Su et al. 2021, arXiv:2104.09864).

  Feature i and feature i + K/2 are a pair, as GPT-NeoX and Llama have it; its angle is
  position · base^(−2i/K). Angles are float32, since bfloat16 cannot tell position 257 from 256.

  Args:
    x_BTHK: queries or keys; K is even.
    positions_BT: where each stands.
    base: how slowly the slowest pair turns.
  """
  half = x_BTHK.shape[-1] // 2
  frequency_P = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle_BT1P = positions_BT[..., None, None].astype(jnp.float32) * frequency_P[None, None, None]
  cos, sin = jnp.cos(angle_BT1P), jnp.sin(angle_BT1P)
  first, second = x_BTHK[..., :half].astype(jnp.float32), x_BTHK[..., half:].astype(jnp.float32)
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return turned.astype(x_BTHK.dtype)
