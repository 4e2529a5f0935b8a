"""A decoder-only transformer, as T5X's examples.decoder_only and as GPT: causal or prefix LM.

With the config's defaults parameters have T5X's names, shapes and initial values.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.partitioning import param_with_axes
from jaxtyping import Array, Bool, Float, Int

from rosetta_t5.kernels.chunked_cross_entropy import Unprojected, with_logit
from rosetta_t5.networks import t5
from rosetta_t5.networks.decoder_config import TransformerConfig
from rosetta_t5.networks.kernel_choice import SegmentMask, is_fused, segment_mask
from rosetta_t5.networks.layers.centred_norm import CentredLayerNorm
from rosetta_t5.networks.layers.dense import activation_axes
from rosetta_t5.networks.layers.embedding import LayerNorm
from rosetta_t5.networks.layers.layer_stack import scanned_stack
from rosetta_t5.networks.layers.masks import make_decoder_mask
from rosetta_t5.networks.layers.output_layer import output_layer
from rosetta_t5.networks.layers.remat import remat_layer
from rosetta_t5.parallel.sharding_constraints import with_sharding_constraint


def _dropout(config: TransformerConfig, name: str, length_axis: int = -2) -> nn.Dropout:
  """A dropout that drops the same features at every position; its masks depend on its name."""
  return nn.Dropout(rate=config.dropout_rate, broadcast_dims=(length_axis,), name=name)


def _norm(config: TransformerConfig, name: str) -> nn.Module:
  norm_cls: Any = {"rms": LayerNorm, "layer": CentredLayerNorm}[config.norm]
  return norm_cls(epsilon=config.norm_epsilon, dtype=config.dtype, name=name)


def _projection_options(config: TransformerConfig) -> dict[str, Any]:
  """Returns what the config says of projections besides what a `T5Config` does."""
  options: dict[str, Any] = {"use_bias": config.use_bias}
  if config.init_stddev is not None:
    options["kernel_init"] = nn.initializers.normal(config.init_stddev)
  return options


class DecoderLayer(nn.Module):
  """Self-attention and feed-forward block, each after a norm and around a residual.

  Attributes:
    config: sizes and switches.
    relative_embedding: the relative bias, which all layers share; None for other positions.
  """

  config: TransformerConfig
  relative_embedding: nn.Module | None = None

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
    """Returns the layer's output; where layers are scanned, (output, None), a step of the scan.

    `positions` are told where the config asks for others than relative ones; see `Decoder` for the
    other arguments.
    """
    cfg = self.config
    length_axis = -3 if cfg.transpose_batch_sequence else -2
    bias_1HLL = None
    if self.relative_embedding is not None:
      length = t5.bias_length(inputs.shape[length_axis], decode, max_decode_length)
      bias_1HLL = self.relative_embedding(length, length, False)
    options = _projection_options(cfg)
    x = _norm(cfg, "pre_self_attention_layer_norm")(inputs)
    x = t5.attention(cfg, "self_attention", scale_queries=cfg.scale_queries, **options)(
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
    x = (
      _dropout(cfg, "post_self_attention_dropout", length_axis)(x, deterministic=deterministic)
      + inputs
    )
    y = _norm(cfg, "pre_mlp_layer_norm")(x)
    y = t5.mlp(cfg, **options)(y, deterministic=deterministic)
    y = _dropout(cfg, "post_mlp_dropout", length_axis)(y, deterministic=deterministic) + x
    y = with_sharding_constraint(y, activation_axes("embed", cfg.transpose_batch_sequence))
    return (y, None) if cfg.scan_layers else y


class Decoder(nn.Module):
  """Embedding, layers, and the output layer.

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
      decoder_positions: each token's place in its example; None for its place in the row. Not used
        where positions are relative.
      decoder_causal_attention: 1 for the positions that all see each other, a prefix LM's inputs.
      enable_dropout: whether dropout is on.
      decode: whether the tokens are one position, the next after those in the cache. The first call,
        with the full length and no cache, makes one.
      max_decode_length: how many positions the cache holds.
      prefill: whether the tokens are whole prompts, to be put into a cache that has been made.
      prefill_lengths: how many of their positions; the rest is left for decoding.
      return_logits: False for the logits' two factors; see `output_layer`.

    Raises:
      ValueError: the config has no place for so many tokens, or for these arguments.
    """
    cfg, deterministic = self.config, not enable_dropout
    embedding = t5.token_embedder(cfg, "token_embedder", cfg.init_stddev or 1.0)
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
    positions = None
    if cfg.positions != "relative" or cfg.local_attention_window:
      positions = self._places(decoder_input_tokens, decoder_positions, decode, prefill_lengths)
    y = embedding(decoder_input_tokens.astype(jnp.int32))
    if positions is not None and cfg.positions == "learned":
      y = y + self._learned(positions, max_decode_length or decoder_input_tokens.shape[1])
    y = _dropout(cfg, "input_dropout")(y, deterministic=deterministic).astype(cfg.dtype)
    call = (deterministic, decode, max_decode_length, bool(prefill), prefill_lengths, positions)
    y = t5.transposed(cfg, self._layers(t5.transposed(cfg, y), mask, *call))
    y = _norm(cfg, "decoder_norm")(y)
    y = _dropout(cfg, "output_dropout")(y, deterministic=deterministic)
    logits = output_layer(cfg, embedding, y, return_logits, cfg.divide_tied_logits)
    if not cfg.padding_never_follows:
      return logits
    if isinstance(logits, Unprojected):
      return logits._replace(never=jnp.zeros((), jnp.int32))
    return with_logit(logits, 0)

  def _places(
    self,
    tokens_BT: jax.Array,
    positions_BT: jax.Array | None,
    decode: bool,
    prefill_lengths: jax.Array | None,
  ) -> jax.Array:
    """Returns each token's place, [B or 1, T]; the cache knows the next one's."""
    cfg = self.config
    place_1T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
    if prefill_lengths is None and not decode:
      return place_1T if positions_BT is None else positions_BT
    # The batch of a scanned cache comes second.
    leading = (1,) if cfg.scan_layers else ()
    is_made = self.has_variable("cache", "cache_index")
    index = self.variable("cache", "cache_index", lambda: jnp.zeros(leading, jnp.int32))
    if not is_made:
      return place_1T
    if prefill_lengths is not None:
      lengths_B = prefill_lengths.astype(jnp.int32)
      index.value = lengths_B[None] if cfg.scan_layers else lengths_B
      return place_1T
    place = index.value[0] if cfg.scan_layers else index.value
    index.value = index.value + 1
    return place.reshape(-1, 1)

  def _learned(self, positions_BT: jax.Array, length: int) -> jax.Array:
    """Returns the vectors of the places, [B or 1, T, D]."""
    cfg = self.config
    if length > cfg.max_length:
      raise ValueError(
        f"TransformerConfig.max_length = {cfg.max_length} places have learned vectors, but sequences "
        f"have {length}: set it to {length} or more, or TASK_FEATURE_LENGTHS to fewer (inputs and "
        "targets stand in one sequence)"
      )
    table_LD = param_with_axes(
      "position_embedding",
      nn.initializers.normal(1.0 if cfg.init_stddev is None else cfg.init_stddev),
      (cfg.max_length, cfg.emb_dim),
      jnp.float32,
      axes=("abspos_buckets", "embed"),
    )
    # Split by `embed` it comes together first, as the tokens' table does (see `Embed`).
    table_LD = with_sharding_constraint(table_LD, ("abspos_buckets", None))
    # Examples that are full while others are still being decoded have no place any more.
    vectors_BTD: jax.Array = table_LD.at[positions_BT].get(mode="clip").astype(cfg.dtype)
    return with_sharding_constraint(vectors_BTD, ("batch", "length", "embed"))

  def _layers(self, y: jax.Array, mask: jax.Array | SegmentMask | None, *call: Any) -> jax.Array:
    """Calls all layers; `call` is their call's arguments after the mask."""
    cfg = self.config
    # Of the call's arguments, with self 0, those that are Python's own.
    layer_cls = remat_layer(DecoderLayer, cfg.remat_policy, (3, 4, 5, 6), scanned=cfg.scan_layers)
    if cfg.scan_layers:
      return scanned_stack(self, layer_cls, "decoder", cfg.num_layers)(y, mask, *call)
    relative = t5.relative_bias(cfg) if cfg.positions == "relative" else None
    local_mask = self._local_mask(mask, *call) if cfg.local_attention_window else mask
    for layer in range(cfg.num_layers):
      y = layer_cls(cfg, relative, name=f"layers_{layer}")(y, (mask, local_mask)[layer % 2], *call)
    return y

  def _local_mask(
    self, mask: jax.Array | SegmentMask | None, *call: Any
  ) -> jax.Array | SegmentMask | None:
    """Returns the mask of every second layer: what stands too far back is not seen."""
    window = self.config.local_attention_window or 0
    if isinstance(mask, SegmentMask):
      raise ValueError(
        f"TransformerConfig.local_attention_window = {window} needs attention_kernel = 'xla'"
      )
    _, decode, max_decode_length, _, _, place_BT = call
    if mask is None and not (decode and max_decode_length):
      return None  # the call that makes the cache
    if mask is None:
      distance_BTS = place_BT[..., None] - jnp.arange(max_decode_length)[None, None]
      return (distance_BTS < window)[:, None]
    place_T = jnp.arange(mask.shape[-1])
    return mask & (place_T[:, None] - place_T[None] < window)[None, None]


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

  @property
  def scan_layers(self) -> bool:
    """Whether a cache has its layers first, the batch second."""
    return bool(self.config.scan_layers)

  def __call__(self, *args: Any, **kwargs: Any) -> jax.Array | Unprojected:
    """Returns the logits of the targets; see `Decoder`."""
    logits: jax.Array | Unprojected = self.decoder(*args, **kwargs)
    return logits


__all__ = ["Decoder", "DecoderLayer", "DecoderWrapper", "TransformerConfig"]
