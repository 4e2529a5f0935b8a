"""T5, an encoder-decoder transformer (Raffel et al., 2020), versions 1.0 and 1.1.

Parameters have T5X's names, shapes and initial values.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rosetta_t5.kernels.cross_entropy import LogitFactors
from rosetta_t5.networks import gpu_fusion
from rosetta_t5.networks.expert_settings import expert_layers
from rosetta_t5.networks.kernel_choice import (
  SegmentMask,
  choose_attention_kernel,
  make_mask,
  real_tokens,
)
from rosetta_t5.networks.layers.attention import MultiHeadDotProductAttention
from rosetta_t5.networks.layers.dense import MlpBlock, activation_axes, feature_dropout
from rosetta_t5.networks.layers.embedding import Embed, output_layer
from rosetta_t5.networks.layers.experts import ExpertMlpBlock
from rosetta_t5.networks.layers.layer_stack import call_layers
from rosetta_t5.networks.layers.norms import make_norm
from rosetta_t5.networks.layers.positions import RelativePositionBiases
from rosetta_t5.networks.t5_config import T5Config
from rosetta_t5.parallel.axis_rules import constrain


def make_attention(config: Any, name: str, **attributes: Any) -> MultiHeadDotProductAttention:
  """Returns the attention layer for a config like `T5Config`, with further attributes."""
  return config.attention_class(
    num_heads=config.num_heads,
    head_dim=config.head_dim,
    dtype=config.dtype,
    dropout_rate=config.dropout_rate,
    float32_logits=config.float32_attention_logits,
    scale_attn_logits=config.scale_attn_logits,
    make_matmul=config.make_matmul,
    transpose_batch_sequence=config.transpose_batch_sequence,
    fuse_qkv_params=config.fuse_qkv_params,
    attention_kernel=choose_attention_kernel(config).name,
    name=name,
    **attributes,
  )


def feed_forward(
  config: Any,
  x: jax.Array,
  mask: Bool[Array, "B 1 T S"] | SegmentMask | None,
  deterministic: bool,
  has_experts: bool,
  router: str | None = None,
  **attributes: Any,
) -> jax.Array:
  """Returns the output of the feed-forward block `mlp` of the module that is being called.

  Args:
    config: a config like `T5Config`.
    x: the block's input.
    mask: the mask of the layer's self-attention, which shows which tokens are padding.
    deterministic: whether dropout is off.
    has_experts: whether the block has `config.num_experts` experts.
    router: how experts are chosen; None for `config.router`.
    **attributes: further attributes of the block, or of each expert.
  """
  attributes |= {
    "intermediate_dim": config.mlp_dim,
    "activations": config.mlp_activations,
    "intermediate_dropout_rate": config.dropout_rate,
    "dtype": config.dtype,
    "make_matmul": config.make_matmul,
  }
  transposed = config.transpose_batch_sequence
  if not has_experts:
    block = MlpBlock(**attributes, transpose_batch_sequence=transposed, name="mlp")
    return block(x, deterministic=deterministic)
  if config.expert_dropout_rate is not None:
    attributes["intermediate_dropout_rate"] = config.expert_dropout_rate
  experts = ExpertMlpBlock(config, router or config.router, transposed, attributes, name="mlp")
  return experts(x, deterministic, real_tokens(mask))


def make_relative_bias(config: Any) -> RelativePositionBiases:
  """Returns T5's relative position bias, for one layer or for all layers of a stack."""
  return RelativePositionBiases(
    num_buckets=config.num_buckets,
    max_distance=config.max_distance,
    num_heads=config.num_heads,
    dtype=config.dtype,
    embedding_init=nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
    name="relpos_bias",
  )


def make_token_embedder(config: Any, name: str | None = None, stddev: float = 1.0) -> Embed:
  """Returns the embedding that encoder, decoder and tied logits share, initialized with `stddev`."""
  return Embed(
    num_embeddings=config.vocab_size,
    features=config.emb_dim,
    dtype=config.dtype,
    attend_dtype=jnp.float32,
    embedding_init=nn.initializers.normal(stddev=stddev),
    name=name,
  )


