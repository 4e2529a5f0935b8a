"""T5, an encoder-decoder transformer (Raffel et al., 2020), versions 1.0 and 1.1.

Parameters have T5X's names, shapes and initial values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from flax.linen.partitioning import with_sharding_constraint
from jaxtyping import Array, Bool, Float, Int

from rosetta_t5.networks.attention import MultiHeadDotProductAttention
from rosetta_t5.networks.dense import DenseGeneral, MlpBlock
from rosetta_t5.networks.embedding import Embed, LayerNorm, RelativePositionBiases
from rosetta_t5.networks.masks import make_attention_mask, make_decoder_mask

_ACTIVATION = ("batch", "length", "embed")


@struct.dataclass
class T5Config:
  """The sizes and switches of a T5 model.

  Attributes:
    vocab_size: rows of the embedding table; at least the vocabulary's size.
    dtype: what activations are computed in, float32 or bfloat16; parameters stay float32.
    emb_dim: the model's width.
    num_heads: attention heads.
    num_encoder_layers: layers of the encoder.
    num_decoder_layers: layers of the decoder.
    head_dim: the size of one head.
    mlp_dim: the feed-forward block's hidden size.
    mlp_activations: ('relu',) for T5 1.0, ('gelu', 'linear') for T5 1.1.
    dropout_rate: the rate of every dropout.
    logits_via_embedding: whether the output layer is the embedding table (T5 1.0).
    float32_attention_logits: whether attention logits and softmax are float32 under bfloat16.
    scale_attn_logits: whether the queries' input is divided by √head_dim.
  """

  vocab_size: int
  dtype: Any = jnp.float32
  emb_dim: int = 512
  num_heads: int = 8
  num_encoder_layers: int = 6
  num_decoder_layers: int = 6
  head_dim: int = 64
  mlp_dim: int = 2048
  mlp_activations: Sequence[str] = ("relu",)
  dropout_rate: float = 0.1
  logits_via_embedding: bool = False
  float32_attention_logits: bool = False
  scale_attn_logits: bool = False

  def __post_init__(self) -> None:
    """Refuses what T5 cannot be trained with."""
    if jnp.dtype(self.dtype) == jnp.float16:
      raise ValueError(
        "T5Config.dtype = 'float16' overflows in T5's feed-forward layers: use 'bfloat16', "
        "or 'float32'"
      )


def _attention(config: T5Config, name: str) -> MultiHeadDotProductAttention:
  return MultiHeadDotProductAttention(
    num_heads=config.num_heads,
    head_dim=config.head_dim,
    dtype=config.dtype,
    dropout_rate=config.dropout_rate,
    float32_logits=config.float32_attention_logits,
    scale_attn_logits=config.scale_attn_logits,
    name=name,
  )


def _mlp(config: T5Config) -> MlpBlock:
  return MlpBlock(
    intermediate_dim=config.mlp_dim,
    activations=config.mlp_activations,
    intermediate_dropout_rate=config.dropout_rate,
    dtype=config.dtype,
    name="mlp",
  )


def _relative_bias(config: T5Config) -> RelativePositionBiases:
  return RelativePositionBiases(
    num_buckets=32,
    max_distance=128,
    num_heads=config.num_heads,
    dtype=config.dtype,
    name="relpos_bias",
  )


def _shared_dropout(config: T5Config) -> nn.Dropout:
  """A dropout that drops the same features at every position."""
  return nn.Dropout(rate=config.dropout_rate, broadcast_dims=(-2,))


class EncoderLayer(nn.Module):
  """Self-attention and feed-forward block, each after a norm and around a residual."""

  config: T5Config

  @nn.compact
  def __call__(
    self,
    inputs_BSD: Float[Array, "B S D"],
    mask_B1SS: Bool[Array, "B 1 S S"] | None,
    bias_1HSS: Float[Array, "1 H S S"] | None,
    deterministic: bool = False,
  ) -> Float[Array, "B S D"]:
    """Returns the layer's output."""
    cfg = self.config
    x = LayerNorm(dtype=cfg.dtype, name="pre_attention_layer_norm")(inputs_BSD)
    x = _attention(cfg, "attention")(x, x, mask_B1SS, bias_1HSS, deterministic=deterministic)
    x = _shared_dropout(cfg)(x, deterministic=deterministic) + inputs_BSD
    y = LayerNorm(dtype=cfg.dtype, name="pre_mlp_layer_norm")(x)
    y = _mlp(cfg)(y, deterministic=deterministic)
    y = _shared_dropout(cfg)(y, deterministic=deterministic) + x
    return with_sharding_constraint(y, _ACTIVATION)


class DecoderLayer(nn.Module):
  """Self-attention, attention to the encoder and feed-forward block."""

  config: T5Config

  @nn.compact
  def __call__(
    self,
    inputs_BTD: Float[Array, "B T D"],
    encoded_BSD: Float[Array, "B S D"],
    mask_B1TT: Bool[Array, "B 1 T T"] | None,
    cross_mask_B1TS: Bool[Array, "B 1 T S"] | None,
    bias_1HLL: Float[Array, "1 H L L"] | None,
    deterministic: bool = False,
    decode: bool = False,
  ) -> Float[Array, "B T D"]:
    """Returns the layer's output; L is T, or while decoding the length of the cache."""
    cfg = self.config
    x = LayerNorm(dtype=cfg.dtype, name="pre_self_attention_layer_norm")(inputs_BTD)
    x = _attention(cfg, "self_attention")(
      x, x, mask_B1TT, bias_1HLL, deterministic=deterministic, decode=decode
    )
    x = _shared_dropout(cfg)(x, deterministic=deterministic) + inputs_BTD
    y = LayerNorm(dtype=cfg.dtype, name="pre_cross_attention_layer_norm")(x)
    y = _attention(cfg, "encoder_decoder_attention")(
      y, encoded_BSD, cross_mask_B1TS, deterministic=deterministic
    )
    y = _shared_dropout(cfg)(y, deterministic=deterministic) + x
    z = LayerNorm(dtype=cfg.dtype, name="pre_mlp_layer_norm")(y)
    z = _mlp(cfg)(z, deterministic=deterministic)
    z = _shared_dropout(cfg)(z, deterministic=deterministic) + y
    return with_sharding_constraint(z, _ACTIVATION)


