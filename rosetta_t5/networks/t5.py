"""T5, an encoder-decoder transformer (Raffel et al., 2020), versions 1.0 and 1.1.

Parameters have T5X's names, shapes and initial values.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rosetta_t5.kernels.chunked_cross_entropy import Unprojected
from rosetta_t5.networks.kernel_choice import (
  SegmentMask,
  choose_attention_kernel,
  is_fused,
  segment_mask,
)
from rosetta_t5.networks.layers.attention import MultiHeadDotProductAttention
from rosetta_t5.networks.layers.dense import MlpBlock, activation_axes
from rosetta_t5.networks.layers.embedding import Embed, LayerNorm, RelativePositionBiases
from rosetta_t5.networks.layers.masks import make_attention_mask, make_decoder_mask
from rosetta_t5.networks.layers.output_layer import output_layer
from rosetta_t5.networks.layers.remat import remat_layer
from rosetta_t5.networks.t5_config import T5Config
from rosetta_t5.parallel.sharding_constraints import with_sharding_constraint


def attention(config: Any, name: str, **options: Any) -> MultiHeadDotProductAttention:
  """Returns the attention of a config like `T5Config`; `options` are further attributes of it."""
  return config.attention_class(
    num_heads=config.num_heads,
    head_dim=config.head_dim,
    dtype=config.dtype,
    dropout_rate=config.dropout_rate,
    float32_logits=config.float32_attention_logits,
    scale_attn_logits=config.scale_attn_logits,
    make_product=config.make_product,
    transpose_batch_sequence=config.transpose_batch_sequence,
    fuse_qkv_params=config.fuse_qkv_params,
    attention_kernel=choose_attention_kernel(config).name,
    name=name,
    **options,
  )


def mlp(config: Any, **options: Any) -> MlpBlock:
  """Returns the feed-forward block of a config like `T5Config`; `options` as above."""
  return MlpBlock(
    intermediate_dim=config.mlp_dim,
    activations=config.mlp_activations,
    intermediate_dropout_rate=config.dropout_rate,
    dtype=config.dtype,
    make_product=config.make_product,
    transpose_batch_sequence=config.transpose_batch_sequence,
    name="mlp",
    **options,
  )


def relative_bias(config: Any) -> RelativePositionBiases:
  """Returns T5's bias, for a stack of layers or for one of them."""
  return RelativePositionBiases(
    num_buckets=32,
    max_distance=128,
    num_heads=config.num_heads,
    dtype=config.dtype,
    embedding_init=nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
    name="relpos_bias",
  )


def _shared_dropout(config: T5Config) -> nn.Dropout:
  """A dropout that drops the same features at every position."""
  return nn.Dropout(rate=config.dropout_rate, broadcast_dims=(-2,))


def token_embedder(config: Any, name: str | None = None, stddev: float = 1.0) -> Embed:
  """Returns the embedding that encoder, decoder and tied logits share; `stddev` of initial values."""
  return Embed(
    num_embeddings=config.vocab_size,
    features=config.emb_dim,
    dtype=config.dtype,
    attend_dtype=jnp.float32,
    embedding_init=nn.initializers.normal(stddev=stddev),
    name=name,
  )


def _layer_dropout(config: T5Config) -> nn.Dropout:
  """The same for activations inside a layer, whose length may come first."""
  length_axis = -3 if config.transpose_batch_sequence else -2
  return nn.Dropout(rate=config.dropout_rate, broadcast_dims=(length_axis,))


def _layer_axes(config: T5Config) -> tuple[str, str, str]:
  return activation_axes("embed", config.transpose_batch_sequence)


def transposed(config: Any, x: jax.Array) -> jax.Array:
  """Returns [B, T, D] as the layers want it, and what they return as [B, T, D]."""
  return x.swapaxes(0, 1) if config.transpose_batch_sequence else x


def length_of(config: T5Config, x: jax.Array) -> int:
  """Returns the length of activations inside the layers."""
  return x.shape[0 if config.transpose_batch_sequence else 1]


def bias_length(length: int, decode: bool, max_decode_length: int | None) -> int:
  """Returns how many positions a decoder's bias covers, where it is given `length` of them.

  While decoding, the one query may stand anywhere: each layer takes its row of the whole bias.
  """
  return max_decode_length if decode and max_decode_length else length


