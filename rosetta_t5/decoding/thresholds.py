"""Masks of the k largest or the p most probable entries, by binary search for the threshold (T5X).

Sorting a vocabulary takes longer than the 32 counts that find the threshold bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

_SIGN = jnp.iinfo(jnp.int32).min
_REST = jnp.iinfo(jnp.int32).max
_EXPONENT = 0x7F800000


def int32_bsearch(
  batch_shape: Sequence[int], predicate: Callable[[Int32[Array, "..."]], Bool[Array, "..."]]
) -> Int32[Array, "..."]:
  """Returns for each element of the batch the largest int32 for which the predicate is false.

  Args:
    batch_shape: the shape of the thresholds.
    predicate: a function of thresholds that is false up to some number and true above it. Where it is
      true everywhere, the smallest int32 is returned.
  """
  # From the smallest number on, set each bit, the highest first, that leaves the predicate false.
  smallest = jnp.full(tuple(batch_shape), _SIGN, jnp.int32)
  is_negative = predicate(jnp.zeros(tuple(batch_shape), jnp.int32))
  found = jnp.where(is_negative, smallest, 0)

  def set_bit(i: jax.Array, found: jax.Array) -> jax.Array:
    larger = found | (jnp.int32(1) << (30 - i))
    return jnp.where(predicate(larger), found, larger)

  return jax.lax.fori_loop(0, 31, set_bit, found)


def float32_bsearch(
  batch_shape: Sequence[int], predicate: Callable[[Float[Array, "..."]], Bool[Array, "..."]]
) -> Float[Array, "..."]:
  """Returns for each element of the batch the largest finite float32 for which the predicate is false.

  Args:
    batch_shape: the shape of the thresholds.
    predicate: as for `int32_bsearch`, of float32 thresholds.
  """

  def on_bits(ordered: jax.Array) -> jax.Array:
    bits = _swap_order(ordered)
    is_finite = (bits & _EXPONENT) != _EXPONENT
    # Infinities and NaNs lie at both ends: those below count as false, those above as true.
    return jnp.where(is_finite, predicate(_as_float(bits)), ordered >= 0)

  return _as_float(_swap_order(int32_bsearch(batch_shape, on_bits)))


def topk_mask(
  x: Float[Array, "*batch vocab"],
  k: int | Int32[Array, ""],
  replace_val: float | np.ndarray | Float[Array, ""],
) -> Float[Array, "*batch vocab"]:
  """Returns `x` with all but the k largest entries of each row replaced; ties with the last are kept.

  Args:
    x: the rows.
    k: how many to keep; may be traced.
    replace_val: what the others become.
  """

  # Negated, as the search finds the largest number that is not yet enough, and the cutoff is the
  # smallest that leaves less than k above it.
  def leaves_k_above(negated_B: jax.Array) -> jax.Array:
    return jnp.sum(x > -negated_B[..., None], axis=-1) >= k

  cutoff_B = -float32_bsearch(x.shape[:-1], leaves_k_above)
  return jnp.where(x >= cutoff_B[..., None], x, jnp.asarray(replace_val, x.dtype))


def topp_mask(
  logits: Float[Array, "*batch vocab"],
  p: float | Float[Array, ""],
  replace_val: float | np.ndarray | Float[Array, ""],
) -> Float[Array, "*batch vocab"]:
  """Returns `logits` with all replaced but the fewest most probable ones that have a mass of p.

  Args:
    logits: the rows.
    p: the probability that what is kept must reach; may be traced.
    replace_val: what the others become.
  """
  probs = jax.nn.softmax(logits, axis=-1)

  def falls_short(threshold_B: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(probs >= threshold_B[..., None], probs, 0.0), axis=-1) < p

  threshold_B = float32_bsearch(logits.shape[:-1], falls_short)
  return jnp.where(probs >= threshold_B[..., None], logits, jnp.asarray(replace_val, logits.dtype))


def _swap_order(x: jax.Array) -> jax.Array:
  """Maps int32 to the bits of float32 in the order of the floats, and back.

  Among negative floats larger bits are smaller numbers, so those bits are flipped.
  """
  return x ^ jnp.where(x < 0, jnp.int32(_REST), jnp.int32(0))


def _as_float(bits: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(bits, jnp.float32)