def add_residual(
  layer: Any, x: jax.Array, residual: jax.Array, deterministic: bool, name: str | None = None
) -> jax.Array:
  """Returns a block's output after a dropout of that name, plus the block's input."""
  cfg = layer.config
  dropout = feature_dropout(cfg.dropout_rate, cfg.transpose_batch_sequence, name)
  x = dropout(x, deterministic=deterministic)
  return gpu_fusion.add_residual(layer, x, residual, cfg.transpose_batch_sequence)


def constrain_layer_output(config: Any, x: jax.Array) -> jax.Array:
  """Returns a layer's output with the sharding of activations inside the layers."""
  return constrain(x, activation_axes("embed", config.transpose_batch_sequence))


def to_layer_layout(config: Any, x: jax.Array) -> jax.Array:
  """Converts activations between [B, T, D] and the layout inside the layers, in both directions."""
  return x.swapaxes(0, 1) if config.transpose_batch_sequence else x


def bias_length(
  config: Any, x: jax.Array, decode: bool = False, max_decode_length: int | None = None
) -> int:
  """Returns the number of positions that the relative bias covers, the length of `x` inside the layers.

  In a decoding step it is that of the cache, because the only query can be at any position.
  """
  if decode and max_decode_length:
    return max_decode_length
  return x.shape[0 if config.transpose_batch_sequence else 1]


class EncoderLayer(nn.Module):
  """Self-attention and a feed-forward block, each after a norm and inside a residual connection."""

  config: T5Config
  has_experts: bool = False

  @nn.compact
  def __call__(
    self,
    inputs: Float[Array, "X Y D"],
    mask_B1SS: Bool[Array, "B 1 S S"] | SegmentMask | None,
    bias_1HSS: Float[Array, "1 H S S"] | None,
    deterministic: bool = False,
  ) -> Float[Array, "X Y D"]:
    """Returns the layer's output; X and Y are B and S, or S and B where the length is first."""
    cfg = self.config
    x = make_norm(cfg, "pre_attention_layer_norm")(inputs)
    x = make_attention(cfg, "attention")(x, x, mask_B1SS, bias_1HSS, deterministic=deterministic)
    x = add_residual(self, x, inputs, deterministic)
    y = make_norm(cfg, "pre_mlp_layer_norm")(x)
    y = feed_forward(cfg, y, mask_B1SS, deterministic, self.has_experts)
    y = add_residual(self, y, x, deterministic)
    return constrain_layer_output(cfg, y)


class DecoderLayer(nn.Module):
  """Self-attention, attention to the encoded inputs, and a feed-forward block."""

  config: T5Config
  has_experts: bool = False

  @nn.compact
  def __call__(
    self,
    inputs: Float[Array, "X Y D"],
    encoded: Float[Array, "_ _ D"],
    mask_B1TT: Bool[Array, "B 1 T T"] | SegmentMask | None,
    cross_mask_B1TS: Bool[Array, "B 1 T S"] | SegmentMask | None,
    bias_1HLL: Float[Array, "1 H L L"] | None,
    deterministic: bool = False,
    decode: bool = False,
  ) -> Float[Array, "X Y D"]:
    """Returns the layer's output.

    X and Y are B and T, or T and B where the length is first; L is T, or the length of the cache.
    """
    cfg = self.config
    x = make_norm(cfg, "pre_self_attention_layer_norm")(inputs)
    x = make_attention(cfg, "self_attention")(
      x, x, mask_B1TT, bias_1HLL, deterministic=deterministic, decode=decode
    )
    x = add_residual(self, x, inputs, deterministic)
    y = make_norm(cfg, "pre_cross_attention_layer_norm")(x)
    y = make_attention(cfg, "encoder_decoder_attention")(
      y, encoded, cross_mask_B1TS, deterministic=deterministic
    )
    y = add_residual(self, y, x, deterministic)
    z = make_norm(cfg, "pre_mlp_layer_norm")(y)
    # A token that experts choose depends on later tokens, which do not exist when the model decodes.
    router = "top_2" if cfg.router == "expert_choice" else cfg.router
    z = feed_forward(cfg, z, mask_B1TT, deterministic, self.has_experts, router)
    z = add_residual(self, z, y, deterministic)
    return constrain_layer_output(cfg, z)