class EncoderLayer(nn.Module):
  """Self-attention and feed-forward block, each after a norm and around a residual."""

  config: T5Config

  @nn.compact
  def __call__(
    self,
    inputs: Float[Array, "X Y D"],
    mask_B1SS: Bool[Array, "B 1 S S"] | SegmentMask | None,
    bias_1HSS: Float[Array, "1 H S S"] | None,
    deterministic: bool = False,
  ) -> Float[Array, "X Y D"]:
    """Returns the layer's output; X and Y are B and S, transposed S and B."""
    cfg = self.config
    x = LayerNorm(dtype=cfg.dtype, name="pre_attention_layer_norm")(inputs)
    x = attention(cfg, "attention")(x, x, mask_B1SS, bias_1HSS, deterministic=deterministic)
    x = _layer_dropout(cfg)(x, deterministic=deterministic) + inputs
    y = LayerNorm(dtype=cfg.dtype, name="pre_mlp_layer_norm")(x)
    y = mlp(cfg)(y, deterministic=deterministic)
    y = _layer_dropout(cfg)(y, deterministic=deterministic) + x
    return with_sharding_constraint(y, _layer_axes(cfg))


class DecoderLayer(nn.Module):
  """Self-attention, attention to the encoder and feed-forward block."""

  config: T5Config

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
    """Returns the layer's output; L is T, or while decoding the length of the cache.

    X and Y are B and T, transposed T and B.
    """
    cfg = self.config
    x = LayerNorm(dtype=cfg.dtype, name="pre_self_attention_layer_norm")(inputs)
    x = attention(cfg, "self_attention")(
      x, x, mask_B1TT, bias_1HLL, deterministic=deterministic, decode=decode
    )
    x = _layer_dropout(cfg)(x, deterministic=deterministic) + inputs
    y = LayerNorm(dtype=cfg.dtype, name="pre_cross_attention_layer_norm")(x)
    y = attention(cfg, "encoder_decoder_attention")(
      y, encoded, cross_mask_B1TS, deterministic=deterministic
    )
    y = _layer_dropout(cfg)(y, deterministic=deterministic) + x
    z = LayerNorm(dtype=cfg.dtype, name="pre_mlp_layer_norm")(y)
    z = mlp(cfg)(z, deterministic=deterministic)
    z = _layer_dropout(cfg)(z, deterministic=deterministic) + y
    return with_sharding_constraint(z, _layer_axes(cfg))


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
    x = _shared_dropout(cfg)(x, deterministic=deterministic).astype(cfg.dtype)
    x = self._layers(x, encoder_mask, deterministic)
    x = LayerNorm(dtype=cfg.dtype, name="encoder_norm")(x)
    return nn.Dropout(rate=cfg.dropout_rate)(x, deterministic=deterministic)

  def _layers(
    self, x_BSD: jax.Array, mask_B1SS: jax.Array | SegmentMask | None, deterministic: bool
  ) -> jax.Array:
    cfg, length = self.config, x_BSD.shape[-2]
    bias_1HSS = relative_bias(cfg)(length, length, True)
    layer_cls = remat_layer(EncoderLayer, cfg.remat_policy, static_arguments=(4,))
    x = transposed(cfg, x_BSD)
    for layer in range(cfg.num_encoder_layers):
      x = layer_cls(cfg, name=f"layers_{layer}")(x, mask_B1SS, bias_1HSS, deterministic)
    return transposed(cfg, x)


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
  ) -> Float[Array, "B T V"] | Unprojected:
    """Returns the logits, in float32; `decoder_positions` is not used, as positions are relative."""
    del decoder_positions
    cfg = self.config
    y = self.shared_embedding(decoder_input_tokens.astype(jnp.int32))
    y = _shared_dropout(cfg)(y, deterministic=deterministic).astype(cfg.dtype)
    y = self._layers(
      y,
      encoded,
      decoder_mask,
      encoder_decoder_mask,
      deterministic,
      decode,
      max_decode_length,
    )
    y = LayerNorm(dtype=cfg.dtype, name="decoder_norm")(y)
    y = _shared_dropout(cfg)(y, deterministic=deterministic)
    return output_layer(cfg, self.shared_embedding, y, return_logits)

  def _layers(
    self,
    y_BTD: jax.Array,
    encoded_BSD: jax.Array,
    mask_B1TT: jax.Array | SegmentMask | None,
    cross_mask_B1TS: jax.Array | SegmentMask | None,
    deterministic: bool,
    decode: bool,
    max_decode_length: int | None,
  ) -> jax.Array:
    cfg, length = self.config, bias_length(y_BTD.shape[-2], decode, max_decode_length)
    bias_1HLL = relative_bias(cfg)(length, length, False)
    layer_cls = remat_layer(DecoderLayer, cfg.remat_policy, static_arguments=(6, 7))
    y, encoded = transposed(cfg, y_BTD), transposed(cfg, encoded_BSD)
    for layer in range(cfg.num_decoder_layers):
      y = layer_cls(cfg, name=f"layers_{layer}")(
        y, encoded, mask_B1TT, cross_mask_B1TS, bias_1HLL, deterministic, decode
      )
    return transposed(cfg, y)