class Encoder(nn.Module):
  """The stack of encoder layers, which share one relative bias."""

  config: T5Config
  shared_embedding: nn.Module

  @nn.compact
  def __call__(
    self,
    tokens_BS: Int[Array, "B S"],
    mask_B1SS: Bool[Array, "B 1 S S"] | None = None,
    deterministic: bool = False,
  ) -> Float[Array, "B S D"]:
    """Returns the encoded tokens."""
    cfg = self.config
    bias_1HSS = _relative_bias(cfg)(tokens_BS.shape[-1], tokens_BS.shape[-1], True)
    x = self.shared_embedding(tokens_BS.astype(jnp.int32))
    x = _shared_dropout(cfg)(x, deterministic=deterministic).astype(cfg.dtype)
    for layer in range(cfg.num_encoder_layers):
      x = EncoderLayer(cfg, name=f"layers_{layer}")(x, mask_B1SS, bias_1HSS, deterministic)
    x = LayerNorm(dtype=cfg.dtype, name="encoder_norm")(x)
    return nn.Dropout(rate=cfg.dropout_rate)(x, deterministic=deterministic)


class Decoder(nn.Module):
  """The stack of decoder layers, which share one relative bias, and the output layer."""

  config: T5Config
  shared_embedding: nn.Module

  @nn.compact
  def __call__(
    self,
    encoded_BSD: Float[Array, "B S D"],
    tokens_BT: Int[Array, "B T"],
    mask_B1TT: Bool[Array, "B 1 T T"] | None = None,
    cross_mask_B1TS: Bool[Array, "B 1 T S"] | None = None,
    deterministic: bool = False,
    decode: bool = False,
    max_decode_length: int | None = None,
  ) -> Float[Array, "B T V"]:
    """Returns the logits, in float32."""
    cfg = self.config
    # While decoding, the one query may stand anywhere: each layer takes its row of the whole bias.
    length = max_decode_length if decode and max_decode_length else tokens_BT.shape[-1]
    bias_1HLL = _relative_bias(cfg)(length, length, False)
    y = self.shared_embedding(tokens_BT.astype(jnp.int32))
    y = _shared_dropout(cfg)(y, deterministic=deterministic).astype(cfg.dtype)
    for layer in range(cfg.num_decoder_layers):
      y = DecoderLayer(cfg, name=f"layers_{layer}")(
        y, encoded_BSD, mask_B1TT, cross_mask_B1TS, bias_1HLL, deterministic, decode
      )
    y = LayerNorm(dtype=cfg.dtype, name="decoder_norm")(y)
    y = _shared_dropout(cfg)(y, deterministic=deterministic)
    if cfg.logits_via_embedding:
      return self.shared_embedding.attend(y) / jnp.sqrt(y.shape[-1])
    return DenseGeneral(
      cfg.vocab_size, dtype=jnp.float32, kernel_axes=("embed", "vocab"), name="logits_dense"
    )(y)


class Transformer(nn.Module):
  """The whole encoder-decoder model.

  Attributes:
    config: sizes and switches.
  """

  config: T5Config

  def setup(self) -> None:
    """Creates the embedding that encoder, decoder and tied logits share."""
    cfg = self.config
    self.token_embedder = Embed(
      num_embeddings=cfg.vocab_size,
      features=cfg.emb_dim,
      dtype=cfg.dtype,
      attend_dtype=jnp.float32,
    )
    self.encoder = Encoder(cfg, self.token_embedder)
    self.decoder = Decoder(cfg, self.token_embedder)

  def encode(
    self,
    encoder_input_tokens: Int[Array, "B S"],
    encoder_segment_ids: Int[Array, "B S"] | None = None,
    enable_dropout: bool = True,
  ) -> Float[Array, "B S D"]:
    """Returns the encoded inputs. Token 0 is padding and is not attended to."""
    real = encoder_input_tokens > 0
    mask = make_attention_mask(real, real, jnp.logical_and, dtype=bool)
    if encoder_segment_ids is not None:
      mask &= make_attention_mask(encoder_segment_ids, encoder_segment_ids, jnp.equal, dtype=bool)
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
  ) -> Float[Array, "B T V"]:
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
    """
    del decoder_positions
    real_inputs = encoder_input_tokens > 0
    if decode:
      # One position of no padding; the cache limits what it sees of the targets.
      real_targets, mask = jnp.ones_like(decoder_target_tokens, dtype=bool), None
    else:
      real_targets = decoder_target_tokens > 0
      mask = make_decoder_mask(
        decoder_target_tokens, dtype=bool, decoder_segment_ids=decoder_segment_ids
      )
    cross_mask = make_attention_mask(real_targets, real_inputs, jnp.logical_and, dtype=bool)
    if encoder_segment_ids is not None and decoder_segment_ids is not None:
      cross_mask &= make_attention_mask(
        decoder_segment_ids, encoder_segment_ids, jnp.equal, dtype=bool
      )
    logits: jax.Array = self.decoder(
      encoded,
      decoder_input_tokens,
      mask,
      cross_mask,
      deterministic=not enable_dropout,
      decode=decode,
      max_decode_length=max_decode_length,
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
  ) -> Float[Array, "B T V"]:
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
    )
