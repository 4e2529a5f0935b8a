"""Training FLOPs of the five T5 1.1 sizes, and the utilization they make."""

from __future__ import annotations

import pytest

from rosetta_t5.telemetry.flops import model_flops_utilization, training_flops_per_sequence

SIZES = {
  "small": ((512, 6, 8, 8, 64, 1024), 109.9),
  "base": ((768, 12, 12, 12, 64, 2048), 437.5),
  "large": ((1024, 16, 24, 24, 64, 2816), 1503.8),
  "xl": ((2048, 32, 24, 24, 64, 5120), 5471.9),
  "xxl": ((4096, 64, 24, 24, 64, 10240), 21380.5),
}
FIELDS = (
  "emb_dim",
  "num_heads",
  "num_encoder_layers",
  "num_decoder_layers",
  "head_dim",
  "mlp_dim",
)


def flops(dims, **overrides):
  lengths = {"vocab_size": 32128, "encoder_length": 512, "decoder_length": 128}
  return training_flops_per_sequence(**dict(zip(FIELDS, dims, strict=True)) | lengths | overrides)


@pytest.mark.parametrize("size", SIZES)
def test_flops_per_sequence_at_512_128(size):
  dims, gflop = SIZES[size]
  assert round(flops(dims) / 1e9, 1) == gflop


def test_relu_mlp_has_one_kernel_less():
  dims, _ = SIZES["small"]
  saved = flops(dims) - flops(dims, num_mlp_activations=1)
  assert saved == 3 * 2 * (8 * 512 + 8 * 128) * 512 * 1024


def test_utilization_is_the_share_of_all_devices_peak():
  assert model_flops_utilization(100.0, 8.0, peak_flops=400.0, num_devices=4) == 0.5


def test_utilization_without_a_peak_is_refused():
  with pytest.raises(ValueError, match=r"not peak_flops = 0"):
    model_flops_utilization(1.0, 1.0, peak_flops=0)