class Transformer(nn.Module):
  """The whole encoder-decoder model.

  Attributes:
    config: sizes and switches.
  """

  config: T5Config

  def setup(self) -> None:
    """Creates the embedding that encoder, decoder and tied logits share."""
    self.token_embedder = token_embedder(self.config)
    self.encoder = Encoder(self.config, self.token_embedder)
    self.decoder = Decoder(self.config, self.token_embedder)

  def encode(
    self,
    encoder_input_tokens: Int[Array, "B S"],
    encoder_segment_ids: Int[Array, "B S"] | None = None,
    enable_dropout: bool = True,
  ) -> Float[Array, "B S D"]:
    """Returns the encoded inputs. Token 0 is padding and is not attended to."""
    real = encoder_input_tokens > 0
    mask: Any = make_attention_mask(real, real, jnp.logical_and, dtype=bool)
    if encoder_segment_ids is not None:
      mask &= make_attention_mask(encoder_segment_ids, encoder_segment_ids, jnp.equal, dtype=bool)
    if is_fused(self.config):
      mask = segment_mask(self.config, real, real, encoder_segment_ids, encoder_segment_ids)
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
  ) -> Float[Array, "B T V"] | Unprojected:
    """Returns the logits of the targets.

    Args:
      encoded: what `encode` returned.
      encoder_input_tokens: the inputs, for their padding (they may be longer than `encoded`).
      decoder_input_tokens: the targets shifted right.
      decoder_target_tokens: the targets, for their padding.
      encoder_segment_ids: which packed example each input belongs to.
      decoder_segment_ids: which packed example each target belongs to.
      decoder_positions: not used, as T5's positions are relative.
      enable_dropout: whether dropout is on.
      decode: whether the tokens are one position, the next after those in the cache.
      max_decode_length: how many positions the cache holds.
      return_logits: False for the logits' two factors; see `output_layer`.
    """
    del decoder_positions
    real_inputs = encoder_input_tokens > 0
    mask: Any
    if decode:
      # One position of no padding; the cache limits what it sees of the targets.
      real_targets, mask = jnp.ones_like(decoder_target_tokens, dtype=bool), None
    else:
      real_targets = decoder_target_tokens > 0
      mask = make_decoder_mask(
        decoder_target_tokens, dtype=bool, decoder_segment_ids=decoder_segment_ids
      )
    cross_mask: Any = make_attention_mask(real_targets, real_inputs, jnp.logical_and, dtype=bool)
    if encoder_segment_ids is not None and decoder_segment_ids is not None:
      cross_mask &= make_attention_mask(
        decoder_segment_ids, encoder_segment_ids, jnp.equal, dtype=bool
      )
    if not decode and is_fused(self.config):
      ids = decoder_segment_ids, encoder_segment_ids
      mask = segment_mask(self.config, real_targets, real_targets, ids[0], ids[0], causal=True)
      cross_mask = segment_mask(self.config, real_targets, real_inputs, *ids)
    logits: jax.Array | Unprojected = self.decoder(
      encoded,
      decoder_input_tokens,
      decoder_mask=mask,
      encoder_decoder_mask=cross_mask,
      deterministic=not enable_dropout,
      decode=decode,
      max_decode_length=max_decode_length,
      return_logits=return_logits,
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
  ) -> Float[Array, "B T V"] | Unprojected:
    """Returns the logits of the targets given the inputs; see `encode` and `decode`."""
    del encoder_positions
    encoded = self.encode(encoder_input_tokens, encoder_segment_ids, enable_dropout)
    return self.decode(
      encoded,
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
