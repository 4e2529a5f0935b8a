"""Multi-head attention, with a cache for decoding one token at a time."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.partitioning import with_sharding_constraint
from jaxtyping import Array, Float, Shaped

from rosetta_t5.kernels.attention import xla_attention
from rosetta_t5.networks.dense import DenseGeneral, Initializer

_HEADS = ("batch", "length", "heads", "kv")


class MultiHeadDotProductAttention(nn.Module):
  """T5's attention: no biases, logits not scaled, the scale folded into the query's initialiser.

  Attributes:
    num_heads: heads.
    head_dim: the size of one head.
    dtype: what is computed in.
    dropout_rate: dropout on the weights, shared along the queries.
    kernel_init: initialiser of the four kernels; the query's is divided by √head_dim.
    float32_logits: whether logits and softmax are float32 whatever `dtype` is.
    scale_attn_logits: whether the query projection's input is divided by √head_dim as well.
  """

  num_heads: int
  head_dim: int
  dtype: Any = jnp.float32
  dropout_rate: float = 0.0
  kernel_init: Initializer = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
  float32_logits: bool = False
  scale_attn_logits: bool = False

  @nn.compact
  def __call__(
    self,
    inputs_q: Float[Array, "B T D"],
    inputs_kv: Float[Array, "B S D"],
    mask: Shaped[Array, "B 1 T S"] | None = None,
    bias: Float[Array, "1 H T S"] | None = None,
    *,
    decode: bool = False,
    deterministic: bool = False,
  ) -> Float[Array, "B T D"]:
    """Returns what the queries gather from the keys and values.

    Args:
      inputs_q: where queries are made from.
      inputs_kv: where keys and values are made from.
      mask: nonzero where a query may see a key.
      bias: added to the logits.
      decode: whether `inputs_q` is one position, the next after those in the cache. The first call
        (in `init`, with the full length) only makes the cache.
      deterministic: whether dropout is off.
    """
    # In dtype, as T5X has it: √128 rounded to bfloat16 is in the initial values.
    depth_scale = jnp.sqrt(self.head_dim).astype(self.dtype)

    def query_init(*args: Any) -> Array:
      return self.kernel_init(*args) / depth_scale

    scaled_q = inputs_q / depth_scale if self.scale_attn_logits else inputs_q
    q_BTHK = self._project(scaled_q, "query", query_init)
    k_BSHK = self._project(inputs_kv, "key", self.kernel_init)
    v_BSHK = self._project(inputs_kv, "value", self.kernel_init)
    if decode:
      k_BSHK, v_BSHK, mask, bias = self._step_cache(k_BSHK, v_BSHK, mask, bias)
    outputs_BTHK = xla_attention(
      q_BTHK,
      k_BSHK,
      v_BSHK,
      bias_1HTS=bias,
      mask_B1TS=None if mask is None else mask != 0,
      value_scale_BHS=None if deterministic else self._dropout_scale(k_BSHK),
      float32_logits=self.float32_logits,
    )
    return DenseGeneral(
      inputs_q.shape[-1],
      axis=(-2, -1),
      dtype=self.dtype,
      kernel_init=self.kernel_init,
      kernel_axes=("joined_kv", "embed"),
      name="out",
    )(outputs_BTHK)

  def _project(self, inputs: jax.Array, name: str, kernel_init: Initializer) -> jax.Array:
    heads = DenseGeneral(
      (self.num_heads, self.head_dim),
      dtype=self.dtype,
      kernel_init=kernel_init,
      kernel_axes=("embed", "joined_kv"),
      name=name,
    )(inputs)
    return with_sharding_constraint(heads, _HEADS)

  def _dropout_scale(self, k_BSHK: jax.Array) -> jax.Array | None:
    if self.dropout_rate == 0.0:
      return None
    batch, length, heads, _ = k_BSHK.shape
    keep_rate = 1.0 - self.dropout_rate
    # The shape [B, H, 1, S] is T5X's: it decides which keys are dropped.
    keep = jax.random.bernoulli(self.make_rng("dropout"), keep_rate, (batch, heads, 1, length))
    return (keep[:, :, 0] / jnp.asarray(keep_rate, self.dtype)).astype(self.dtype)

  def _step_cache(
    self, k_BSHK: jax.Array, v_BSHK: jax.Array, mask: jax.Array | None, bias: jax.Array | None
  ) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Adds one position to the cache; returns keys and values so far, and their mask and bias."""
    is_made = self.has_variable("cache", "cached_key")
    keys = self.variable("cache", "cached_key", jnp.zeros, k_BSHK.shape, k_BSHK.dtype)
    values = self.variable("cache", "cached_value", jnp.zeros, v_BSHK.shape, v_BSHK.dtype)
    index = self.variable("cache", "cache_index", lambda: jnp.array(0, dtype=jnp.int32))
    if not is_made:
      return k_BSHK, v_BSHK, mask, bias
    if k_BSHK.shape[1] != 1:
      raise ValueError(
        f"decoding takes one position at a time, but was given {k_BSHK.shape[1]}: call the module "
        "without decode=True for whole sequences"
      )
    length = keys.value.shape[1]
    keys.value = jax.lax.dynamic_update_slice_in_dim(keys.value, k_BSHK, index.value, axis=1)
    values.value = jax.lax.dynamic_update_slice_in_dim(values.value, v_BSHK, index.value, axis=1)
    past_111S = (jnp.arange(length) <= index.value)[None, None, None]
    seen = past_111S if mask is None else past_111S & (mask != 0)
    if bias is not None:
      bias = jax.lax.dynamic_slice_in_dim(bias, index.value, 1, axis=2)
    index.value = index.value + 1
    return keys.value, values.value, seen, bias
