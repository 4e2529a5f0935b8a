"""How many floating-point operations training takes, and what share of a device's peak a run reaches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax

# Dense bfloat16 peaks, FLOP/s, from the vendor's data sheets, by a part of the device's name.
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

  Counts the matrix products, a multiplication and an addition each: the forward pass once and the
  backward pass as twice that. Recomputation (remat) is not counted, and attention over the whole row,
  though a causal one needs half. (T5X's formula; a decoder alone comes to that of Narayanan et al. 2021,
  arXiv:2104.04473, without its recomputation.)

  Args:
    emb_dim: model width.
    num_heads: attention heads.
    head_dim: width of a head.
    mlp_dim: width of the feed-forward layer.
    num_encoder_layers: 0 leaves out the encoder, but not the cross-attention.
    num_decoder_layers: layers of the decoder.
    vocab_size: tokens the logits range over.
    encoder_length: input tokens, padding included.
    decoder_length: target tokens, padding included.
    num_mlp_activations: kernels that go into the feed-forward layer (2: gelu times linear; 1: relu).
    cross_attention: whether decoder layers attend to the encoder; False for a decoder alone.
  """
  a = num_heads * head_dim
  mlp = (num_mlp_activations + 1) * emb_dim * mlp_dim
  enc, dec = encoder_length, decoder_length
  encoder_layer = 2 * enc * (4 * emb_dim * a + mlp) + 4 * enc**2 * a
  decoder_layer = 2 * dec * (4 * emb_dim * a + mlp) + 4 * dec**2 * a
  if cross_attention:
    # The decoder projects query and output of the cross-attention for its own tokens, key and value
    # for the encoder's.
    decoder_layer += 4 * (dec + enc) * emb_dim * a + 4 * dec * enc * a
  logits = 2 * emb_dim * vocab_size * dec
  return 3.0 * (num_encoder_layers * encoder_layer + num_decoder_layers * decoder_layer + logits)


def model_flops_utilization(
  flops_per_sequence: float, sequences_per_second: float, peak_flops: float, num_devices: int = 1
) -> float:
  """Returns MFU: the share of `num_devices` times `peak_flops` (per second) that the model needs."""
  if peak_flops <= 0 or num_devices < 1:
    raise ValueError(
      f"MFU needs a positive peak and at least one device, not peak_flops = {peak_flops} and "
      f"num_devices = {num_devices}"
    )
  return flops_per_sequence * sequences_per_second / (peak_flops * num_devices)


def training_flops_of(config: Any, *, encoder_length: int = 0, decoder_length: int) -> float:
  """Returns `training_flops_per_sequence` of a `T5Config`, or of a decoder's `TransformerConfig`."""
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
  """Returns the FLOPs of a training sequence; None for a config with other fields, or no encoder's input.

  Args:
    config: the module's.
    lengths: tokens of each side, `encoder` and `decoder`, padding included.
  """
  sides = {"num_encoder_layers": {"encoder", "decoder"}, "num_layers": {"decoder"}}
  if not any(hasattr(config, name) and needed <= {*lengths} for name, needed in sides.items()):
    return None
  return training_flops_of(
    config, encoder_length=lengths.get("encoder", 0), decoder_length=lengths["decoder"]
  )


def flops_of_model(model: Any, batch: Mapping[str, Any]) -> float | None:
  """Returns the FLOPs of a training sequence of `batch`, arrays or shapes; None where not known."""
  tokens = {side: batch.get(f"{side}_input_tokens") for side in ("encoder", "decoder")}
  lengths = {side: int(leaf.shape[1]) for side, leaf in tokens.items() if leaf is not None}
  return flops_of_lengths(getattr(getattr(model, "module", None), "config", None), lengths)


def peak_flops(devices: Iterable[jax.Device]) -> float | None:
  """Returns what `devices` do together at most, in FLOP/s; None where a device's peak is not known."""
  peaks = [peak_of(device.device_kind) for device in devices]
  return None if None in peaks else sum(peak for peak in peaks if peak is not None)


def peak_of(device_kind: str) -> float | None:
  """Returns the peak of a device, FLOP/s, by the name that jax has for it; None where not known."""
  return next((peak for name, peak in PEAKS.items() if name in device_kind), None)
