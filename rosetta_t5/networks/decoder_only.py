"""A decoder-only transformer of T5's layers, as T5X's examples.decoder_only: causal or prefix LM.

Parameters have T5X's names, shapes and initial values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from flax.linen.partitioning import with_sharding_constraint
from jaxtyping import Array, Bool, Float, Int

from rosetta_t5.kernels.chunked_cross_entropy import Unprojected
from rosetta_t5.networks import t5
from rosetta_t5.networks.attention import MultiHeadDotProductAttention
from rosetta_t5.networks.attention_kernel import SegmentMask, is_fused, segment_mask
from rosetta_t5.networks.dense import Product
from rosetta_t5.networks.embedding import LayerNorm
from rosetta_t5.networks.masks import make_decoder_mask
from rosetta_t5.networks.output_layer import output_layer
from rosetta_t5.networks.remat import REMAT_POLICIES, remat_layer
from rosetta_t5.networks.t5_config import ATTENTION_KERNELS, check_one_of


@struct.dataclass
class TransformerConfig:
  """The sizes and switches of a decoder-only model; those not told here are `T5Config`'s.

  Attributes:
    vocab_size: rows of the embedding table; at least the vocabulary's size.
    dtype: what activations are computed in, float32 or bfloat16; parameters stay float32.
    emb_dim: the model's width.
    num_heads: attention heads.
    num_layers: layers.
    head_dim: the size of one head.
    mlp_dim: the feed-forward block's hidden size.
    mlp_activations: ('relu',) for a plain block, ('gelu', 'linear') for a gated one.
    dropout_rate: the rate of every dropout.
    logits_via_embedding: whether the output layer is the embedding table.
    float32_attention_logits: as T5Config's.
    scale_attn_logits: as T5Config's.
    fuse_qkv_params: as T5Config's.
    attention_kernel: as T5Config's.
    remat_policy: as T5Config's.
    make_product: as T5Config's.
    transpose_batch_sequence: always False; no field, so not to be set.
    attention_class: no field either.
  """

  vocab_size: int
  dtype: Any = jnp.float32
  emb_dim: int = 512
  num_heads: int = 8
  num_layers: int = 6
  head_dim: int = 64
  mlp_dim: int = 2048
  mlp_activations: Sequence[str] = ("relu",)
  dropout_rate: float = 0.1
  logits_via_embedding: bool = False
  float32_attention_logits: bool = False
  scale_attn_logits: bool = False
  fuse_qkv_params: bool = False
  attention_kernel: str = "auto"
  remat_policy: str = "none"
  make_product: Callable[[], Product] | None = None

  transpose_batch_sequence: ClassVar[bool] = False
  attention_class: ClassVar[type[MultiHeadDotProductAttention]] = MultiHeadDotProductAttention

  def __post_init__(self) -> None:
    """Refuses what these layers cannot be trained with."""
    if jnp.dtype(self.dtype) == jnp.float16:
      raise ValueError(
        "TransformerConfig.dtype = 'float16' overflows in T5's feed-forward layers: use 'bfloat16', "
        "or 'float32'"
      )
    check_one_of("TransformerConfig.attention_kernel", self.attention_kernel, ATTENTION_KERNELS)
    check_one_of("TransformerConfig.remat_policy", self.remat_policy, REMAT_POLICIES)


def _dropout(config: TransformerConfig, name: str) -> nn.Dropout:
  """A dropout that drops the same features at every position; its masks depend on its name."""
  return nn.Dropout(rate=config.dropout_rate, broadcast_dims=(-2,), name=name)


class DecoderLayer(nn.Module):
  """Self-attention and feed-forward block, each after a norm and around a residual.

  Attributes:
    config: sizes and switches.
    relative_embedding: the relative bias, which all layers share.
  """

  config: TransformerConfig
  relative_embedding: nn.Module

  @nn.compact
  def __call__(
    self,
    inputs: Float[Array, "B T D"],
    decoder_mask: Bool[Array, "B 1 T T"] | SegmentMask | None = None,
    deterministic: bool = False,
    decode: bool = False,
    max_decode_length: int | None = None,
    prefill: bool = False,
    prefill_lengths: Int[Array, " B"] | None = None,
  ) -> Float[Array, "B T D"]:
    """Returns the layer's output; see `Decoder` for the arguments."""
    cfg = self.config
    length = t5.bias_length(inputs.shape[-2], decode, max_decode_length)
    bias_1HLL = self.relative_embedding(length, length, False)
    x = LayerNorm(dtype=cfg.dtype, name="pre_self_attention_layer_norm")(inputs)
    x = t5.attention(cfg, "self_attention")(
      x,
      x,
      decoder_mask,
      bias_1HLL,
      deterministic=deterministic,
      decode=decode,
      prefill=prefill,
      prefill_lengths=prefill_lengths,
    )
    x = _dropout(cfg, "post_self_attention_dropout")(x, deterministic=deterministic) + inputs
    y = LayerNorm(dtype=cfg.dtype, name="pre_mlp_layer_norm")(x)
    y = t5.mlp(cfg)(y, deterministic=deterministic)
    y = _dropout(cfg, "post_mlp_dropout")(y, deterministic=deterministic) + x
    return with_sharding_constraint(y, ("batch", "length", "embed"))


