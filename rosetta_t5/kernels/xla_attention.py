"""Attention as plain JAX operations: the reference for every other attention kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

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
