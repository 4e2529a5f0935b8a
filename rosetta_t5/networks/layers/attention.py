"""Multi-head attention, with a cache for decoding one token at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from rosetta_t5.kernels.cached_attention import beam_attention, cached_attention
from rosetta_t5.kernels.xla_attention import xla_attention
from rosetta_t5.networks.kernel_choice import SegmentMask, fused_attention
from rosetta_t5.networks.layers import decoding_cache
from rosetta_t5.networks.layers.decoding_cache import KEPT
from rosetta_t5.networks.layers.dense import DenseGeneral, Initializer, Product, matrix_product
from rosetta_t5.networks.layers.rotary import rotated
from rosetta_t5.parallel.sharding_constraints import with_sharding_constraint

_HEADS = ("batch", "length", "heads", "kv")


def _dropout_scale(key: Array, rate: float, k_BSHK: Array, dtype: Any) -> jax.Array:
  """Returns a factor [B, H, S] for each head's values: 0 where a key is dropped."""
  batch, length, heads, _ = k_BSHK.shape
  keep_rate = 1.0 - rate
  # The shape [B, H, 1, S] is T5X's: it decides which keys are dropped.
  keep = jax.random.bernoulli(key, keep_rate, (batch, heads, 1, length))
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
  """Returns what the queries gather from the values; the module's computation as a function.

  Args:
    query: queries, not scaled.
    key: keys.
    value: values.
    bias: added to the logits; masks are given as a bias too, −1e10 where a key may not be seen.
    dropout_rng: the key of the dropout on the weights, which is shared along the queries.
    dropout_rate: its rate.
    deterministic: whether dropout is off.
    dtype: what the weights are rounded to; the result has the wider of this and the values' type.
    float32_logits: whether logits and softmax are float32 whatever the inputs' type.

  Raises:
    ValueError: there is dropout but no key for it.
  """
  value_scale_BHS = None
  if not deterministic and dropout_rate > 0.0:
    if dropout_rng is None:
      raise ValueError(
        f"dot_product_attention was given dropout_rate = {dropout_rate} but no dropout_rng: give a "
        "key, or deterministic=True"
      )
    value_scale_BHS = _dropout_scale(dropout_rng, dropout_rate, key, dtype)
  if bias is not None:
    pairs = (query.shape[2], query.shape[1], key.shape[1])
    bias = jnp.broadcast_to(bias, (bias.shape[0], *pairs))
  return xla_attention(
    query,
    key,
    value.astype(jnp.promote_types(dtype, value.dtype)),
    bias_1HTS=bias,
    value_scale_BHS=value_scale_BHS,
    float32_logits=float32_logits,
  )