class Decoder(nn.Module):
  """Embedding, layers that share one relative bias, and the output layer.

  Attributes:
    config: sizes and switches.
  """

  config: TransformerConfig

  @nn.compact
  def __call__(
    self,
    decoder_input_tokens: Int[Array, "B T"],
    decoder_target_tokens: Int[Array, "B T"],
    decoder_segment_ids: Int[Array, "B T"] | None = None,
    decoder_positions: Int[Array, "B T"] | None = None,
    decoder_causal_attention: Int[Array, "B T"] | None = None,
    *,
    enable_dropout: bool = True,
    decode: bool = False,
    max_decode_length: int | None = None,
    prefill: bool = False,
    prefill_lengths: Int[Array, " B"] | None = None,
    return_logits: bool = True,
  ) -> Float[Array, "B T V"] | Unprojected:
    """Returns the logits of the targets, in float32.

    Args:
      decoder_input_tokens: the targets shifted right.
      decoder_target_tokens: the targets, for their padding.
      decoder_segment_ids: which packed example each position belongs to.
      decoder_positions: not used, as positions are relative.
      decoder_causal_attention: 1 for the positions that all see each other, a prefix LM's inputs.
      enable_dropout: whether dropout is on.
      decode: whether the tokens are one position, the next after those in the cache. The first call,
        with the full length and no cache, makes one.
      max_decode_length: how many positions the cache holds.
      prefill: whether the tokens are whole prompts, to be put into a cache that has been made.
      prefill_lengths: how many of their positions; the rest is left for decoding.
      return_logits: False for the logits' two factors; see `output_layer`.
    """
    del decoder_positions
    cfg, deterministic = self.config, not enable_dropout
    relative_embedding = t5.relative_bias(cfg)
    embedding = t5.token_embedder(cfg, name="token_embedder")
    mask: jax.Array | SegmentMask | None = None
    if not decode:
      mask = make_decoder_mask(
        decoder_target_tokens,
        dtype=bool,
        decoder_causal_attention=decoder_causal_attention,
        decoder_segment_ids=decoder_segment_ids,
      )
    if is_fused(cfg) and not (decode or prefill):
      mask = _causal_segment_mask(
        cfg, decoder_target_tokens > 0, decoder_segment_ids, decoder_causal_attention
      )
    y = embedding(decoder_input_tokens.astype(jnp.int32))
    y = _dropout(cfg, "input_dropout")(y, deterministic=deterministic).astype(cfg.dtype)
    # Of the call's arguments, with self 0, those that are Python's own.
    layer_cls = remat_layer(DecoderLayer, cfg.remat_policy, static_arguments=(3, 4, 5, 6))
    for layer in range(cfg.num_layers):
      y = layer_cls(cfg, relative_embedding, name=f"layers_{layer}")(
        y, mask, deterministic, decode, max_decode_length, bool(prefill), prefill_lengths
      )
    y = LayerNorm(dtype=cfg.dtype, name="decoder_norm")(y)
    y = _dropout(cfg, "output_dropout")(y, deterministic=deterministic)
    return output_layer(cfg, embedding, y, return_logits)


def _causal_segment_mask(
  config: TransformerConfig,
  real: jax.Array,
  segment_ids: jax.Array | None,
  prefix: jax.Array | None,
) -> SegmentMask:
  if prefix is not None:
    raise ValueError(
      f"TransformerConfig.attention_kernel = {config.attention_kernel!r} is causal throughout, but "
      "the inputs are to see each other (inputs_bidirectional_attention): set it to 'xla'"
    )
  return segment_mask(config, real, real, segment_ids, segment_ids, causal=True)


class DecoderWrapper(nn.Module):
  """The decoder under the name `decoder`, where an encoder-decoder's parameters are too.

  Attributes:
    config: sizes and switches.
  """

  config: TransformerConfig

  def setup(self) -> None:
    """Creates the decoder."""
    self.decoder = Decoder(self.config)

  def __call__(self, *args: Any, **kwargs: Any) -> jax.Array | Unprojected:
    """Returns the logits of the targets; see `Decoder`."""
    logits: jax.Array | Unprojected = self.decoder(*args, **kwargs)
    return logits
