"""Training FLOPs of the five T5 1.1 sizes and of decoders, and the peaks of devices."""

from __future__ import annotations

import types

import jax
import pytest
from tiny_models import make_batch, make_decoder_only_model, make_model

from rosetta_t5.networks.transformer import T5Config, Transformer, TransformerConfig
from rosetta_t5.telemetry.run_metrics import peak_flops
from rosetta_t5.traced.program import flops_of_training

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


def flops_of(config, batch):
  """Returns the FLOPs of a training sequence of this batch."""
  is_t5 = isinstance(config, T5Config)
  model = make_model(Transformer(config)) if is_t5 else make_decoder_only_model(config)
  shapes = {name: value.shape for name, value in batch.items()}
  variables = jax.eval_shape(
    lambda key: model.get_initial_variables(key, shapes), jax.random.PRNGKey(0)
  )
  return flops_of_training(model, variables["params"], batch)


def flops(dims, mlp_activations=("gelu", "linear")):
  config = T5Config(
    vocab_size=32128, mlp_activations=mlp_activations, **dict(zip(FIELDS, dims, strict=True))
  )
  return flops_of(config, make_batch(2, 512, 128))


@pytest.mark.slow
@pytest.mark.parametrize(
  "size",
  ["small", "base", *(pytest.param(x, marks=pytest.mark.slow) for x in ("large", "xl", "xxl"))],
)
def test_flops_per_sequence_at_512_128(size):
  dims, gflop = SIZES[size]
  assert round(flops(dims) / 1e9, 1) == gflop


@pytest.mark.slow
def test_relu_mlp_has_one_kernel_fewer():
  dims, _ = SIZES["small"]
  saved = flops(dims) - flops(dims, mlp_activations=("relu",))
  assert saved == 3 * 2 * (8 * 512 + 8 * 128) * 512 * 1024


_LARGER = ((2304, 24, 24), (12288, 96, 80))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("hidden", "heads", "layers"),
  [(768, 12, 12), *(pytest.param(*x, marks=pytest.mark.slow) for x in _LARGER)],
)
def test_flops_of_a_decoder_equal_megatrons_formula(hidden, heads, layers):
  length, vocab_size = 2048, 51200
  config = TransformerConfig(
    vocab_size=vocab_size,
    emb_dim=hidden,
    num_heads=heads,
    num_layers=layers,
    head_dim=hidden // heads,
    mlp_dim=4 * hidden,
    mlp_activations=("gelu",),
  )
  # Narayanan et al. 2021, equation 3, without the quarter of the layers' part that is recomputation.
  layers_part = 72 * length * layers * hidden**2 * (1 + length / (6 * hidden))
  logits_part = 6 * length * hidden * vocab_size
  expected = layers_part + logits_part
  names = ("decoder_input_tokens", "decoder_target_tokens", "decoder_loss_weights")
  batch = {name: jax.ShapeDtypeStruct((2, length), "int32") for name in names}
  assert flops_of(config, batch) == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_flops_of_experts_are_those_of_their_slots_and_routers():
  sizes = {"num_encoder_layers": 2, "num_decoder_layers": 2, "vocab_size": 32}
  batch = make_batch(2, 32, 16)
  dense = flops_of(T5Config(**sizes), batch)
  equal, more = (
    flops_of(T5Config(**sizes, num_experts=4, capacity_factor=factor), batch)
    for factor in (1.0, 1.25)
  )
  tokens, config = 32 + 16, T5Config(**sizes)
  assert equal - dense == 3 * 2 * config.emb_dim * 4 * tokens
  kernels = (len(config.mlp_activations) + 1) * config.emb_dim * config.mlp_dim
  # Two and one more slots for each of four experts.
  assert more - equal == 3 * 2 * kernels * 4 * (2 + 1)


def test_flops_of_a_loss_that_cannot_be_traced_are_unknown():
  model = types.SimpleNamespace(loss_fn=lambda params, batch, rng: batch["missing"])
  assert flops_of_training(model, {}, {}) is None


def test_peak_is_the_sum_over_devices_or_none_if_one_is_unknown():
  def device(kind):
    return types.SimpleNamespace(device_kind=kind)

  assert peak_flops([device("NVIDIA H200"), device("NVIDIA A100-SXM4-80GB")]) == 989e12 + 312e12
  assert peak_flops([device("NVIDIA H200"), device("cpu")]) is None
