"""`attention_kernel = 'auto'` takes the fastest kernel that computes the same as XLA's attention."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
import types

import jax
import jax.numpy as jnp
import pytest
from tiny_models import GPT, T5_1_1, make_batch, make_decoder_only_model

from rosetta_t5.kernels.attention import KERNELS, AttentionCase, Operands
from rosetta_t5.kernels.xla_attention import xla_attention
from rosetta_t5.networks import kernel_measurement
from rosetta_t5.networks.config import T5Config
from rosetta_t5.networks.kernel_measurement import (
  attention_cases,
  choose_fastest,
  kernel_error,
  usable_kernels,
  with_measured_kernel,
)

CASE = AttentionCase(32, 48, 2, 2, 16, "float32", has_bias=True, packed=True, batch=2)


def reference(q, k, v, bias, mask):
  return xla_attention(q, k, v, bias, mask.mask())


def slow(q, k, v, bias, mask):
  def wait(x):
    time.sleep(0.02)
    return x

  return reference(jax.pure_callback(wait, q, jax.lax.stop_gradient(q)) * 0 + q, k, v, bias, mask)


def without_mask(q, k, v, bias, mask):
  return xla_attention(q, k, v, bias)


def with_wrong_gradient(q, k, v, bias, mask):
  return reference(q, k, v, jax.lax.stop_gradient(bias), mask)


def not_finite(q, k, v, bias, mask):
  return reference(q, k, v, bias, mask) / 0.0


def failing(q, k, v, bias, mask):
  raise RuntimeError("this GPU has no such instruction")


def choose(**kernels):
  return choose_fastest([CASE], list(kernels), kernels, seconds=0.05)


@pytest.mark.slow
def test_the_fastest_of_correct_kernels_is_chosen_and_all_times_are_reported():
  choice = choose(xla=slow, flash=reference)
  assert choice.name == "flash"
  assert choice.reason.startswith("auto, measured: xla ")
  assert choice.reason.count(" ms") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
  ("kernel", "problem"),
  [
    (without_mask, "is wrong by "),
    (with_wrong_gradient, "is wrong by 1"),
    (not_finite, "is wrong by inf"),
    (failing, "failed (this GPU has no such instruction)"),
  ],
)
def test_a_faster_kernel_that_is_wrong_is_rejected_with_the_reason(kernel, problem):
  choice = choose(xla=slow, flash=kernel)
  assert choice.name == "xla"
  assert f"flash {problem}" in choice.reason


@pytest.mark.slow
@pytest.mark.parametrize(
  ("packed", "causal", "dtype"), [(True, False, "float32"), (False, True, "bfloat16")]
)
def test_our_own_kernels_pass_the_comparison(packed, causal, dtype):
  case = dataclasses.replace(CASE, keys=32, dtype=dtype, causal=causal, packed=packed)
  limit = {"float32": 1e-5, "bfloat16": 0.03}[dtype]

  assert kernel_error(case, lambda *operands: KERNELS["flash"].run(Operands(*operands))) < limit
  assert kernel_error(case, reference) < limit


def test_cases_are_what_one_device_computes():
  config = T5Config(
    vocab_size=64,
    num_heads=8,
    head_dim=64,
    dtype="bfloat16",
    num_encoder_layers=3,
    num_decoder_layers=5,
  )
  spec = jax.ShapeDtypeStruct
  batch = {
    "encoder_input_tokens": spec((64, 512), jnp.int32),
    "decoder_target_tokens": spec((64, 128), jnp.int32),
    "decoder_segment_ids": spec((64, 128), jnp.int32),
  }
  shared = {"batch": 16, "heads": 4, "head_dim": 64, "dtype": "bfloat16", "packed": True}
  shared["kv_heads"] = 4
  assert attention_cases(config, batch, {"data": 4, "model": 2}) == [
    AttentionCase(layers=5, queries=128, keys=128, causal=True, has_bias=True, **shared),
    AttentionCase(layers=5, queries=128, keys=512, causal=False, has_bias=False, **shared),
    AttentionCase(layers=3, queries=512, keys=512, causal=False, has_bias=True, **shared),
  ]


@pytest.fixture(scope="module")
def model():
  """Returns a decoder-only model: it has only one kind of attention to measure."""
  return make_decoder_only_model()


def test_nothing_is_measured_without_a_gpu(model):
  assert with_measured_kernel(model, {}, {"data": 1}) == (model, None)


@pytest.mark.slow
def test_a_run_on_the_same_device_and_shapes_uses_the_stored_choice(model, tmp_path, monkeypatch):
  """Only the platform is replaced: the kernels are compiled and timed for real, though not for long."""
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  measure = functools.cache(functools.partial(choose_fastest, seconds=0.05))
  measured_for = []

  def measure_once(cases, names):
    measured_for.append(names)
    return measure(tuple(cases), tuple(names))

  monkeypatch.setattr(kernel_measurement, "choose_fastest", measure_once)
  before = jax.config.jax_compilation_cache_dir
  jax.config.update("jax_compilation_cache_dir", str(tmp_path))
  batch = {
    name: jax.ShapeDtypeStruct((2, 16), jnp.int32)
    for name in ("decoder_input_tokens", "decoder_target_tokens")
  }
  try:
    measured, first = with_measured_kernel(model, batch, {"data": 1})
    (file,) = tmp_path.glob("attention-kernel-*.json")
    assert measured.network_config.attention_kernel == first.name == json.loads(file.read_text())[0]
    assert "xla " in first.reason
    assert "flash " in first.reason
    assert "cudnn" not in first.reason  # the model is float32, which cuDNN does not compute
    _, second = with_measured_kernel(model, batch, {"data": 1})
    assert second == (first.name, f"{first.reason}, in an earlier run")
    file.write_text("damaged")
    _, third = with_measured_kernel(model, batch, {"data": 1})
    assert third == first
    assert len(measured_for) == 2
  finally:
    jax.config.update("jax_compilation_cache_dir", before)


def test_each_kind_of_layer_is_a_case_that_a_kernel_must_compute():
  config = GPT.replace(window=4, layer_pattern=("global", "global", "local"), num_layers=6)
  config = config.replace(num_kv_heads=2)
  batch = {name: x for name, x in make_batch(2).items() if name.startswith("decoder")}
  cases = attention_cases(config, batch, {"data": 1})
  assert [(case.window, case.layers, case.kv_heads) for case in cases] == [
    (None, 4, 2),
    ((4, 4), 2, 2),
  ]
  gpu = types.SimpleNamespace(platform="gpu")
  assert usable_kernels(cases, gpu) == ["xla", "flash"]
  prefix = attention_cases(config, batch, {"data": 1}, has_prefix=True)
  assert usable_kernels(prefix, gpu) == ["xla"]


@pytest.mark.parametrize(
  ("changes", "queries_and_keys"),
  [
    # The decoder's merged attention and the encoder's attention to blocks are always computed by XLA.
    ({"merged_attention": True, "positions": "rotary"}, [(16, 16)]),
    ({"encoder": {"global_block_size": 4}}, [(8, 8), (8, 16)]),
  ],
)
def test_attention_that_only_xla_computes_is_not_measured(changes, queries_and_keys):
  config = dataclasses.replace(T5_1_1, **changes)
  cases = attention_cases(config, make_batch(2, 16, 8), {"data": 1})
  assert [(case.queries, case.keys) for case in cases] == queries_and_keys
