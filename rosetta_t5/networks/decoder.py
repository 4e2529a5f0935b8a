"""A decoder-only transformer, causal or a prefix LM: T5X's examples.decoder_only, and GPT.

With the config's defaults, parameters have T5X's names, shapes and initial values.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.partitioning import param_with_axes
from jaxtyping import Array, Bool, Float, Int

from rosetta_t5.kernels.cross_entropy import LogitFactors, set_logit
from rosetta_t5.networks import t5
from rosetta_t5.networks.decoder_config import TransformerConfig
from rosetta_t5.networks.expert_settings import expert_layers
from rosetta_t5.networks.kernel_choice import SegmentMask, make_mask
from rosetta_t5.networks.layers.dense import feature_dropout
from rosetta_t5.networks.layers.embedding import output_layer
from rosetta_t5.networks.layers.layer_stack import call_layers, remat_layer
from rosetta_t5.networks.layers.norms import make_norm
from rosetta_t5.parallel.axis_rules import constrain


def _projection_attributes(config: TransformerConfig) -> dict[str, Any]:
  """Returns the attributes of projections that a `T5Config` does not have."""
  attributes: dict[str, Any] = {"use_bias": config.use_bias}
  if config.init_stddev is not None:
    attributes["kernel_init"] = nn.initializers.normal(config.init_stddev)
  return attributes


class DecoderLayer(nn.Module):
  """Self-attention and a feed-forward block, each after a norm and inside a residual connection.

  Attributes:
    config: sizes and settings.
    relative_embedding: the relative bias, which all layers share; None for other positions.
    has_experts: whether the feed-forward block has experts.
  """

  config: TransformerConfig
  relative_embedding: nn.Module | None = None
  has_experts: bool = False

  @nn.compact
  def __call__(
    self,
    inputs: Float[Array, "B T D"] | Float[Array, "T B D"],
    decoder_mask: Bool[Array, "B 1 T S"] | SegmentMask | None = None,
    deterministic: bool = False,
    decode: bool = False,
    max_decode_length: int | None = None,
    prefill: bool = False,
    prefill_lengths: Int[Array, " B"] | None = None,
    positions: Int[Array, "#B T"] | None = None,
  ) -> Any:
    """Returns the layer's output, or (output, None) as a scan requires if layers are scanned.

    `positions` are required unless the config's positions are relative. See `Decoder` for the other
    arguments.
    """
    cfg = self.config
    bias_1HLL = None
    if self.relative_embedding is not None:
      length = t5.bias_length(cfg, inputs, decode, max_decode_length)
      bias_1HLL = self.relative_embedding(length, length, False)
    attributes = _projection_attributes(cfg)
    x = make_norm(cfg, "pre_self_attention_layer_norm")(inputs)
    x = t5.make_attention(cfg, "self_attention", scale_queries=cfg.scale_queries, **attributes)(
      x,
      x,
      decoder_mask,
      bias_1HLL,
      deterministic=deterministic,
      decode=decode,
      prefill=prefill,
      prefill_lengths=prefill_lengths,
      rotary_positions=positions if cfg.positions == "rotary" else None,
    )
    x = t5.add_residual(self, x, inputs, deterministic, "post_self_attention_dropout")
    y = make_norm(cfg, "pre_mlp_layer_norm")(x)
    y = t5.feed_forward(cfg, y, decoder_mask, deterministic, self.has_experts, **attributes)
    y = t5.add_residual(self, y, x, deterministic, "post_mlp_dropout")
    y = t5.constrain_layer_output(cfg, y)
    return (y, None) if cfg.scan_layers else y


class Decoder(nn.Module):
  """The embedding, the layers and the output layer.

  Attributes:
    config: sizes and settings.
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
  ) -> Float[Array, "B T V"] | LogitFactors:
    """Returns the float32 logits of the targets.

    Args:
      decoder_input_tokens: the targets shifted right.
      decoder_target_tokens: the targets, whose padding is masked.
      decoder_segment_ids: the packed example that each position belongs to.
      decoder_positions: each token's position in its example; None for its position in the row.
        Ignored if positions are relative.
      decoder_causal_attention: 1 for the positions that all see each other, a prefix LM's inputs.
      enable_dropout: whether dropout is on.
      decode: whether the tokens are one position, the one that follows those in the cache. The first
        call, with the full length and no cache, creates one.
      max_decode_length: the number of positions in the cache.
      prefill: whether the tokens are whole prompts, to be written into an existing cache.
      prefill_lengths: the number of tokens in each prompt; decoding writes the positions after them.
      return_logits: False returns the logits' two factors; see `output_layer`.

    Raises:
      ValueError: the sequences are too long for the config, or it excludes these arguments.
    """
    cfg, deterministic = self.config, not enable_dropout
    embedding = t5.make_token_embedder(cfg, "token_embedder", cfg.init_stddev or 1.0)
    mask = None
    if not decode:
      real, ids, prefix = decoder_target_tokens > 0, decoder_segment_ids, decoder_causal_attention
      mask = make_mask(cfg, real, real, ids, ids, True, prefix, use_fused_kernel=not prefill)
    positions = None
    if cfg.positions != "relative" or cfg.local_attention_window:
      positions = self._positions(decoder_input_tokens, decoder_positions, decode, prefill_lengths)
    y = embedding(decoder_input_tokens.astype(jnp.int32))
    if positions is not None and cfg.positions == "learned":
      y = y + self._position_vectors(positions, max_decode_length or decoder_input_tokens.shape[1])
    dropout = feature_dropout(cfg.dropout_rate, name="input_dropout")
    y = dropout(y, deterministic=deterministic).astype(cfg.dtype)
    y = t5.to_layer_layout(cfg, y)
    masks = (mask, self._local_mask(mask, positions, max_decode_length if decode else None))
    call = (deterministic, decode, max_decode_length, bool(prefill), prefill_lengths, positions)
    y = t5.to_layer_layout(cfg, self._layers(y, masks, *call))
    y = make_norm(cfg, "decoder_norm")(y)
    dropout = feature_dropout(cfg.dropout_rate, name="output_dropout")
    y = dropout(y, deterministic=deterministic)
    logits = output_layer(cfg, embedding, y, return_logits, cfg.divide_tied_logits)
    if not cfg.padding_never_follows:
      return logits
    if isinstance(logits, LogitFactors):
      return logits._replace(excluded_token=jnp.zeros((), jnp.int32))
    return set_logit(logits, 0)

  def _positions(
    self,
    tokens_BT: jax.Array,
    positions_BT: jax.Array | None,
    decode: bool,
    prefill_lengths: jax.Array | None,
  ) -> jax.Array:
    """Returns each token's position, [B or 1, T]; the cache stores the next one for decoding."""
    cfg = self.config
    position_1T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
    if prefill_lengths is None and not decode:
      return position_1T if positions_BT is None else positions_BT
    # The cache of scanned layers has the batch as its second dimension.
    leading = (1,) if cfg.scan_layers else ()
    cache_exists = self.has_variable("cache", "cache_index")
    index = self.variable("cache", "cache_index", lambda: jnp.zeros(leading, jnp.int32))
    if not cache_exists:
      return position_1T
    if prefill_lengths is not None:
      lengths_B = prefill_lengths.astype(jnp.int32)
      index.value = lengths_B[None] if cfg.scan_layers else lengths_B
      return position_1T
    position = index.value[0] if cfg.scan_layers else index.value
    index.value = index.value + 1
    return position.reshape(-1, 1)

  def _position_vectors(self, positions_BT: jax.Array, length: int) -> jax.Array:
    """Returns the learned vectors of the positions, [B or 1, T, D]."""
    cfg = self.config
    if length > cfg.max_length:
      raise ValueError(
        f"TransformerConfig.max_length must be at least the length of the sequences, {length}, got "
        f"{cfg.max_length}: increase it, or decrease TASK_FEATURE_LENGTHS (inputs and targets are one "
        "sequence)"
      )
    table_LD = param_with_axes(
      "position_embedding",
      nn.initializers.normal(1.0 if cfg.init_stddev is None else cfg.init_stddev),
      (cfg.max_length, cfg.emb_dim),
      jnp.float32,
      axes=("abspos_buckets", "embed"),
    )
    # A table that is split by `embed` is gathered first, like the token table (see `Embed`).
    table_LD = constrain(table_LD, ("abspos_buckets", None))
    # Examples that are full while others are still being decoded have positions beyond the table.
    vectors_BTD: jax.Array = table_LD.at[positions_BT].get(mode="clip").astype(cfg.dtype)
    return constrain(vectors_BTD, ("batch", "length", "embed"))

  def _layers(self, y: jax.Array, masks: tuple[Any, Any], *call: Any) -> jax.Array:
    """Returns the activations after all layers.

    Args:
      y: the activations before the first layer.
      masks: the mask of the layers with an even number, and that of the other layers.
      *call: the arguments of every layer's call that follow the mask.
    """
    cfg, static_argnums = self.config, (3, 4, 5, 6)
    with_experts = expert_layers(cfg, "decoder")
    if cfg.scan_layers:
      call = (masks[0], *call)
      options: Any = {"scan_name": "decoder", "expert_layers": with_experts}
      return call_layers(self, DecoderLayer, static_argnums, cfg.num_layers, y, *call, **options)
    layer_cls = remat_layer(DecoderLayer, cfg.remat_policy, static_argnums)
    relative = t5.make_relative_bias(cfg) if cfg.positions == "relative" else None
    for layer in range(cfg.num_layers):
      module = layer_cls(cfg, relative, layer in with_experts, name=f"layers_{layer}")
      y = module(y, masks[layer % 2], *call)
    return y

  def _local_mask(
    self, mask: Any, position_BT: jax.Array | None, cache_length: int | None
  ) -> jax.Array | SegmentMask | None:
    """Returns `mask` without the keys outside the local window; `mask` if there is no window.

    A decoding step has no mask. Its local mask covers the `cache_length` positions of the cache.
    """
    window = self.config.local_attention_window
    if window is None:
      return mask
    assert not isinstance(mask, SegmentMask)  # the config refuses a window with a fused kernel
    if mask is not None:
      position_T = jnp.arange(mask.shape[-1])
      return mask & (position_T[:, None] - position_T[None] < window)[None, None]
    if cache_length is None:
      return None  # this call only creates the cache
    assert position_BT is not None  # positions are computed if there is a window
    distance_BTS = position_BT[..., None] - jnp.arange(cache_length)[None, None]
    return (distance_BTS < window)[:, None]


class DecoderWrapper(nn.Module):
  """The decoder under the name `decoder`, so that parameters have the paths of an encoder-decoder's.

  Attributes:
    config: sizes and settings.
  """

  config: TransformerConfig

  def setup(self) -> None:
    """Creates the decoder."""
    self.decoder = Decoder(self.config)

  @property
  def scan_layers(self) -> bool:
    """Whether the cache has the layers as its first dimension and the batch as its second."""
    return bool(self.config.scan_layers)

  def __call__(self, *args: Any, **kwargs: Any) -> jax.Array | LogitFactors:
    """Returns the logits of the targets; see `Decoder`."""
    logits: jax.Array | LogitFactors = self.decoder(*args, **kwargs)
    return logits
