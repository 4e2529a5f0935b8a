"""How many floating-point operations training takes, and what share of a device's peak a run reaches."""

from __future__ import annotations

from typing import Any


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
) -> float:
  """Returns the FLOPs of a training step for one example of an encoder-decoder model.

  Counts the matrix products, a multiplication and an addition each: the forward pass once and the
  backward pass as twice that. Recomputation (remat) is not counted. (T5X's formula.)

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
  """
  a = num_heads * head_dim
  mlp = (num_mlp_activations + 1) * emb_dim * mlp_dim
  enc, dec = encoder_length, decoder_length
  encoder_layer = 2 * enc * (4 * emb_dim * a + mlp) + 4 * enc**2 * a
  # The decoder projects query and output of the cross-attention for its own tokens, key and value
  # for the encoder's.
  decoder_layer = (
    2 * dec * (6 * emb_dim * a + mlp) + 4 * enc * emb_dim * a + 4 * dec**2 * a + 4 * dec * enc * a
  )
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


def training_flops_of(config: Any, *, encoder_length: int, decoder_length: int) -> float:
  """Returns `training_flops_per_sequence` of an encoder-decoder `T5Config`."""
  return training_flops_per_sequence(
    emb_dim=config.emb_dim,
    num_heads=config.num_heads,
    head_dim=config.head_dim,
    mlp_dim=config.mlp_dim,
    num_encoder_layers=config.num_encoder_layers,
    num_decoder_layers=config.num_decoder_layers,
    vocab_size=config.vocab_size,
    encoder_length=encoder_length,
    decoder_length=decoder_length,
    num_mlp_activations=len(config.mlp_activations),
  )
