"""The FLOPs of a training step, and model FLOPs utilization (MFU)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax

# Dense bfloat16 peaks in FLOP/s from the vendor's data sheets; a key is a part of the device's name.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}


def training_flops_per_sequence(
  *,
  emb_dim: int,
  num_heads: int,
  head_dim: int,
  mlp_dim: int,
  num_encoder_layers: int,
  num_decoder_layers: int,
  vocab_size: int,
  encoder_length: int,
  decoder_length: int,
  num_mlp_activations: int = 2,
  cross_attention: bool = True,
) -> float:
  """Returns the FLOPs of a training step for one example.

  This is T5X's formula. It counts two FLOPs per multiply-add of each matmul, and the backward pass
  as two forward passes. Causal attention is counted in full, and recomputation (remat) is not
  counted. For a decoder-only model the result equals the formula of Narayanan et al. 2021
  (arXiv:2104.04473) without recomputation.

  Args:
    emb_dim: the model's width.
    num_heads: the number of attention heads.
    head_dim: the width of a head.
    mlp_dim: the width of the feed-forward layer.
    num_encoder_layers: the number of encoder layers; 0 does not remove the cross-attention.
    num_decoder_layers: the number of decoder layers.
    vocab_size: the vocabulary size of the logits.
    encoder_length: input tokens, including padding.
    decoder_length: target tokens, including padding.
    num_mlp_activations: input kernels of the feed-forward layer (2 for gated gelu, 1 for relu).
    cross_attention: whether the decoder layers attend to an encoder.
  """
  a = num_heads * head_dim
  mlp = (num_mlp_activations + 1) * emb_dim * mlp_dim
  enc, dec = encoder_length, decoder_length
  encoder_layer = 2 * enc * (4 * emb_dim * a + mlp) + 4 * enc**2 * a
  decoder_layer = 2 * dec * (4 * emb_dim * a + mlp) + 4 * dec**2 * a
  if cross_attention:
    # Query and output are projected for the decoder's tokens, key and value for the encoder's.
    decoder_layer += 4 * (dec + enc) * emb_dim * a + 4 * dec * enc * a
  logits = 2 * emb_dim * vocab_size * dec
  return 3.0 * (num_encoder_layers * encoder_layer + num_decoder_layers * decoder_layer + logits)


def model_flops_utilization(
  flops_per_sequence: float, sequences_per_second: float, peak_flops: float, num_devices: int = 1
) -> float:
  """Returns MFU: the model's FLOP/s divided by `num_devices` times `peak_flops` (in FLOP/s)."""
  if peak_flops <= 0 or num_devices < 1:
    raise ValueError(
      "MFU needs peak_flops > 0 and num_devices >= 1, got "
      f"peak_flops = {peak_flops} and num_devices = {num_devices}"
    )
  return flops_per_sequence * sequences_per_second / (peak_flops * num_devices)


def training_flops_of(config: Any, *, encoder_length: int = 0, decoder_length: int) -> float:
  """Returns `training_flops_per_sequence` for a `T5Config` or a decoder's `TransformerConfig`."""
  has_encoder = hasattr(config, "num_encoder_layers")
  return training_flops_per_sequence(
    emb_dim=config.emb_dim,
    num_heads=config.num_heads,
    head_dim=config.head_dim,
    mlp_dim=config.mlp_dim,
    num_encoder_layers=config.num_encoder_layers if has_encoder else 0,
    num_decoder_layers=config.num_decoder_layers if has_encoder else config.num_layers,
    vocab_size=config.vocab_size,
    encoder_length=encoder_length,
    decoder_length=decoder_length,
    num_mlp_activations=len(config.mlp_activations),
    cross_attention=has_encoder,
  )


def flops_of_lengths(config: Any, lengths: Mapping[str, int]) -> float | None:
  """Returns the FLOPs of a training sequence; None if they are unknown.

  They are unknown for a network config with other fields, and for an encoder without input tokens.

  Args:
    config: the model's `network_config`.
    lengths: the tokens of each side, `encoder` and `decoder`, including padding.
  """
  sides = {"num_encoder_layers": {"encoder", "decoder"}, "num_layers": {"decoder"}}
  if not any(hasattr(config, name) and needed <= {*lengths} for name, needed in sides.items()):
    return None
  return training_flops_of(
    config, encoder_length=lengths.get("encoder", 0), decoder_length=lengths["decoder"]
  )


def flops_of_model(model: Any, batch: Mapping[str, Any]) -> float | None:
  """Returns the FLOPs of a training sequence of `batch` (arrays or shapes); None if unknown."""
  tokens = {side: batch.get(f"{side}_input_tokens") for side in ("encoder", "decoder")}
  lengths = {side: int(leaf.shape[1]) for side, leaf in tokens.items() if leaf is not None}
  return flops_of_lengths(model.network_config, lengths)


def peak_flops(devices: Iterable[jax.Device]) -> float | None:
  """Returns the sum of the devices' peaks in FLOP/s; None if the peak of one is unknown."""
  peaks = [peak_of(device.device_kind) for device in devices]
  return None if None in peaks else sum(peak for peak in peaks if peak is not None)


def peak_of(device_kind: str) -> float | None:
  """Returns the peak in FLOP/s of a kind of device, as jax names it; None if it is unknown."""
  return next((peak for name, peak in PEAKS.items() if name in device_kind), None)
