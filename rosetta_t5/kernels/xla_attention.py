"""Attention as plain JAX operations: the reference for every other kernel, and a decoding step's.

`cached_attention` attends with a few queries to keys [batch, heads, kv, length] and values
[batch, heads, length, kv], as the cache stores them. Its matmuls are written so that XLA reads both
without copying them, because reading them is most of a step's time.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Bool, Float, Int

# The logit of a masked key, as in T5X. A query that sees no key attends to all keys equally.
MASKED_LOGIT = -1e10


def xla_attention(
  q_BTHK: Float[Array, "B T H K"],
  k_BSHK: Float[Array, "B S H K"],
  v_BSHK: Float[Array, "B S H Kv"],
  bias_1HTS: Float[Array, "#B #H #T S"] | None = None,
  mask_B1TS: Bool[Array, "#B #H #T S"] | None = None,
  value_scale_BHS: Float[Array, "B H S"] | None = None,
  float32_logits: bool = False,
) -> Float[Array, "B T H Kv"]:
  """Returns softmax(q·k + bias)·v over the visible keys, in the type of `v`.

  Logits are not scaled by 1/√K: T5's initialization does that.

  Args:
    q_BTHK: queries.
    k_BSHK: keys.
    v_BSHK: values, whose size may differ from the keys'.
    bias_1HTS: added to the logits.
    mask_B1TS: True where the query may see the key.
    value_scale_BHS: a factor for each head's value at each key. It carries attention dropout: T5X
      shares the mask between queries, so dropping a weight and dropping a value are equivalent.
    float32_logits: whether logits and softmax are float32 whatever the type of the inputs.
  """
  if float32_logits:
    q_BTHK, k_BSHK = q_BTHK.astype(jnp.float32), k_BSHK.astype(jnp.float32)
  logits_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK)
  weights_BHTS = attention_weights(logits_BHTS, bias_1HTS, mask_B1TS).astype(v_BSHK.dtype)
  if value_scale_BHS is not None:
    v_BSHK = v_BSHK * value_scale_BHS.transpose(0, 2, 1)[..., None].astype(v_BSHK.dtype)
  return jnp.einsum("bhts,bshk->bthk", weights_BHTS, v_BSHK)


def attention_weights(
  logits_BHTS: Float[Array, "B H T S"],
  bias_1HTS: Float[Array, "#B #H #T S"] | None,
  mask_B1TS: Bool[Array, "#B #H #T S"] | None,
) -> Float[Array, "B H T S"]:
  """Returns softmax(logits + bias) over the visible keys."""
  if bias_1HTS is not None:
    logits_BHTS = add_broadcast(logits_BHTS, bias_1HTS.astype(logits_BHTS.dtype))
  if mask_B1TS is not None:
    logits_BHTS = jnp.where(mask_B1TS, logits_BHTS, jnp.asarray(MASKED_LOGIT, logits_BHTS.dtype))
  return jax.nn.softmax(logits_BHTS)


@jax.custom_vjp
def add_broadcast(
  x_BHTS: Float[Array, "B H T S"], y_1HTS: Float[Array, "#B #H #T #S"]
) -> Float[Array, "B H T S"]:
  """Returns x + y, where y may be shared by the whole batch, and by heads, queries or keys.

  The gradient sums over the batch by a matmul with ones. JAX's sum for a broadcast takes XLA 50 times
  longer on a CPU, a third of a layer's time.
  """
  return x_BHTS + y_1HTS


def _add_forward(x_BHTS: Array, y_1HTS: Array) -> tuple[Array, Array]:
  return x_BHTS + y_1HTS, y_1HTS


def _add_backward(y_1HTS: Array, grad_BHTS: Array) -> tuple[Array, Array]:
  grad_1HTS = grad_BHTS
  if y_1HTS.shape[0] < grad_BHTS.shape[0]:
    ones_B = jnp.ones(grad_BHTS.shape[0], grad_BHTS.dtype)
    grad_HTS = jnp.einsum("b,bhts->hts", ones_B, grad_BHTS, precision=jax.lax.Precision.HIGHEST)
    grad_1HTS = grad_HTS[None]
  shared = [axis for axis in (1, 2, 3) if y_1HTS.shape[axis] < grad_BHTS.shape[axis]]
  return grad_BHTS, jnp.sum(grad_1HTS, shared, keepdims=True) if shared else grad_1HTS


add_broadcast.defvjp(_add_forward, _add_backward)


def bernoulli_of_rows(
  key: Array, p: float, shape: tuple[int, ...], axis: int, rows: Int[Array, " N"]
) -> Bool[Array, "..."]:
  """Returns rows of `jax.random.bernoulli(key, p, shape)`: N of those along the dimension `axis`.

  jax's default generator, threefry, hashes the index of each number, so any of them can be computed
  alone. The numbers of other generators cannot be; for them the rows get a key of their own.

  Args:
    key: the random key.
    p: the probability of True.
    shape: the shape of the whole array, which has less than 2³² elements.
    axis: the dimension.
    rows: the indices along `axis`.
  """
  axis %= len(shape)
  selected = (*shape[:axis], len(rows), *shape[axis + 1 :])
  words = jax.random.key_data(key)
  is_hashed = jax.config.values["jax_threefry_partitionable"]
  if words.shape != (2,) or not is_hashed:
    return jax.random.bernoulli(jax.random.fold_in(key, rows[0]), p, selected)
  assert math.prod(shape) < 2**32
  counts = jnp.zeros(selected, jnp.uint32)
  for dimension in range(len(shape)):
    indices = jax.lax.broadcasted_iota(jnp.uint32, selected, dimension)
    if dimension == axis:
      indices = jax.lax.broadcast_in_dim(rows.astype(jnp.uint32), selected, (axis,))
    counts += indices * jnp.uint32(math.prod(shape[dimension + 1 :]))
  high, low = threefry2x32_p.bind(*words, jnp.zeros_like(counts), counts)
  # As in `jax.random.uniform`: 23 random bits are the mantissa of a number in [1, 2).
  mantissa = jax.lax.shift_right_logical(high ^ low, jnp.uint32(9)) | jnp.uint32(0x3F800000)
  return jax.lax.bitcast_convert_type(mantissa, jnp.float32) - 1.0 < p


def cached_attention(
  q_BTHK: Float[Array, "B T H K"],
  k_BHKS: Float[Array, "B H K S"],
  v_BHSK: Float[Array, "B H S Kv"],
  bias_1HTS: Float[Array, "#B #H #T S"] | None = None,
  mask_B1TS: Bool[Array, "#B #H #T S"] | None = None,
  float32_logits: bool = False,
) -> Float[Array, "B T H Kv"]:
  """Returns softmax(q·k + bias)·v over the visible keys; see `xla_attention`."""
  if float32_logits:
    q_BTHK, k_BHKS = q_BTHK.astype(jnp.float32), k_BHKS.astype(jnp.float32)
  logits_BHTS = jnp.matmul(q_BTHK.swapaxes(1, 2), k_BHKS)
  weights_BHTS = attention_weights(logits_BHTS, bias_1HTS, mask_B1TS).astype(v_BHSK.dtype)
  return jnp.matmul(weights_BHTS, v_BHSK).swapaxes(1, 2)


def beam_attention(
  q_BMHK: Float[Array, "B M H K"],
  k_NHKS: Float[Array, "N H K S"],
  v_NHSK: Float[Array, "N H S Kv"],
  beam_BMS: Int[Array, "B M S"],
  bias_1HMS: Float[Array, "#B #H #M S"] | None = None,
  mask_B1MS: Bool[Array, "#B #H #M S"] | None = None,
  float32_logits: bool = False,
) -> Float[Array, "B M H Kv"]:
  """Returns `cached_attention` of one query per beam, if other beams may have written earlier positions.

  Every query is multiplied with the keys of all beams of its example, and its logits are selected from
  the results. Beam search therefore does not have to move keys and values when it reorders beams.

  Args:
    q_BMHK: one query for each of M beams.
    k_NHKS: the keys that each beam wrote; N = B·M, with an example's beams next to each other.
    v_NHSK: the values that each beam wrote.
    beam_BMS: the beam that wrote the key and value which a beam sees at each position.
    bias_1HMS: added to the logits.
    mask_B1MS: True where the query may see the position.
    float32_logits: whether logits and softmax are float32 whatever the type of the inputs.
  """
  if float32_logits:
    q_BMHK, k_NHKS = q_BMHK.astype(jnp.float32), k_NHKS.astype(jnp.float32)
  batch, beams, heads, _ = q_BMHK.shape
  is_writer_BW1MS = beam_BMS[:, None, None] == jnp.arange(beams)[None, :, None, None, None]
  # Only queries and logits are reshaped: XLA would copy reshaped keys and values.
  q_BHMK = q_BMHK.swapaxes(1, 2)
  q_NHMK = jnp.repeat(q_BHMK, beams, axis=0)
  logits_BWHMS = jnp.matmul(q_NHMK, k_NHKS).reshape(batch, beams, heads, beams, -1)
  logits_BHMS = jnp.where(is_writer_BW1MS, logits_BWHMS, 0).sum(axis=1)
  weights_BHMS = attention_weights(logits_BHMS, bias_1HMS, mask_B1MS).astype(v_NHSK.dtype)
  weights_BWHMS = jnp.where(is_writer_BW1MS, weights_BHMS[:, None], 0)
  # The writers' parts are added in float32, so that the result does not depend on who wrote what.
  attended_NHMK = jnp.matmul(
    weights_BWHMS.reshape(-1, *weights_BHMS.shape[1:]),
    v_NHSK,
    preferred_element_type=jnp.float32,
  )
  attended_BHMK = attended_NHMK.reshape(batch, beams, heads, beams, -1).sum(axis=1)
  return attended_BHMK.swapaxes(1, 2).astype(v_NHSK.dtype)
