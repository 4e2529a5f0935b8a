"""The FLOPs of a training step, and the peak FLOP/s of devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax

from rosetta_t5.telemetry.gpus import gpu_of


def training_flops_of(config: Any, encoder_length: int, decoder_length: int) -> float:
  """Returns the FLOPs of a training step for one example.

  This is T5X's formula. It counts two FLOPs per multiply-add of each matmul, and the backward pass
  as two forward passes. Causal attention is counted in full, as are the empty slots of experts, and
  recomputation (remat) is not counted. For a decoder-only model the result equals the formula of
  Narayanan et al. 2021 (arXiv:2104.04473) without recomputation.

  Args:
    config: a `T5Config`, or the `TransformerConfig` of a decoder-only model.
    encoder_length: input tokens, including padding; 0 without an encoder.
    decoder_length: target tokens, including padding.
  """
  return 3.0 * sum(forward_flops_of(config, encoder_length, decoder_length))


class ForwardFlops(NamedTuple):
  """The FLOPs of a forward pass for one example.

  Attributes:
    projections: the matmuls of layers with parameters.
    attention: those of queries with keys, and of probabilities with values.
    logits: those of the output layer.
  """

  projections: float
  attention: float
  logits: float


def forward_flops_of(config: Any, encoder_length: int, decoder_length: int) -> ForwardFlops:
  """Returns the FLOPs of a forward pass; see `training_flops_of`."""
  has_encoder = hasattr(config, "num_encoder_layers")
  num_decoder_layers = config.num_decoder_layers if has_encoder else config.num_layers
  width, attention_width = config.emb_dim, config.num_heads * config.head_dim
  projections = num_decoder_layers * decoder_length * 8 * width * attention_width
  projections += _feed_forward_flops(config, "decoder", num_decoder_layers, decoder_length)
  pairs = num_decoder_layers * decoder_length**2
  if has_encoder:
    projections += config.num_encoder_layers * encoder_length * 8 * width * attention_width
    projections += _feed_forward_flops(config, "encoder", config.num_encoder_layers, encoder_length)
    # In cross-attention, query and output are projected for the decoder's tokens, key and value for
    # the encoder's.
    lengths = decoder_length + encoder_length
    projections += num_decoder_layers * 4 * lengths * width * attention_width
    pairs += config.num_encoder_layers * encoder_length**2
    pairs += num_decoder_layers * decoder_length * encoder_length
  logits = 2 * width * config.vocab_size * decoder_length
  return ForwardFlops(projections, 4 * pairs * attention_width, logits)


def _feed_forward_flops(config: Any, side: str, layers: int, length: int) -> float:
  """Returns the FLOPs of the feed-forward blocks and routers of a stack of layers for one example."""
  tokens, router = float(layers * length), 0.0
  if getattr(config, "num_experts", 0):
    routed = len(config.layers_with_experts(side)) * length
    tokens += routed * (config.slots_per_token(length) - 1)
    router = 2 * config.emb_dim * config.num_experts * routed
  kernels = (len(config.mlp_activations) + 1) * config.emb_dim * config.mlp_dim
  return 2 * kernels * tokens + router


def flops_of_lengths(config: Any, lengths: Mapping[str, int]) -> float | None:
  """Returns the FLOPs of a training sequence; None if they are unknown.

  They are unknown for a network config with other fields, and for an encoder without input tokens.

  Args:
    config: the model's `network_config`.
    lengths: the tokens of each side, `encoder` and `decoder`, including padding.
  """
  is_known_encoder = hasattr(config, "num_encoder_layers") and "encoder" in lengths
  is_decoder_only = hasattr(config, "num_layers")
  if "decoder" not in lengths or not (is_known_encoder or is_decoder_only):
    return None
  return training_flops_of(config, lengths.get("encoder", 0), lengths["decoder"])


def flops_of_model(model: Any, batch: Mapping[str, Any]) -> float | None:
  """Returns the FLOPs of a training sequence of `batch` (arrays or shapes); None if unknown."""
  tokens = {side: batch.get(f"{side}_input_tokens") for side in ("encoder", "decoder")}
  lengths = {side: int(leaf.shape[1]) for side, leaf in tokens.items() if leaf is not None}
  return flops_of_lengths(model.network_config, lengths)


def peak_flops(devices: Iterable[jax.Device]) -> float | None:
  """Returns the sum of the devices' peaks in FLOP/s; None if the peak of one is unknown."""
  gpus = [gpu_of(device.device_kind) for device in devices]
  return sum(gpu.bfloat16 for gpu in gpus if gpu) if all(gpus) else None


def peak_of(device_kind: str) -> float | None:
  """Returns the bfloat16 peak in FLOP/s of a kind of device, as jax names it; None if unknown."""
  gpu = gpu_of(device_kind)
  return gpu.bfloat16 if gpu else None