class Encoder(nn.Module):
  """The stack of encoder layers, which share one relative bias."""

  config: T5Config
  shared_embedding: nn.Module

  @nn.compact
  def __call__(
    self,
    encoder_input_tokens: Int[Array, "B S"],
    encoder_mask: Bool[Array, "B 1 S S"] | SegmentMask | None = None,
    deterministic: bool = False,
  ) -> Float[Array, "B S D"]:
    """Returns the encoded tokens."""
    cfg = self.config
    x = self.shared_embedding(encoder_input_tokens.astype(jnp.int32))
    x = feature_dropout(cfg.dropout_rate)(x, deterministic=deterministic).astype(cfg.dtype)
    x = gpu_fusion.store_rows(self, to_layer_layout(cfg, x), cfg.transpose_batch_sequence)
    x = self._layers(x, encoder_mask, deterministic)
    x = make_norm(cfg, "encoder_norm")(to_layer_layout(cfg, x))
    return nn.Dropout(rate=cfg.dropout_rate)(x, deterministic=deterministic)

  def _layers(self, x: jax.Array, mask: Any, deterministic: bool) -> jax.Array:
    length = bias_length(self.config, x)
    bias_1HSS = make_relative_bias(self.config)(length, length, True)
    call = (mask, bias_1HSS, deterministic)
    num_layers, with_experts = self.config.num_encoder_layers, expert_layers(self.config, "encoder")
    return call_layers(self, EncoderLayer, (4,), num_layers, x, *call, expert_layers=with_experts)


class Decoder(nn.Module):
  """The stack of decoder layers, which share one relative bias, and the output layer."""

  config: T5Config
  shared_embedding: nn.Module

  @nn.compact
  def __call__(
    self,
    encoded: Float[Array, "B S D"],
    decoder_input_tokens: Int[Array, "B T"],
    decoder_positions: Int[Array, "B T"] | None = None,
    decoder_mask: Bool[Array, "B 1 T T"] | SegmentMask | None = None,
    encoder_decoder_mask: Bool[Array, "B 1 T S"] | SegmentMask | None = None,
    deterministic: bool = False,
    decode: bool = False,
    max_decode_length: int | None = None,
    return_logits: bool = True,
  ) -> Float[Array, "B T V"] | LogitFactors:
    """Returns the float32 logits; `decoder_positions` is ignored, as T5's positions are relative."""
    del decoder_positions
    cfg = self.config
    tokens = decoder_input_tokens.astype(jnp.int32)
    if cfg.decoder_start_token_id:
      tokens = jnp.where(tokens == 0, cfg.decoder_start_token_id, tokens)
    y = self.shared_embedding(tokens)
    y = feature_dropout(cfg.dropout_rate)(y, deterministic=deterministic).astype(cfg.dtype)
    y, encoded = to_layer_layout(cfg, y), to_layer_layout(cfg, encoded)
    y = gpu_fusion.store_rows(self, y, cfg.transpose_batch_sequence)
    masks = (decoder_mask, encoder_decoder_mask)
    y = self._layers(y, encoded, *masks, deterministic, decode, max_decode_length)
    y = make_norm(cfg, "decoder_norm")(to_layer_layout(cfg, y))
    y = feature_dropout(cfg.dropout_rate)(y, deterministic=deterministic)
    return output_layer(cfg, self.shared_embedding, y, return_logits)

  def _layers(
    self,
    y: jax.Array,
    encoded: jax.Array,
    mask: Any,
    cross_mask: Any,
    deterministic: bool,
    decode: bool,
    max_decode_length: int | None,
  ) -> jax.Array:
    length = bias_length(self.config, y, decode, max_decode_length)
    bias_1HLL = make_relative_bias(self.config)(length, length, False)
    call = (encoded, mask, cross_mask, bias_1HLL, deterministic, decode)
    num_layers, with_experts = self.config.num_decoder_layers, expert_layers(self.config, "decoder")
    return call_layers(self, DecoderLayer, (6, 7), num_layers, y, *call, expert_layers=with_experts)


