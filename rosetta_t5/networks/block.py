"""One layer of any network: self-attention, attention to encoded inputs, and a feed-forward block."""

from __future__ import annotations

import functools
import math
from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Float

from rosetta_t5.kernels.attention import real_queries
from rosetta_t5.networks import gpu_fusion
from rosetta_t5.networks.config import NetworkConfig
from rosetta_t5.networks.layer_kinds import LayerKind
from rosetta_t5.networks.layers import dense, norms, positions, stack
from rosetta_t5.networks.layers.attention import MultiHeadDotProductAttention
from rosetta_t5.networks.layers.decoding_cache import PRECOMPUTED
from rosetta_t5.networks.layers.dropout import feature_dropout
from rosetta_t5.networks.layers.experts import ExpertMlpBlock
from rosetta_t5.networks.layers.global_blocks import sums_of_blocks, visible_blocks
from rosetta_t5.parallel.placement import constrain


class Block(nn.Module):
  """A layer: attention and a feed-forward block, each between a norm and a residual connection.

  Attributes:
    config: sizes and settings.
    kind: the properties in which this layer may differ from others.
  """

  config: NetworkConfig
  kind: LayerKind

  @nn.compact
  def __call__(
    self, x: Float[jax.Array, "X Y D"], inputs: stack.LayerInputs
  ) -> tuple[Float[jax.Array, "X Y D"], None]:
    """Returns (the layer's output, None), as a scan requires.

    X and Y are the batch and the length, or the reverse where the length is first.
    """
    cfg, kind = self.config, self.kind
    name = "attention" if kind.side == "encoder" else "self_attention"
    normed = norms.make_norm(cfg, f"pre_{name}_layer_norm")(x)
    y = self._add(x, self._self_attention(name, normed, inputs), name, inputs)
    if kind.crosses:
      normed = norms.make_norm(cfg, "pre_cross_attention_layer_norm")(y)
      attention = self._attention("encoder_decoder_attention")
      options: Any = {"deterministic": inputs.deterministic, "rows": inputs.rows}
      attended = attention(normed, inputs.encoded, inputs.cross_visible, **options)
      y = self._add(y, attended, "cross_attention", inputs)
    if not cfg.parallel_blocks:
      normed = norms.make_norm(cfg, "pre_mlp_layer_norm")(y)
    y = self._add(y, self._feed_forward(normed, inputs), "mlp", inputs)
    return constrain(y, (*cfg.row_axes, "embed")), None

  def _add(self, x: jax.Array, y: jax.Array, name: str, inputs: stack.LayerInputs) -> jax.Array:
    """Returns the output `y` of a part of the layer, after a norm and dropout, plus its input `x`."""
    cfg = self.config
    if cfg.post_norms:
      y = norms.make_norm(cfg, f"post_{name}_layer_norm")(y)
    # T5X names these dropouts in decoder-only networks; the names determine the keys.
    dropout_name = f"post_{name}_dropout" if "encoder" not in cfg.sides else None
    dropout = feature_dropout(cfg.dropout_rate, cfg.row_axes, dropout_name)
    y = dropout(y, inputs.deterministic, inputs.rows)
    return gpu_fusion.add_residual(self, y, x, cfg.row_axes)

  def _self_attention(self, name: str, x: jax.Array, inputs: stack.LayerInputs) -> jax.Array:
    cfg, kind, bias = self.config, self.kind, inputs.bias
    if cfg.positions == "relative" and cfg.bias_per_layer:
      bias = relative_bias(self, kind.side, x, inputs)
    window = None if kind.window is None else kind.window[0]
    attention = self._attention(name, rope=kind.rope, window=window)
    return attention(
      x,
      x,
      inputs.visible if kind.window is None else inputs.local_visible,
      bias,
      decode=inputs.decode,
      deterministic=inputs.deterministic,
      prefill=inputs.prefill,
      prefill_lengths=inputs.prefill_lengths,
      positions=inputs.positions,
      rows=inputs.rows,
      **self._extra_keys(x, inputs),
    )

  def _extra_keys(self, x: jax.Array, inputs: stack.LayerInputs) -> dict[str, Any]:
    """Returns arguments for what self-attention attends to besides tokens: encoded inputs, or sums of blocks."""
    cfg, ids_BT = self.config, inputs.block_ids
    if self.kind.extra_keys == "encoded":
      return {"encoded": inputs.encoded, "encoded_mask": inputs.cross_visible}
    if ids_BT is None or cfg.global_block_size is None:
      return {}
    sums = sums_of_blocks(x, ids_BT, cfg.global_block_size, cfg.transpose_batch_sequence)
    normed = norms.make_norm(cfg, "global_input_layer_norm")(sums)
    return {"encoded": normed, "encoded_mask": visible_blocks(ids_BT, cfg.global_block_size)}

  def _attention(self, name: str, **attributes: Any) -> MultiHeadDotProductAttention:
    cfg = self.config
    divisor = math.sqrt(cfg.head_dim) if cfg.scale_queries else None
    return MultiHeadDotProductAttention(
      num_heads=cfg.num_heads,
      head_dim=cfg.head_dim,
      dropout_rate=cfg.dropout_rate,
      float32_logits=cfg.float32_attention_logits,
      scale_attn_logits=cfg.scale_attn_logits,
      nd_kernel=cfg.nd_kernels,
      row_axes=cfg.row_axes,
      fuse_qkv_params=cfg.fuse_qkv_params,
      attention_kernel=cfg.kernel,
      kernel_setting=f"{cfg.name}.attention_kernel",
      use_bias=cfg.use_bias or cfg.attention_bias,
      qkv_bias=cfg.qkv_bias,
      num_kv_heads=cfg.num_kv_heads,
      query_divisor=divisor if cfg.query_scale is None else 1 / cfg.query_scale,
      softcap=cfg.attention_softcap,
      make_head_norm=functools.partial(norms.make_norm, cfg, axis="kv") if cfg.qk_norm else None,
      name=name,
      **self._projection_attributes(),
      **attributes,
    )

  def _projection_attributes(self) -> dict[str, Any]:
    """Returns the attributes that all projections of the layer share."""
    cfg = self.config
    shared: dict[str, Any] = {"dtype": cfg.dtype, "matmul": cfg.matmul}
    if cfg.init_stddev is not None:
      shared["kernel_init"] = nn.initializers.normal(cfg.init_stddev)
    return shared

  def _feed_forward(self, x: jax.Array, inputs: stack.LayerInputs) -> jax.Array:
    cfg = self.config
    attributes: dict[str, Any] = {
      "intermediate_dim": cfg.mlp_dim,
      "activations": cfg.mlp_activations,
      "intermediate_dropout_rate": cfg.dropout_rate,
      "use_bias": cfg.use_bias or cfg.mlp_bias,
      **self._projection_attributes(),
    }
    if not self.kind.has_experts:
      block = dense.MlpBlock(**attributes, row_axes=cfg.row_axes, name="mlp")
      return block(x, deterministic=inputs.deterministic, rows=inputs.rows)
    if cfg.expert_dropout_rate is not None:
      attributes["intermediate_dropout_rate"] = cfg.expert_dropout_rate
    # A token that experts choose depends on later tokens, which do not exist when the model decodes.
    is_choice = cfg.router == "expert_choice" and self.kind.side == "decoder"
    router = "top_2" if is_choice else cfg.router
    experts = ExpertMlpBlock(cfg, router, cfg.row_axes, attributes, name="mlp")
    return experts(x, inputs.deterministic, real_queries(inputs.visible))


def relative_bias(
  module: nn.Module, side: str, x: jax.Array, inputs: stack.LayerInputs
) -> Float[jax.Array, "1 H T S"]:
  """Returns T5's relative bias; its table is a parameter of the module, a layer or a stack.

  `x` are activations inside the layers.

  In a decoding step it covers the cache, because the only query can be at any position, and is the same in
  all steps: it is stored unless it is large.
  """
  config: Any = module.config
  if inputs.decode and module.has_variable(PRECOMPUTED, "relative_bias"):
    known: jax.Array = module.get_variable(PRECOMPUTED, "relative_bias")
    return known
  length = x.shape[config.row_axes.index("length")]
  if inputs.decode and inputs.cache_length:
    length = inputs.cache_length
  biases = positions.RelativePositionBiases(
    num_buckets=config.num_buckets,
    max_distance=config.max_distance,
    num_heads=config.num_heads,
    dtype=config.dtype,
    embedding_init=nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
    name="relpos_bias",
  )
  bias = biases(length, length, side == "encoder")
  is_stored = module.is_mutable_collection(PRECOMPUTED) and not module.is_initializing()
  if inputs.decode and is_stored:
    module.put_variable(PRECOMPUTED, "relative_bias", bias)
  return bias
