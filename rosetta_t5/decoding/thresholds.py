"""Top-k and top-p masks, computed by a binary search for the threshold as in T5X.

Sorting a vocabulary takes longer than the 32 counts that find the threshold bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

_SIGN = jnp.iinfo(jnp.int32).min
_ALL_BUT_SIGN = jnp.iinfo(jnp.int32).max
_EXPONENT = 0x7F800000


def int32_bsearch(
  batch_shape: Sequence[int], predicate: Callable[[Int32[Array, "..."]], Bool[Array, "..."]]
) -> Int32[Array, "..."]:
  """Returns the largest int32 for which the predicate is false, for each element of the batch.

  Args:
    batch_shape: the shape of the thresholds.
    predicate: a function of thresholds that is false up to some number and true above it. If it is
      true everywhere, the smallest int32 is returned.
  """
  # Starting from the smallest number, set each bit, from the highest, if the predicate stays false.
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
  """Returns the largest finite float32 for which the predicate is false, for each element of the batch.

  Args:
    batch_shape: the shape of the thresholds.
    predicate: see `int32_bsearch`; its thresholds are float32.
  """

  def on_bits(ordered: jax.Array) -> jax.Array:
    bits = _swap_order(ordered)
    is_finite = (bits & _EXPONENT) != _EXPONENT
    # Infinities and NaNs are at both ends: those below count as false, those above as true.
    return jnp.where(is_finite, predicate(_as_float(bits)), ordered >= 0)

  return _as_float(_swap_order(int32_bsearch(batch_shape, on_bits)))


def topk_mask(
  x: Float[Array, "*batch vocab"],
  k: int | Int32[Array, ""],
  replace_val: float | np.ndarray | Float[Array, ""],
) -> Float[Array, "*batch vocab"]:
  """Returns `x` with all but the k largest entries of each row replaced; ties with the k-th are kept.

  Args:
    x: the rows.
    k: the number of entries to keep; may be traced.
    replace_val: the value of the other entries.
  """

  # The cutoff is the smallest number with fewer than k entries above it. The search finds the largest
  # number with a property, so it is applied to negated numbers.
  def has_k_above(negated_B: jax.Array) -> jax.Array:
    return jnp.sum(x > -negated_B[..., None], axis=-1) >= k

  cutoff_B = -float32_bsearch(x.shape[:-1], has_k_above)
  return jnp.where(x >= cutoff_B[..., None], x, jnp.asarray(replace_val, x.dtype))


def topp_mask(
  logits: Float[Array, "*batch vocab"],
  p: float | Float[Array, ""],
  replace_val: float | np.ndarray | Float[Array, ""],
) -> Float[Array, "*batch vocab"]:
  """Returns `logits` with all but the most probable entries, whose total probability is p, replaced.

  Args:
    logits: the rows.
    p: the total probability that the smallest set of kept entries reaches; may be traced.
    replace_val: the value of the other entries.
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
  return x ^ jnp.where(x < 0, jnp.int32(_ALL_BUT_SIGN), jnp.int32(0))


def _as_float(bits: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(bits, jnp.float32)
