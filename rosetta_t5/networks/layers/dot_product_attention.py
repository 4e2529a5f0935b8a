"""T5X's dot_product_attention, a function of queries, keys and values, and its dropout."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rosetta_t5.kernels.xla_attention import xla_attention
from rosetta_t5.networks.layers.pipelined_stack import microbatch_rows


def attention_dropout_scale(
  key: Array, rate: float, shape_BHS: tuple[int, ...], dtype: Any
) -> Float[Array, "B H S"]:
  """Returns a factor for each head's value at each key: 0 where dropout drops the key."""
  keep_rate = 1.0 - rate
  batch, heads, length = shape_BHS
  rows = microbatch_rows()
  # T5X draws the mask in the shape [B, H, 1, S]; the shape decides which keys are dropped.
  shape = (batch, heads, 1, length)
  if rows is None:
    keep = jax.random.bernoulli(key, keep_rate, shape)
  else:
    keep = rows.bernoulli(key, keep_rate, shape, 0)
  return (keep[:, :, 0] / jnp.asarray(keep_rate, dtype)).astype(dtype)


def dot_product_attention(
  query: Float[Array, "B T H K"],
  key: Float[Array, "B S H K"],
  value: Float[Array, "B S H Kv"],
  bias: Float[Array, "#B #H #T #S"] | None = None,
  dropout_rng: Array | None = None,
  dropout_rate: float = 0.0,
  deterministic: bool = False,
  dtype: Any = jnp.float32,
  float32_logits: bool = False,
) -> Float[Array, "B T H Kv"]:
  """Returns the attention of queries, keys and values: the module's computation as a function.

  Args:
    query: queries, not scaled.
    key: keys.
    value: values.
    bias: added to the logits. It also carries masks, as −1e10 where a query must not see a key.
    dropout_rng: the random key for dropout of the weights, which is shared by all queries.
    dropout_rate: the dropout rate.
    deterministic: whether dropout is off.
    dtype: the type that the weights are rounded to. The result has the wider of this type and the
      values' type.
    float32_logits: whether logits and softmax are float32 whatever the type of the inputs.

  Raises:
    ValueError: dropout is on but there is no key for it.
  """
  value_scale_BHS = None
  if not deterministic and dropout_rate > 0.0:
    if dropout_rng is None:
      raise ValueError(
        f"dot_product_attention needs dropout_rng, as dropout_rate = {dropout_rate}: pass a random "
        "key, or deterministic=True"
      )
    shape = (key.shape[0], key.shape[2], key.shape[1])
    value_scale_BHS = attention_dropout_scale(dropout_rng, dropout_rate, shape, dtype)
  if bias is not None:
    pairs = (query.shape[2], query.shape[1], key.shape[1])
    bias = jnp.broadcast_to(bias, (bias.shape[0], *pairs))
  value = value.astype(jnp.promote_types(dtype, value.dtype))
  return xla_attention(query, key, value, bias, None, value_scale_BHS, float32_logits)
