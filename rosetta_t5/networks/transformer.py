"""The networks: encoder-decoders such as T5 (Raffel et al., 2020), and decoders such as GPT.

With T5X's configs, parameters have T5X's names, shapes and initial values.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rosetta_t5.kernels.attention import Visibility, prepare
from rosetta_t5.kernels.cross_entropy import LogitFactors
from rosetta_t5.networks import gpu_fusion
from rosetta_t5.networks.block import Block, relative_bias
from rosetta_t5.networks.config import NetworkConfig, ScalableT5Config, T5Config, TransformerConfig
from rosetta_t5.networks.layer_kinds import layer_kinds
from rosetta_t5.networks.layers.dropout import Dropout, feature_dropout
from rosetta_t5.networks.layers.embedding import make_token_embedder, output_layer, position_vectors
from rosetta_t5.networks.layers.global_blocks import block_ids_of, with_block_bias
from rosetta_t5.networks.layers.norms import make_norm
from rosetta_t5.networks.layers.prompt import Prompt, after_prompt
from rosetta_t5.networks.layers.stack import LayerInputs, run_stack

__all__ = ["Decoder", "DecoderWrapper", "Encoder", "ScalableT5Config", "T5Config", "Transformer"]
__all__ += ["NetworkConfig", "TransformerConfig"]

Mask = Visibility | Bool[Array, "B 1 T S"] | None


class Encoder(nn.Module):
  """The embedding and the stack of encoder layers.

  Attributes:
    config: sizes and settings.
    shared_embedding: the embedding of the decoder too; None for one of its own.
  """

  config: NetworkConfig
  shared_embedding: nn.Module | None = None

  @nn.compact
  def __call__(
    self,
    encoder_input_tokens: Int[Array, "B S"],
    encoder_mask: Mask = None,
    deterministic: bool = False,
    encoder_positions: Int[Array, "B S"] | None = None,
  ) -> Float[Array, "B P_and_S D"]:
    """Returns the encoded prompt and tokens; positions are None for those in the row."""
    cfg = self.config
    positions, prompt_length = encoder_positions, cfg.prompt_length
    encoder_mask = after_prompt(encoder_mask, prompt_length)
    if positions is None and cfg.positions != "relative":
      length = prompt_length + encoder_input_tokens.shape[1]
      positions = jnp.arange(length, dtype=jnp.int32)[None]
    visible, local = prepare(cfg.kernel, encoder_mask, cfg.windows)
    options: Any = {"positions": positions, "deterministic": deterministic}
    inputs = LayerInputs(visible, local, block_ids=block_ids_of(cfg, encoder_mask), **options)
    embedding = self.shared_embedding or make_token_embedder(cfg, "token_embedder")
    x = _embed(self, embedding, encoder_input_tokens, inputs, prompt_length)
    x = make_norm(cfg, "encoder_norm")(_run_layers(self, "encoder", x, inputs))
    return Dropout(cfg.dropout_rate)(x, deterministic)


class Decoder(nn.Module):
  """The embedding, the stack of decoder layers, and the output layer.

  Attributes:
    config: sizes and settings.
    shared_embedding: the embedding of the encoder too; None for one of its own.
  """

  config: NetworkConfig
  shared_embedding: nn.Module | None = None

  @nn.compact
  def __call__(
    self,
    encoded: Float[Array, "B S D"] | None,
    decoder_input_tokens: Int[Array, "B T"],
    decoder_positions: Int[Array, "B T"] | None = None,
    decoder_mask: Mask = None,
    encoder_decoder_mask: Mask = None,
    deterministic: bool = False,
    decode: bool = False,
    max_decode_length: int | None = None,
    return_logits: bool = True,
    *,
    prefill: bool = False,
    prefill_lengths: Int[Array, " B"] | None = None,
  ) -> Float[Array, "B T V"] | LogitFactors:
    """Returns the float32 logits; see `DecoderWrapper` for the arguments."""
    cfg = self.config
    kernel = "xla" if decode or prefill or cfg.merged_attention else cfg.kernel
    prompt_length, positions = 0 if "encoder" in cfg.sides else cfg.prompt_length, None
    # In a decoding step the prompt is in the cache.
    new_vectors = 0 if decode and self.variables.get("cache") else prompt_length
    decoder_mask = after_prompt(decoder_mask, new_vectors)
    prefill_lengths = None if prefill_lengths is None else prefill_lengths + prompt_length
    if cfg.positions != "relative":
      length = new_vectors + decoder_input_tokens.shape[1]
      positions = self._positions(length, decoder_positions, decode, prefill_lengths)
    inputs = LayerInputs(
      *prepare(kernel, decoder_mask, cfg.windows),
      cross_visible=prepare(kernel, encoder_decoder_mask)[0],
      encoded=None if encoded is None else _swap_length(cfg, encoded),
      positions=positions,
      prefill_lengths=prefill_lengths,
      deterministic=deterministic,
      decode=decode,
      prefill=prefill,
      cache_length=max_decode_length and max_decode_length + prompt_length,
    )
    tokens, start = decoder_input_tokens.astype(jnp.int32), cfg.decoder_start_token_id
    if start not in (None, cfg.pad_id):
      tokens = jnp.where(tokens == cfg.pad_id, start, tokens)
    embedding = self.shared_embedding or make_token_embedder(cfg, "token_embedder")
    y = _embed(self, embedding, tokens, inputs, new_vectors)
    y = make_norm(cfg, "decoder_norm")(_run_layers(self, "decoder", y, inputs)[:, new_vectors:])
    name = _dropout_name(cfg, "output_dropout")
    y = feature_dropout(cfg.dropout_rate, name=name)(y, deterministic)
    return output_layer(cfg, embedding, y, return_logits)

  def _positions(
    self, length: int, positions_BT: Array | None, decode: bool, prefill_lengths: Array | None
  ) -> Array:
    """Returns the `length` positions T, [B or 1, T]; the cache stores the next one for decoding."""
    cfg = self.config
    position_1T = jnp.arange(length, dtype=jnp.int32)[None]
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


def _dropout_name(config: NetworkConfig, name: str) -> str | None:
  """Returns the name of a dropout, which T5X gives it in decoder-only networks."""
  return None if "encoder" in config.sides else name


def _swap_length(config: NetworkConfig, x: jax.Array) -> jax.Array:
  """Converts activations between [B, T, D] and the layout inside the layers, in both directions."""
  return x.swapaxes(0, 1) if config.transpose_batch_sequence else x


def _embed(
  stack: nn.Module, embedding: Any, tokens: jax.Array, inputs: LayerInputs, prompt_length: int
) -> jax.Array:
  """Returns the input of the first layer of `stack`, which begins with a prompt if it has a length."""
  cfg: NetworkConfig = stack.config
  x = embedding(tokens.astype(jnp.int32))
  if cfg.embedding_scale != 1:
    x = x * jnp.asarray(cfg.embedding_scale, x.dtype)
  if cfg.end_of_image_id is not None:
    x = embedding.with_end_of_image(tokens, x)
  if prompt_length:
    x = Prompt(cfg, parent=stack, name="prompt")(x)
  if cfg.positions == "learned":
    x = x + position_vectors(cfg, inputs.positions, inputs.cache_length or x.shape[1])
  dropout = feature_dropout(cfg.dropout_rate, name=_dropout_name(cfg, "input_dropout"))
  x = _swap_length(cfg, dropout(x, inputs.deterministic).astype(cfg.dtype))
  return gpu_fusion.store_rows(stack, x, cfg.row_axes)


def _run_layers(stack: nn.Module, side: str, x: jax.Array, inputs: LayerInputs) -> jax.Array:
  """Returns the activations after the layers of `stack`, [B, T, D]."""
  cfg: NetworkConfig = stack.config
  if cfg.positions == "relative" and not cfg.bias_per_layer:
    bias = relative_bias(stack, side, x, inputs)
    if inputs.block_ids is not None:
      bias = with_block_bias(cfg, bias, inputs.block_ids)
    inputs = dataclasses.replace(inputs, bias=bias)
  return _swap_length(cfg, run_stack(stack, Block, layer_kinds(cfg, side), x, inputs, side))


class _Network(nn.Module):
  """What both networks have.

  Attributes:
    config: sizes and settings.
  """

  config: NetworkConfig

  @property
  def scan_layers(self) -> bool:
    """Whether the cache has the layers as its first dimension and the batch as its second."""
    return self.config.scan_layers


class Transformer(_Network):
  """The encoder-decoder network."""

  def setup(self) -> None:
    """Creates the encoder, the decoder and the embedding that they share."""
    shared = make_token_embedder(self.config) if self.config.shared_embedding else None
    if shared is not None:
      self.token_embedder = shared
    self.encoder = Encoder(self.config.of_side("encoder"), shared)
    self.decoder: Any = Decoder(self.config, shared)

  def encode(
    self,
    encoder_input_tokens: Int[Array, "B S"],
    encoder_segment_ids: Int[Array, "B S"] | None = None,
    enable_dropout: bool = True,
    encoder_positions: Int[Array, "B S"] | None = None,
  ) -> Float[Array, "B P_and_S D"]:
    """Returns the encoded inputs, after those of the prompt; nothing attends to padding."""
    real, ids = encoder_input_tokens != self.config.pad_id, encoder_segment_ids
    visible = Visibility.of_tokens(real, real, ids, ids)
    options: dict[str, Any] = {}  # T5X's encoders do not have positions
    if self.config.positions != "relative":
      options["encoder_positions"] = encoder_positions
    return self.encoder(encoder_input_tokens, visible, deterministic=not enable_dropout, **options)

  def decode(
    self,
    encoded: Float[Array, "B P_and_S D"],
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
      decoder_positions: each target's position in its example; ignored if positions are relative.
      enable_dropout: whether dropout is on.
      decode: whether the tokens are one position, the one that follows those in the cache.
      max_decode_length: the number of positions in the cache.
      return_logits: False returns the logits' two factors; see `output_layer`.
    """
    prompt = ((0, 0), (self.config.prompt_length, 0))
    real_inputs = jnp.pad(encoder_input_tokens != self.config.pad_id, prompt, constant_values=True)
    ids, input_ids, visible = decoder_segment_ids, encoder_segment_ids, None
    if decode:
      # A decoding step has no padding, and the cache masks the positions after it.
      real_targets = jnp.ones_like(decoder_target_tokens, dtype=bool)
    else:
      real_targets = decoder_target_tokens != self.config.pad_id
      visible = Visibility.of_tokens(real_targets, real_targets, ids, ids, causal=True)
    logits: jax.Array | LogitFactors = self.decoder(
      encoded,
      decoder_input_tokens,
      decoder_positions=decoder_positions,
      decoder_mask=visible,
      encoder_decoder_mask=Visibility.of_tokens(real_targets, real_inputs, ids, input_ids),
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
    return self.decode(
      self.encode(encoder_input_tokens, encoder_segment_ids, enable_dropout, encoder_positions),
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


class DecoderWrapper(_Network):
  """A decoder-only network, causal or a prefix LM.

  The decoder has the name `decoder`, so that parameters have the paths of an encoder-decoder's.
  """

  def setup(self) -> None:
    """Creates the decoder."""
    self.decoder = Decoder(self.config)

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
    visible, ids = None, decoder_segment_ids
    if not decode:
      real = decoder_target_tokens != self.config.pad_id
      prefix = decoder_causal_attention
      visible = Visibility.of_tokens(real, real, ids, ids, prefix_BT=prefix, causal=True)
    logits: jax.Array | LogitFactors = self.decoder(
      None,
      decoder_input_tokens,
      decoder_positions,
      visible,
      deterministic=not enable_dropout,
      decode=decode,
      max_decode_length=max_decode_length,
      return_logits=return_logits,
      prefill=prefill,
      prefill_lengths=prefill_lengths,
    )
    return logits
