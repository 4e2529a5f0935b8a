"""Multi-head attention, with a cache for decoding one token at a time."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from rosetta_t5.kernels.attention import Operands, Visibility, attend
from rosetta_t5.kernels.xla_attention import beam_attention, cached_attention
from rosetta_t5.networks.gpu_fusion import projection_inputs
from rosetta_t5.networks.layers import decoding_cache, matmuls
from rosetta_t5.networks.layers.dense import DenseGeneral, DenseParameters, Initializer
from rosetta_t5.networks.layers.dropout import BatchRows, attention_dropout_scale
from rosetta_t5.networks.layers.positions import Rope, apply_rotary
from rosetta_t5.networks.layers.stack import CROSS_ATTENTION
from rosetta_t5.parallel.placement import constrain


class AttentionMode(enum.Enum):
  """What one call of the attention module does.

  Attributes:
    FULL: every query attends to whole sequences: training, scoring, encoding.
    CREATE_CACHE: the same; also creates an empty cache as long as the keys.
    PREFILL: the same on prompts; also writes their keys and values into the cache.
    DECODE_STEP: one query per sequence or beam; its key and value are appended to the cache first.
    CROSS_DECODE_STEP: one query per sequence or beam, and precomputed keys and values.
  """

  FULL = enum.auto()
  CREATE_CACHE = enum.auto()
  PREFILL = enum.auto()
  DECODE_STEP = enum.auto()
  CROSS_DECODE_STEP = enum.auto()


class MultiHeadDotProductAttention(nn.Module):
  """Multi-head attention. The defaults are T5's: no biases, and initial query kernels that scale the logits.

  Attributes:
    num_heads: the number of heads.
    head_dim: the size of one head.
    dtype: the type of the computation.
    dropout_rate: dropout of the attention weights; all queries, and the heads that share keys, drop the same keys.
    kernel_init: initializer of the four kernels; see `query_divisor`.
    float32_logits: whether logits and softmax are float32 whatever `dtype` is.
    scale_attn_logits: whether the input of the query projection is divided by √head_dim as well.
    nd_kernel: whether the kernels are stored as [embed, heads, kv] and [heads, kv, embed].
    matmul: how rows are multiplied by the kernels; see `DenseGeneral`.
    row_axes: the logical axes of the first two dimensions of inputs and output.
    fuse_qkv_params: whether one matmul computes queries, keys and values in self-attention, and keys
      and values in cross-attention or where queries have more heads. The kernels are stacked during
      tracing; they are stored separately either way.
    attention_kernel: the kernel that computes whole sequences with a `Visibility`; see `kernels.attention`.
    kernel_setting: the setting that names this kernel, for errors.
    use_bias: whether the four projections have biases.
    qkv_bias: whether the projections to queries, keys and values have biases.
    num_kv_heads: the number of heads of keys and values, a divisor of `num_heads`; None for `num_heads`.
    query_divisor: what queries are divided by; None to divide the query kernel's initial values by √head_dim.
    softcap: the soft limit of logits; see `xla_attention`.
    make_head_norm: makes the norm of each head's queries or keys, given its name; None for no such norms.
    rope: the frequencies of rotary positions; None for none.
    window: how many keys a decoding step sees, its own included; None for all.
  """

  num_heads: int
  head_dim: int
  dtype: Any = jnp.float32
  dropout_rate: float = 0.0
  kernel_init: Initializer = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
  float32_logits: bool = False
  scale_attn_logits: bool = False
  nd_kernel: bool = False
  matmul: matmuls.Matmul | None = None
  row_axes: tuple[str, str] = ("batch", "length")
  fuse_qkv_params: bool = False
  attention_kernel: str = "xla"
  kernel_setting: str = "attention_kernel"
  use_bias: bool = False
  qkv_bias: bool = False
  num_kv_heads: int | None = None
  query_divisor: float | None = None
  softcap: float | None = None
  make_head_norm: Callable[[str], nn.Module] | None = None
  rope: Rope | None = None
  window: int | None = None

  @nn.compact
  def __call__(
    self,
    inputs_q: Float[Array, "B T D"],
    inputs_kv: Float[Array, "B S D"],
    mask: Shaped[Array, "B 1 T S"] | Visibility | None = None,
    bias: Float[Array, "1 H T S"] | None = None,
    *,
    decode: bool = False,
    deterministic: bool = False,
    prefill: bool = False,
    prefill_lengths: Int[Array, " B"] | None = None,
    positions: Int[Array, "#B T"] | None = None,
    rows: BatchRows | None = None,
    encoded: Float[Array, "B S D"] | None = None,
    encoded_mask: Any = None,
  ) -> Float[Array, "B T D"]:
    """Returns the attention's output.

    Args:
      inputs_q: the input of the query projection.
      inputs_kv: the input of the key and value projections.
      mask: nonzero where a query may see a key. XLA's kernel computes masks, `attention_kernel` a
        `Visibility`.
      bias: added to the logits.
      decode: whether `inputs_q` is one position, the one that follows those in the cache. The first
        call (in `init`, with the full length) only creates the cache.
      deterministic: whether dropout is off.
      prefill: whether the inputs are whole prompts, to be written into an existing cache.
      prefill_lengths: the number of tokens in each prompt; None counts what the first query sees.
      positions: the positions of queries and keys, which `rope` needs.
      rows: which rows of the whole batch these are; None for all.
      encoded: what queries also attend to (encoded inputs, or sums of blocks), whose keys and values the same
        kernels compute, without positions.
      encoded_mask: True where a query may see a position of `encoded`, [B, 1, T, S].

    Raises:
      ValueError: both `prefill` and `decode` are set, or `decode` with several positions.
    """
    mode = self._mode(decode, prefill, merges=encoded is not None)
    visible: Any = mask if mask is None or isinstance(mask, Visibility) else mask != 0
    q_BTHK, keys, values, *merged = self._project(inputs_q, inputs_kv, mode, encoded)
    if self.query_divisor is not None:
      q_BTHK = q_BTHK / jnp.asarray(self.query_divisor, q_BTHK.dtype)
    if self.rope is not None:
      # Encoder and Decoder set them unless config.positions is 'relative'.
      assert positions is not None
      q_BTHK, keys = (apply_rotary(x, positions, self.rope) for x in (q_BTHK, keys))
    if mode is AttentionMode.CREATE_CACHE:
      # A local layer's cache has the positions of its window; T5's bias needs all of them.
      length = self.window if bias is None else None
      self._cache_variables(keys[:, :length], values[:, :length])
    elif mode is AttentionMode.PREFILL:
      self._prefill_cache(keys, values, visible, prefill_lengths)
    beam_BML = None
    if mode is AttentionMode.DECODE_STEP:
      keys, values, visible, bias, beam_BML = self._append_to_cache(keys, values, visible, bias)
      if merged:
        keys, values, visible, beam_BML = decoding_cache.with_encoded(
          (keys, values), merged, visible, encoded_mask, beam_BML
        )
    elif merged:
      keys, values = (jnp.concatenate(x, axis=1) for x in zip((keys, values), merged, strict=True))
      visible = None if visible is None else jnp.concatenate([visible, encoded_mask], axis=-1)
    if mode in (AttentionMode.DECODE_STEP, AttentionMode.CROSS_DECODE_STEP):
      scale_BGS = self._dropout_scale(deterministic, values.shape[:3], rows)
      outputs_BTHK = self._attend_step(q_BTHK, keys, values, bias, visible, scale_BGS, beam_BML)
    else:
      batch, length, groups, _ = keys.shape
      scale_BGS = self._dropout_scale(deterministic, (batch, groups, length), rows)
      options = (scale_BGS, self.softcap, self.float32_logits)
      operands = Operands(q_BTHK, keys, values, bias, visible, *options)
      is_shown = self.is_mutable_collection(CROSS_ATTENTION) and not self.is_initializing()
      if is_shown and inputs_q is not inputs_kv:
        self.sow(CROSS_ATTENTION, "weights", operands.weights().mean(1))
      outputs_BTHK = attend(self.attention_kernel, operands, self.kernel_setting)
    if self.row_axes[0] == "length":
      outputs_BTHK = outputs_BTHK.swapaxes(0, 1)
    out_axes = ("heads", "kv", "embed") if self.nd_kernel else ("joined_kv", "embed")
    out_options: dict[str, Any] = {"kernel_init": self.kernel_init, "use_bias": self.use_bias}
    out = self._dense("out", inputs_q.shape[-1], out_axes, axis=(-2, -1), **out_options)
    return out(outputs_BTHK)

  def _mode(self, decode: bool, prefill: bool, merges: bool) -> AttentionMode:
    if prefill and decode:
      raise ValueError("prefill and decode cannot both be True: first fill the cache, then decode")
    if (prefill or decode) and not self.has_variable("cache", "cached_key"):
      return AttentionMode.CREATE_CACHE
    if self.has_variable(decoding_cache.PRECOMPUTED, "keys") and not merges:
      return AttentionMode.CROSS_DECODE_STEP
    if decode:
      return AttentionMode.DECODE_STEP
    return AttentionMode.PREFILL if prefill else AttentionMode.FULL

  def _project(
    self, inputs_q: jax.Array, inputs_kv: jax.Array, mode: AttentionMode, encoded: jax.Array | None
  ) -> list[jax.Array]:
    """Returns queries, keys and values, [B, T, H, K] and twice [B, S, H, K]; and those of `encoded`.

    In a decoding step, the keys and values of encoded inputs are precomputed, and in the cache's layout.
    """
    make: Callable[[str], Any] = self.make_head_norm or (lambda _: lambda x: x)
    query_norm, key_norm = make("query_norm"), make("key_norm")
    # T5X rounds √head_dim to `dtype`, and the rounded value is part of the initial parameters.
    depth_scale = jnp.sqrt(self.head_dim).astype(self.dtype)
    fused: tuple[str, ...] = ()
    if self.fuse_qkv_params:
      is_same_input = inputs_q is inputs_kv and self.kv_heads == self.num_heads
      fused = ("query", "key", "value") if is_same_input else ("key", "value")
    # Dividing the kernel is cheaper than dividing the input. If √head_dim is a power of two, the numbers are equal.
    is_exact = math.log2(self.head_dim) % 2 == 0
    divides_kernel = self.scale_attn_logits and (is_exact or "query" in fused)
    query, key, value = self._projections(depth_scale, divides_kernel, fused)
    divides_input = self.scale_attn_logits and not divides_kernel
    scaled_q = inputs_q / depth_scale if divides_input else inputs_q
    if mode is AttentionMode.CROSS_DECODE_STEP:
      query_only = query_norm(self._batch_first(query(scaled_q)))
      return [query_only, *decoding_cache.read_precomputed(self)]
    if "query" in fused:
      heads = self._project_fused(inputs_q, [query, key, value])
    elif fused:
      heads = [query(scaled_q), *self._project_fused(inputs_kv, [key, value])]
    else:
      of_query, of_key, of_value = projection_inputs(self, scaled_q, inputs_kv)
      heads = [query(of_query), key(of_key), value(of_value)]
    is_precomputed = self.has_variable(decoding_cache.PRECOMPUTED, "keys")
    if encoded is not None and not is_precomputed:
      pair = [key, value]
      heads += self._project_fused(encoded, pair) if fused else [each(encoded) for each in pair]
    heads = [self._batch_first(x) for x in heads]
    heads[0] = query_norm(heads[0])
    heads[1::2] = map(key_norm, heads[1::2])
    if encoded is not None and is_precomputed:
      return heads + decoding_cache.read_precomputed(self)
    if inputs_q is not inputs_kv or encoded is not None:
      in_cache_layout = decoding_cache.write_precomputed(self, *heads[-2:])
      if encoded is not None and mode is AttentionMode.DECODE_STEP:
        heads[-2:] = in_cache_layout
    return heads

  def _projections(
    self, depth_scale: jax.Array, divides_kernel: bool, fused: tuple[str, ...]
  ) -> list[Any]:
    """Returns the projections to queries, keys and values, or the parameters of those in `fused`."""

    axes = ("embed", "heads", "kv") if self.nd_kernel else ("embed", "joined_kv")

    def query_init(*args: Any) -> Array:
      init = self.kernel_init(*args)
      return init / depth_scale if self.query_divisor is None else init

    def project(name: str, heads: int, init: Initializer, divisor: Any = None) -> Any:
      options = {"kernel_init": init, "kernel_divisor": divisor}
      options["use_bias"] = self.use_bias or self.qkv_bias
      return self._dense(name, (heads, self.head_dim), axes, name in fused, **options)

    return [
      project("query", self.num_heads, query_init, depth_scale if divides_kernel else None),
      project("key", self.kv_heads, self.kernel_init),
      project("value", self.kv_heads, self.kernel_init),
    ]

  @property
  def kv_heads(self) -> int:
    """The number of heads of keys and values."""
    return self.num_kv_heads or self.num_heads

  def _batch_first(self, heads: jax.Array) -> jax.Array:
    """Returns a projection as [B, T, H, K]; its input may have the length first."""
    if self.row_axes[0] == "length":
      heads = heads.swapaxes(0, 1)
    return constrain(heads, ("batch", "length", "heads", "kv"))

  def _project_fused(self, inputs: jax.Array, projections: list[Any]) -> list[jax.Array]:
    """Returns several projections of `inputs` from one matmul."""
    parameters = [projection(inputs) for projection in projections]
    # Kernels are stacked along a new dimension. Concatenating kernels that are split over devices
    # would have to move them.
    w_DNJ = jnp.stack([kernel for kernel, _ in parameters], axis=1)
    axes: matmuls.Axes = matmuls.flat_row_axes(self.row_axes)
    row_shape = inputs.shape[:-1] if len(axes) > 1 else (-1,)
    x_ND = inputs.astype(self.dtype).reshape(*row_shape, inputs.shape[-1])
    axes += ("embed", None, "heads" if self.nd_kernel else "joined_kv")
    y = (self.matmul or matmuls.plain_matmul)(self, x_ND, w_DNJ, axes)
    shape = (*inputs.shape[:-1], -1, self.head_dim)
    heads = [y[..., index, :].reshape(shape) for index in range(len(parameters))]
    if parameters[0][1] is None:
      return heads
    return [x + bias[None, None] for x, (_, bias) in zip(heads, parameters, strict=True)]

  def _dense(
    self, name: str, features: Any, axes: tuple[str, ...], is_fused: bool = False, **attributes: Any
  ) -> Any:
    """Returns a projection, or the parameters of one that is fused with others."""
    dense: Any = DenseParameters
    if not is_fused:
      dense = functools.partial(DenseGeneral, matmul=self.matmul, row_axes=self.row_axes)
    attributes |= {"dtype": self.dtype, "nd_kernel": self.nd_kernel}
    return dense(features, kernel_axes=axes, name=name, **attributes)

  def _attend_step(
    self,
    q_N1HK: jax.Array,
    k_BGKS: jax.Array,
    v_BGSK: jax.Array,
    bias: jax.Array | None,
    mask: Any,
    scale_BGS: jax.Array | None,
    beam_BML: jax.Array | None,
  ) -> jax.Array:
    """Returns the attention of a decoding step, [N, 1, H, K].

    N is the batch size of the keys, B, times the number of beams whose queries share an example's
    keys. With `beam_BML`, each beam has keys of its own, and the table names the beam that wrote
    each position.
    """
    if scale_BGS is not None:
      v_BGSK = v_BGSK * scale_BGS[..., None]
    if isinstance(mask, Visibility):
      mask = mask.mask()
    num_queries, _, heads, size = q_N1HK.shape
    batch = k_BGKS.shape[0] if beam_BML is None else beam_BML.shape[0]
    beams = num_queries // batch
    q_BMHK = q_N1HK.reshape(batch, beams, heads, size)
    if beams > 1:
      bias, mask = (
        None if x is None else decoding_cache.group_by_example(x, batch, beams)
        for x in (bias, mask)
      )
    options: Any = (bias, mask, self.float32_logits, self.softcap)
    if beam_BML is None:
      attended = cached_attention(q_BMHK, k_BGKS, v_BGSK, *options)
    else:
      attended = beam_attention(q_BMHK, k_BGKS, v_BGSK, beam_BML, *options)
    return attended.reshape(num_queries, 1, heads, -1)

  def _dropout_scale(
    self, deterministic: bool, shape_BGS: tuple[int, ...], rows: BatchRows | None
  ) -> jax.Array | None:
    if deterministic or self.dropout_rate == 0.0:
      return None
    key = self.make_rng("dropout")
    return attention_dropout_scale(key, self.dropout_rate, shape_BGS, self.dtype, rows)

  def _cache_variables(self, k_BSHK: jax.Array, v_BSHK: jax.Array) -> list[nn.Variable]:
    """Returns the variables for keys, values, the next index and the writing beams."""
    keys = decoding_cache.keys_to_cache_layout(k_BSHK)
    values = decoding_cache.values_to_cache_layout(v_BSHK)
    return [
      self.variable("cache", "cached_key", lambda: jnp.zeros_like(keys)),
      self.variable("cache", "cached_value", lambda: jnp.zeros_like(values)),
      self.variable("cache", "cache_index", lambda: jnp.array(0, dtype=jnp.int32)),
      self.variable("cache", "cached_beam", jnp.zeros, k_BSHK.shape[:2], jnp.int32),
    ]

  def _prefill_cache(
    self, k_BSHK: jax.Array, v_BSHK: jax.Array, mask: Any, prefill_lengths: jax.Array | None
  ) -> None:
    keys, values, index, _ = self._cache_variables(k_BSHK, v_BSHK)
    if prefill_lengths is None:
      if mask is None:
        raise ValueError("prefill needs prefill_lengths, or a mask that shows where prompts end")
      mask = mask.mask() if isinstance(mask, Visibility) else mask
      prefill_lengths = jnp.sum(mask[:, 0, 0], axis=-1, dtype=index.value.dtype)
    length = values.value.shape[2]
    prompts = decoding_cache.prompts_to_cache(k_BSHK, v_BSHK, length, prefill_lengths)
    keys.value, values.value = prompts
    index.value = prefill_lengths

  def _append_to_cache(
    self, k_B1HK: jax.Array, v_B1HK: jax.Array, mask: Any, bias: jax.Array | None
  ) -> tuple[Any, ...]:
    """Returns all keys, all values, their mask and bias, and during a beam search the writing beams."""
    if k_B1HK.shape[1] != 1:
      raise ValueError(f"decode=True takes one position at a time, got {k_B1HK.shape[1]}")
    keys, values, index, beam = self._cache_variables(k_B1HK, v_B1HK)
    position, index.value, length = index.value, index.value + 1, values.value.shape[2]
    slot = position % length if length == self.window else position
    beam.value = decoding_cache.record_writing_beam(beam.value, slot)
    keys.value = decoding_cache.write_position(keys.value, k_B1HK, slot, axis=3)
    values.value = decoding_cache.write_position(values.value, v_B1HK, slot, axis=2)
    visible = decoding_cache.visible_positions(position, length, self.window)
    mask = visible if mask is None else visible & mask
    bias = None if bias is None else decoding_cache.bias_row(bias, position)
    # Beam search gives the table of writing beams a dimension for the beams: [batch, beam, length].
    is_beam_search = beam.value.ndim == 3
    return keys.value, values.value, mask, bias, beam.value if is_beam_search else None