class MultiHeadDotProductAttention(nn.Module):
  """T5's attention: no biases, logits not scaled, the scale folded into the query's initialiser.

  With `use_bias` and `scale_queries` it is GPT's.

  Attributes:
    num_heads: heads.
    head_dim: the size of one head.
    dtype: what is computed in.
    dropout_rate: dropout on the weights, shared along the queries.
    kernel_init: initialiser of the four kernels; the query's is divided by √head_dim.
    float32_logits: whether logits and softmax are float32 whatever `dtype` is.
    scale_attn_logits: whether the query projection's input is divided by √head_dim as well.
    nd_kernel: whether the kernels are stored as [embed, heads, kv] and [heads, kv, embed], and how
      `kernel_init` is called; see `DenseGeneral`.
    make_product: how the projections multiply; see `DenseGeneral`.
    transpose_batch_sequence: whether inputs and output are [length, batch, features].
    fuse_qkv_params: whether one product makes queries, keys and values where they have one input,
      else keys and values. The kernels are stacked while a program is traced; they are stored as
      ever.
    attention_kernel: the fused kernel for a `SegmentMask`, flash or cudnn.
    use_bias: whether the four projections have biases.
    scale_queries: whether queries are divided by √head_dim, and the initialiser's values are not.
  """

  num_heads: int
  head_dim: int
  dtype: Any = jnp.float32
  dropout_rate: float = 0.0
  kernel_init: Initializer = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
  float32_logits: bool = False
  scale_attn_logits: bool = False
  nd_kernel: bool = False
  make_product: Callable[[], Product] | None = None
  transpose_batch_sequence: bool = False
  fuse_qkv_params: bool = False
  attention_kernel: str = "xla"
  use_bias: bool = False
  scale_queries: bool = False

  @nn.compact
  def __call__(
    self,
    inputs_q: Float[Array, "B T D"],
    inputs_kv: Float[Array, "B S D"],
    mask: Shaped[Array, "B 1 T S"] | SegmentMask | None = None,
    bias: Float[Array, "1 H T S"] | None = None,
    *,
    decode: bool = False,
    deterministic: bool = False,
    prefill: bool = False,
    prefill_lengths: Int[Array, " B"] | None = None,
    rotary_positions: Int[Array, "#B T"] | None = None,
  ) -> Float[Array, "B T D"]:
    """Returns what the queries gather from the keys and values.

    Args:
      inputs_q: where queries are made from.
      inputs_kv: where keys and values are made from.
      mask: nonzero where a query may see a key; a `SegmentMask` takes `attention_kernel` into use.
      bias: added to the logits.
      decode: whether `inputs_q` is one position, the next after those in the cache. The first call
        (in `init`, with the full length) only makes the cache.
      deterministic: whether dropout is off.
      prefill: whether the inputs are whole prompts, to be put into a cache that has been made.
      prefill_lengths: how many of their positions; None for as many as the first query sees.
      rotary_positions: where queries and keys, which stand in the same places, are turned to; None
        for not at all.

    Raises:
      ValueError: `prefill` and `decode` at once, or several positions to decode.
    """
    q_BTHK, k_BSHK, v_BSHK = self._queries_keys_values(inputs_q, inputs_kv)
    if self.scale_queries:
      q_BTHK = q_BTHK / jnp.sqrt(self.head_dim).astype(q_BTHK.dtype)
    if rotary_positions is not None:
      q_BTHK, k_BSHK = (rotated(x_BTHK, rotary_positions) for x_BTHK in (q_BTHK, k_BSHK))
    if prefill and decode:
      raise ValueError(
        "prefill and decode exclude each other: first fill the cache with prefill=True, then decode "
        "position by position with decode=True"
      )
    if prefill or decode:
      assert not isinstance(mask, SegmentMask)  # Fused kernels are for whole sequences.
      k_BSHK, v_BSHK, mask, bias = self._use_cache(
        k_BSHK, v_BSHK, mask, bias, prefill, prefill_lengths
      )
    value_scale = None if deterministic else self._dropout_scale(k_BSHK)
    is_step = q_BTHK.shape[1] == 1 and (decode or self.has_variable(KEPT, "keys"))
    attend = self._attend_in_step if is_step else self._attend
    outputs_BTHK = attend(q_BTHK, k_BSHK, v_BSHK, bias, mask, value_scale)
    if self.transpose_batch_sequence:
      outputs_BTHK = outputs_BTHK.swapaxes(0, 1)
    return DenseGeneral(
      inputs_q.shape[-1],
      axis=(-2, -1),
      dtype=self.dtype,
      kernel_init=self.kernel_init,
      kernel_axes=("heads", "kv", "embed") if self.nd_kernel else ("joined_kv", "embed"),
      nd_kernel=self.nd_kernel,
      make_product=self.make_product,
      transpose_batch_sequence=self.transpose_batch_sequence,
      use_bias=self.use_bias,
      name="out",
    )(outputs_BTHK)

  def _queries_keys_values(self, inputs_q: jax.Array, inputs_kv: jax.Array) -> list[jax.Array]:
    """Returns [B, T, H, K], [B, S, H, K] and [B, S, H, K]."""
    # In dtype, as T5X has it: √128 rounded to bfloat16 is in the initial values.
    depth_scale = jnp.sqrt(self.head_dim).astype(self.dtype)

    def divided_init(*args: Any) -> Array:
      return self.kernel_init(*args) / depth_scale

    query = self._projection("query", self.kernel_init if self.scale_queries else divided_init)
    key, value = (self._projection(name, self.kernel_init) for name in ("key", "value"))
    logit_scale = depth_scale if self.scale_attn_logits else None
    scaled_q = inputs_q if logit_scale is None else inputs_q / logit_scale
    if self.has_variable(KEPT, "keys"):
      kept: list[jax.Array] = [self.get_variable(KEPT, name) for name in ("keys", "values")]
      # Without the barrier XLA transposes them before the loop and back again in every step.
      k_BSHK, v_BSHK = decoding_cache.by_position(*jax.lax.optimization_barrier(kept))
      return [self._by_batch(query(scaled_q)), k_BSHK, v_BSHK]
    if self.fuse_qkv_params and inputs_q is inputs_kv:
      heads = self._fused(inputs_q, [query, key, value], logit_scale)
    elif self.fuse_qkv_params:
      heads = [query(scaled_q), *self._fused(inputs_kv, [key, value])]
    else:
      heads = [query(scaled_q), key(inputs_kv), value(inputs_kv)]
    heads = [self._by_batch(x) for x in heads]
    is_cross = inputs_q is not inputs_kv
    if is_cross and self.is_mutable_collection(KEPT) and not self.is_initializing():
      self.put_variable(KEPT, "keys", decoding_cache.keys_kept(heads[1]))
      self.put_variable(KEPT, "values", decoding_cache.values_kept(heads[2]))
    return heads

  def _by_batch(self, heads: jax.Array) -> jax.Array:
    """Returns a projection's heads as [B, T, H, K]; they may have their length first."""
    if self.transpose_batch_sequence:
      heads = heads.swapaxes(0, 1)
    return with_sharding_constraint(heads, _HEADS)

  def _fused(
    self, inputs: jax.Array, projections: list[DenseGeneral], logit_scale: jax.Array | None = None
  ) -> list[jax.Array]:
    """Returns what the projections make of `inputs`, of one product; the first's divided by a scale."""
    parameters = [projection(inputs, parameters_only=True) for projection in projections]
    kernels = [kernel for kernel, _ in parameters]
    if logit_scale is not None:
      kernels[0] = kernels[0] / logit_scale
    # Stacked along a new dimension: side by side, kernels split over devices would have to move.
    w_DNJ = jnp.stack(kernels, axis=1)
    row_shape = inputs.shape[:-1] if self.transpose_batch_sequence else (-1,)
    product = self.make_product() if self.make_product else matrix_product
    x_ND = inputs.astype(self.dtype).reshape(*row_shape, inputs.shape[-1])
    y = product(x_ND, w_DNJ)
    shape = (*inputs.shape[:-1], self.num_heads, self.head_dim)
    heads = [y[..., index, :].reshape(shape) for index in range(len(kernels))]
    if not self.use_bias:
      return heads
    return [x + bias[None, None] for x, (_, bias) in zip(heads, parameters, strict=True)]

  def _projection(self, name: str, kernel_init: Initializer) -> DenseGeneral:
    return DenseGeneral(
      (self.num_heads, self.head_dim),
      dtype=self.dtype,
      kernel_init=kernel_init,
      kernel_axes=("embed", "heads", "kv") if self.nd_kernel else ("embed", "joined_kv"),
      nd_kernel=self.nd_kernel,
      make_product=self.make_product,
      transpose_batch_sequence=self.transpose_batch_sequence,
      use_bias=self.use_bias,
      name=name,
    )

  def _attend(
    self,
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | SegmentMask | None,
    value_scale: jax.Array | None,
  ) -> jax.Array:
    """Returns [B, T, H, K]."""
    if isinstance(mask, SegmentMask):
      return fused_attention(self.attention_kernel, q_BTHK, k_BSHK, v_BSHK, bias, mask, value_scale)
    mask = None if mask is None else mask != 0
    return xla_attention(q_BTHK, k_BSHK, v_BSHK, bias, mask, value_scale, self.float32_logits)

  def _attend_in_step(
    self,
    q_N1HK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | SegmentMask | None,
    value_scale_BHS: jax.Array | None,
  ) -> jax.Array:
    """Returns [N, 1, H, K], a decoding step's attention; N may count several beams of each of B."""
    assert not isinstance(mask, SegmentMask)  # Fused kernels are for whole sequences.
    mask = None if mask is None else mask != 0
    keys, values = decoding_cache.keys_kept(k_BSHK), decoding_cache.values_kept(v_BSHK)
    if value_scale_BHS is not None:
      values = values * value_scale_BHS[..., None]
    num_queries, _, heads, size = q_N1HK.shape
    beam: jax.Array = self.get_variable("cache", "cached_beam", jnp.zeros((1, 1)))
    if beam.ndim == 3:
      batch, beams, _ = beam.shape
    else:
      batch, beams = k_BSHK.shape[0], num_queries // k_BSHK.shape[0]
    q_BMHK = q_N1HK.reshape(batch, beams, heads, size)
    if beams > 1:
      bias, mask = (
        None if x is None else decoding_cache.by_beam(x, batch, beams) for x in (bias, mask)
      )
    if beam.ndim == 3:
      attended = beam_attention(q_BMHK, keys, values, beam, bias, mask, self.float32_logits)
    else:
      attended = cached_attention(q_BMHK, keys, values, bias, mask, self.float32_logits)
    return attended.reshape(num_queries, 1, heads, -1)

  def _dropout_scale(self, k_BSHK: jax.Array) -> jax.Array | None:
    if self.dropout_rate == 0.0:
      return None
    return _dropout_scale(self.make_rng("dropout"), self.dropout_rate, k_BSHK, self.dtype)

  def update_cache_prefill(
    self,
    key: jax.Array,
    value: jax.Array,
    cached_key: nn.Variable,
    cached_value: nn.Variable,
    cache_index: nn.Variable,
    prefill_lengths: jax.Array,
  ) -> tuple[jax.Array, ...]:
    """Returns (key, value, lengths, new cached_key, new cached_value, new cache_index).

    Args:
      key: [B, S, H, K], of a whole prompt.
      value: the same.
      cached_key: the cache variable, [B, H, K, L].
      cached_value: the same, [B, H, L, K].
      cache_index: the next position to be written; from here on one for each example.
      prefill_lengths: [B], how many positions to keep; the rest of the cache is 0.
    """
    del cache_index
    length = cached_value.value.shape[2]
    keys = decoding_cache.keys_kept(decoding_cache.prefilled(key, length, prefill_lengths))
    values = decoding_cache.values_kept(decoding_cache.prefilled(value, length, prefill_lengths))
    return key, value, prefill_lengths, keys, values, prefill_lengths

  def update_cache_decode(
    self,
    key: jax.Array,
    value: jax.Array,
    cached_key: nn.Variable,
    cached_value: nn.Variable,
    cache_index: nn.Variable,
  ) -> tuple[jax.Array, ...]:
    """Returns (all keys, all values, index, new cached_key, new cached_value, new cache_index).

    Args:
      key: [B, 1, H, K], of the position at the index.
      value: the same.
      cached_key: the cache variable, [B, H, K, L].
      cached_value: the same, [B, H, L, K].
      cache_index: the position to write: a scalar, or [B] after a prefill.
    """
    index = cache_index.value
    keys = decoding_cache.extended(cached_key.value, key, index, axis=3)
    values = decoding_cache.extended(cached_value.value, value, index, axis=2)
    return *decoding_cache.by_position(keys, values), index, keys, values, index + 1

  def _use_cache(
    self,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    mask: jax.Array | None,
    bias: jax.Array | None,
    prefill: bool,
    prefill_lengths: jax.Array | None,
  ) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Fills the cache, or adds a position; returns keys and values to see, their mask and bias."""
    is_made = self.has_variable("cache", "cached_key")
    empty = jnp.zeros_like
    keys = self.variable("cache", "cached_key", lambda: empty(decoding_cache.keys_kept(k_BSHK)))
    values = self.variable(
      "cache", "cached_value", lambda: empty(decoding_cache.values_kept(v_BSHK))
    )
    index = self.variable("cache", "cache_index", lambda: jnp.array(0, dtype=jnp.int32))
    beam = self.variable("cache", "cached_beam", jnp.zeros, k_BSHK.shape[:2], jnp.int32)
    if not is_made:
      return k_BSHK, v_BSHK, mask, bias
    if prefill:
      if prefill_lengths is None:
        if mask is None:
          raise ValueError("prefill needs prefill_lengths, or a mask that tells where prompts end")
        prefill_lengths = jnp.sum(mask[:, 0, 0] != 0, axis=-1, dtype=index.value.dtype)
      variables = (keys, values, index, prefill_lengths)
      new = self.update_cache_prefill(k_BSHK, v_BSHK, *variables)
    else:
      if k_BSHK.shape[1] != 1:
        raise ValueError(
          f"decoding takes one position at a time, but was given {k_BSHK.shape[1]}: call the module "
          "without decode=True for whole sequences"
        )
      beam.value = decoding_cache.written(beam.value, index.value)
      new = self.update_cache_decode(k_BSHK, v_BSHK, keys, values, index)
      past_B11S = decoding_cache.seen(new[2], new[0].shape[1])
      mask = past_B11S if mask is None else past_B11S & (mask != 0)
      bias = None if bias is None else decoding_cache.bias_row(bias, new[2])
    k_BSHK, v_BSHK, _, keys.value, values.value, index.value = new
    return k_BSHK, v_BSHK, mask, bias
