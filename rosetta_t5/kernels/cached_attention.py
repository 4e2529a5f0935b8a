"""Attention of a decoding step: a few queries, and keys and values in the layout of the cache.

The result is that of `xla_attention`. The matmuls are written so that XLA reads keys
[batch, heads, kv, length] and values [batch, heads, length, kv] without copying them, because reading
them is most of a step's time.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rosetta_t5.kernels.xla_attention import attention_weights


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
