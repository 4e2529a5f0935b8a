"""Attention as plain JAX operations: the reference for every other kernel, and a decoding step's.

`cached_attention` attends with a few queries to keys [batch, heads, kv, length] and values
[batch, heads, length, kv], as the cache stores them. Its matmuls are written so that XLA reads both
without copying them, because reading them is most of a step's time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# The logit of a masked key, as in T5X. A query that sees no key attends to all keys equally.
MASKED_LOGIT = -1e10


def xla_attention(
  q_BTHK: Float[Array, "B T H K"],
  k_BSGK: Float[Array, "B S G K"],
  v_BSGK: Float[Array, "B S G Kv"],
  bias_1HTS: Float[Array, "#B #H #T S"] | None = None,
  mask_B1TS: Bool[Array, "#B #H #T S"] | None = None,
  value_scale_BGS: Float[Array, "B G S"] | None = None,
  float32_logits: bool = False,
  softcap: float | None = None,
) -> Float[Array, "B T H Kv"]:
  """Returns softmax(q·k + bias)·v over the visible keys, in the type of `v`.

  Logits are not scaled by 1/√K: T5's initialization does that.

  Args:
    q_BTHK: queries.
    k_BSGK: keys. G divides H; consecutive heads of queries share a head of keys (grouped queries).
    v_BSGK: values, whose size may differ from the keys'.
    bias_1HTS: added to the logits.
    mask_B1TS: True where the query may see the key.
    value_scale_BGS: a factor for each head's value at each key. It carries attention dropout: T5X
      shares the mask between queries, so dropping a weight and dropping a value are equivalent.
    float32_logits: whether logits and softmax are float32 whatever the type of the inputs.
    softcap: c of the soft limit of q·k, c·tanh(q·k/c) (Gemma 2); None for no limit.
  """
  if value_scale_BGS is not None:
    v_BSGK = v_BSGK * value_scale_BGS.transpose(0, 2, 1)[..., None].astype(v_BSGK.dtype)
  options = (bias_1HTS, mask_B1TS, float32_logits, softcap)
  weights_BHTS = query_key_weights(q_BTHK, k_BSGK, *options).astype(v_BSGK.dtype)
  return jnp.einsum("bhts,bshk->bthk", weights_BHTS, _of_heads(v_BSGK, q_BTHK))


def query_key_weights(
  q_BTHK: Float[Array, "B T H K"],
  k_BSGK: Float[Array, "B S G K"],
  bias_1HTS: Float[Array, "#B #H #T S"] | None,
  mask_B1TS: Bool[Array, "#B #H #T S"] | None,
  float32_logits: bool,
  softcap: float | None,
) -> Float[Array, "B H T S"]:
  """Returns softmax(q·k + bias) over the visible keys; see `xla_attention`."""
  if float32_logits:
    q_BTHK, k_BSGK = q_BTHK.astype(jnp.float32), k_BSGK.astype(jnp.float32)
  products_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, _of_heads(k_BSGK, q_BTHK))
  return attention_weights(soft_cap(products_BHTS, softcap), bias_1HTS, mask_B1TS)


def _of_heads(x_BSGK: jax.Array, q_BTHK: jax.Array) -> jax.Array:
  """Returns the keys or values of each head of queries, [B, S, H, K]."""
  repeats = q_BTHK.shape[2] // x_BSGK.shape[2]
  return x_BSGK if repeats == 1 else jnp.repeat(x_BSGK, repeats, 2)


def soft_cap(x: Float[Array, "..."], cap: float | Array | None) -> Float[Array, "..."]:
  """Returns cap·tanh(x/cap), whose absolute value is less than `cap`; x if `cap` is None."""
  return x if cap is None else cap * jnp.tanh(x / cap)


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


def cached_attention(
  q_BMHK: Float[Array, "B M H K"],
  k_BGKS: Float[Array, "B G K S"],
  v_BGSK: Float[Array, "B G S Kv"],
  bias_1HMS: Float[Array, "#B #H #M S"] | None = None,
  mask_B1MS: Bool[Array, "#B #H #M S"] | None = None,
  float32_logits: bool = False,
  softcap: float | None = None,
) -> Float[Array, "B M H Kv"]:
  """Returns softmax(q·k + bias)·v over the visible keys; see `xla_attention`.

  The heads of queries that share a head of keys are rows of one matmul, so that no key is copied.
  """
  if float32_logits:
    q_BMHK, k_BGKS = q_BMHK.astype(jnp.float32), k_BGKS.astype(jnp.float32)
  logits_BHMS = _heads(jnp.matmul(_groups(q_BMHK.swapaxes(1, 2), k_BGKS), k_BGKS), q_BMHK)
  logits_BHMS = soft_cap(logits_BHMS, softcap)
  weights_BHMS = attention_weights(logits_BHMS, bias_1HMS, mask_B1MS).astype(v_BGSK.dtype)
  return _heads(jnp.matmul(_groups(weights_BHMS, v_BGSK), v_BGSK), q_BMHK).swapaxes(1, 2)


def beam_attention(
  q_BMHK: Float[Array, "B M H K"],
  k_NGKS: Float[Array, "N G K S"],
  v_NGSK: Float[Array, "N G S Kv"],
  beam_BMS: Int[Array, "B M S"],
  bias_1HMS: Float[Array, "#B #H #M S"] | None = None,
  mask_B1MS: Bool[Array, "#B #H #M S"] | None = None,
  float32_logits: bool = False,
  softcap: float | None = None,
) -> Float[Array, "B M H Kv"]:
  """Returns `cached_attention` of one query per beam, if other beams may have written earlier positions.

  Every query is multiplied with the keys of all beams of its example, and its logits are selected from
  the results. Beam search therefore does not have to move keys and values when it reorders beams.

  Args:
    q_BMHK: one query for each of M beams.
    k_NGKS: the keys that each beam wrote; N = B·M, with an example's beams next to each other.
    v_NGSK: the values that each beam wrote.
    beam_BMS: the beam that wrote the key and value which a beam sees at each position.
    bias_1HMS: added to the logits.
    mask_B1MS: True where the query may see the position.
    float32_logits: whether logits and softmax are float32 whatever the type of the inputs.
    softcap: see `xla_attention`.
  """
  if float32_logits:
    q_BMHK, k_NGKS = q_BMHK.astype(jnp.float32), k_NGKS.astype(jnp.float32)
  batch, beams, _, _ = q_BMHK.shape
  is_writer_BW1MS = beam_BMS[:, None, None] == jnp.arange(beams)[None, :, None, None, None]
  # Only queries and logits are reshaped: XLA would copy reshaped keys and values.
  q_NHMK = jnp.repeat(q_BMHK.swapaxes(1, 2), beams, axis=0)
  logits_NHMS = _heads(jnp.matmul(_groups(q_NHMK, k_NGKS), k_NGKS), q_BMHK)
  logits_BWHMS = logits_NHMS.reshape(batch, beams, *logits_NHMS.shape[1:])
  logits_BHMS = soft_cap(jnp.where(is_writer_BW1MS, logits_BWHMS, 0).sum(axis=1), softcap)
  weights_BHMS = attention_weights(logits_BHMS, bias_1HMS, mask_B1MS).astype(v_NGSK.dtype)
  weights_BWHMS = jnp.where(is_writer_BW1MS, weights_BHMS[:, None], 0)
  weights_NHMS = weights_BWHMS.reshape(-1, *weights_BHMS.shape[1:])
  # The writers' parts are added in float32, so that the result does not depend on who wrote what.
  attended = jnp.matmul(_groups(weights_NHMS, v_NGSK), v_NGSK, preferred_element_type=jnp.float32)
  attended_NHMK = _heads(attended, q_BMHK)
  attended_BHMK = attended_NHMK.reshape(batch, beams, *attended_NHMK.shape[1:]).sum(axis=1)
  return attended_BHMK.swapaxes(1, 2).astype(v_NGSK.dtype)


def _groups(x_NHMJ: jax.Array, cached_NGJJ: jax.Array) -> jax.Array:
  """Returns [N, H, M, J] as [N, G, H/G·M, J], the rows that are multiplied by each of G cached heads."""
  batch, _, _, size = x_NHMJ.shape
  return x_NHMJ.reshape(batch, cached_NGJJ.shape[1], -1, size)


def _heads(x_NGRJ: jax.Array, q_BMHK: jax.Array) -> jax.Array:
  """Returns the result of a matmul with rows of `_groups` as [N, H, M, J]."""
  _, queries, heads, _ = q_BMHK.shape
  return x_NGRJ.reshape(x_NGRJ.shape[0], heads, queries, -1)