class Transformer(nn.Module):
  """The encoder-decoder network.

  Attributes:
    config: sizes and settings.
  """

  config: T5Config

  def setup(self) -> None:
    """Creates the encoder, the decoder and the embedding that they share."""
    self.token_embedder = make_token_embedder(self.config)
    self.encoder = Encoder(self.config, self.token_embedder)
    self.decoder: Any = Decoder(self.config, self.token_embedder)

  def encode(
    self,
    encoder_input_tokens: Int[Array, "B S"],
    encoder_segment_ids: Int[Array, "B S"] | None = None,
    enable_dropout: bool = True,
  ) -> Float[Array, "B S D"]:
    """Returns the encoded inputs. Token 0 is padding, to which nothing attends."""
    real = encoder_input_tokens > 0
    mask = make_mask(self.config, real, real, encoder_segment_ids, encoder_segment_ids)
    return self.encoder(encoder_input_tokens, mask, deterministic=not enable_dropout)

  def decode(
    self,
    encoded: Float[Array, "B S D"],
    encoder_input_tokens: Int[Array, "B S"],
    decoder_input_tokens: Int[Array, "B T"],
    decoder_target_tokens: Int[Array, "B T"],
    encoder_segment_ids: Int[Array, "B S"] | None = None,
    decoder_segment_ids: Int[Array, "B T"] | None = None,
    decoder_positions: Int[Array, "B T"] | None = None,
    enable_dropout: bool = True,
    decode: bool = False,
    max_decode_length: int | None = None,
    return_logits: bool = True,
  ) -> Float[Array, "B T V"] | LogitFactors:
    """Returns the logits of the targets.

    Args:
      encoded: the output of `encode`.
      encoder_input_tokens: the inputs, whose padding is masked (they may be longer than `encoded`).
      decoder_input_tokens: the targets shifted right.
      decoder_target_tokens: the targets, whose padding is masked.
      encoder_segment_ids: the packed example that each input belongs to.
      decoder_segment_ids: the packed example that each target belongs to.
      decoder_positions: ignored, as T5's positions are relative.
      enable_dropout: whether dropout is on.
      decode: whether the tokens are one position, the one that follows those in the cache.
      max_decode_length: the number of positions in the cache.
      return_logits: False returns the logits' two factors; see `output_layer`.
    """
    del decoder_positions
    cfg, real_inputs = self.config, encoder_input_tokens > 0
    self_segments = (decoder_segment_ids, decoder_segment_ids)
    cross_segments = (decoder_segment_ids, encoder_segment_ids)
    if decode:
      # A decoding step has no padding, and the cache masks the positions after it.
      real_targets, mask = jnp.ones_like(decoder_target_tokens, dtype=bool), None
    else:
      real_targets = decoder_target_tokens > 0
      mask = make_mask(cfg, real_targets, real_targets, *self_segments, causal=True)
    cross_mask = make_mask(
      cfg, real_targets, real_inputs, *cross_segments, use_fused_kernel=not decode
    )
    logits: jax.Array | LogitFactors = self.decoder(
      encoded,
      decoder_input_tokens,
      decoder_mask=mask,
      encoder_decoder_mask=cross_mask,
      deterministic=not enable_dropout,
      decode=decode,
      max_decode_length=max_decode_length,
      **({} if return_logits else {"return_logits": False}),  # T5X's decoders do not have it.
    )
    return logits

  def __call__(
    self,
    encoder_input_tokens: Int[Array, "B S"],
    decoder_input_tokens: Int[Array, "B T"],
    decoder_target_tokens: Int[Array, "B T"],
    encoder_segment_ids: Int[Array, "B S"] | None = None,
    decoder_segment_ids: Int[Array, "B T"] | None = None,
    encoder_positions: Int[Array, "B S"] | None = None,
    decoder_positions: Int[Array, "B T"] | None = None,
    *,
    enable_dropout: bool = True,
    decode: bool = False,
    return_logits: bool = True,
  ) -> Float[Array, "B T V"] | LogitFactors:
    """Returns the logits of the targets given the inputs; see `encode` and `decode`."""
    del encoder_positions
    return self.decode(
      self.encode(encoder_input_tokens, encoder_segment_ids, enable_dropout),
      encoder_input_tokens,
      decoder_input_tokens,
      decoder_target_tokens,
      encoder_segment_ids=encoder_segment_ids,
      decoder_segment_ids=decoder_segment_ids,
      decoder_positions=decoder_positions,
      enable_dropout=enable_dropout,
      decode=decode,
      return_logits=return_logits,
    )
