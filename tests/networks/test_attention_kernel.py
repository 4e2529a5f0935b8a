"""The choice of the attention kernel, and the errors for unsupported settings."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest
from tiny_models import T5_1_1, make_batch, make_model, params_of

from rosetta_t5.kernels.xla_attention import xla_attention
from rosetta_t5.networks import kernel_choice
from rosetta_t5.networks.kernel_choice import (
  SegmentMask,
  choose_attention_kernel,
  fused_attention,
  make_mask,
  nan_if_padding_precedes_tokens,
)
from rosetta_t5.networks.t5 import T5Config, Transformer

REAL = jnp.ones((2, 6), bool)


def config(**changes):
  return dataclasses.replace(T5_1_1, **changes)


def test_the_default_kernel_is_the_reference_with_a_reason():
  choice = choose_attention_kernel(T5_1_1)
  assert choice.name == "xla"
  assert choice.reason.startswith("auto: ")
  assert choose_attention_kernel(config(attention_kernel="xla")) == ("xla", "set")
  assert choose_attention_kernel(config(attention_kernel="flash")).reason == (
    "set; interpreted, because there is no GPU: slow"
  )


def test_cudnn_without_a_gpu_is_refused_before_anything_is_computed():
  model = make_model(Transformer(config(attention_kernel="cudnn")))
  with pytest.raises(
    ValueError, match="'cudnn' needs an NVIDIA GPU, but jax runs on cpu: set it to"
  ):
    jax.eval_shape(model.eval_fn, params_of(T5_1_1), make_batch())


@pytest.mark.parametrize(
  ("changes", "arguments", "text"),
  [
    ({"dtype": "float32"}, {}, "computes in bfloat16, but dtype is float32"),
    ({"head_dim": 4}, {}, "needs a head_dim that is a multiple of 8, got 4"),
    (
      {},
      {"query_segments": 1, "key_segments": 1},
      "does not support packed examples: set it to 'flash'",
    ),
    ({}, {"real_keys": jnp.ones((2, 5), bool)}, "only if lengths are even, got 6 and 5"),
  ],
)
def test_what_cudnn_cannot_compute_is_refused(monkeypatch, changes, arguments, text):
  monkeypatch.setattr(kernel_choice, "target_device", lambda: types.SimpleNamespace(platform="gpu"))
  settings = {"attention_kernel": "cudnn", "dtype": "bfloat16", "head_dim": 8} | changes
  given = {"real_queries": REAL, "real_keys": REAL} | arguments
  with pytest.raises(ValueError, match=text):
    make_mask(config(**settings), **given)


@pytest.mark.parametrize(
  ("changes", "text"),
  [
    (
      {"attention_kernel": "flsh"},
      r"attention_kernel must be one of .* got 'flsh' \(did you mean 'flash'\?\)",
    ),
    (
      {"remat_policy": "minimum"},
      r"remat_policy must be one of .* got 'minimum' \(did you mean 'minimal'\?\)",
    ),
    (
      {"fuse_qkv_params": "yes"},
      "T5Config.fuse_qkv_params = 'yes' must be True or False, or 1 or 0",
    ),
  ],
)
def test_unknown_settings_are_refused(changes, text):
  with pytest.raises(ValueError, match=text):
    T5Config(vocab_size=8, **changes)


def test_dropout_scales_the_values():
  q, k, v = jax.random.normal(jax.random.PRNGKey(0), (3, 2, 6, 2, 4))
  factor = jax.random.bernoulli(jax.random.PRNGKey(1), 0.5, (2, 2, 6)).astype(jnp.float32) * 2
  ids = jnp.ones((2, 6), jnp.int32)
  got = fused_attention("flash", q, k, v, None, SegmentMask(ids, ids), factor)
  want = xla_attention(q, k, v, value_scale_BHS=factor)
  assert jnp.allclose(got, want, atol=1e-5)
  assert not jnp.allclose(got, xla_attention(q, k, v), atol=1e-2)


def test_lengths_for_cudnn_reach_the_last_token_and_are_never_zero():
  ids = jnp.asarray([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]])
  assert kernel_choice.row_lengths(ids).tolist() == [2, 3, 1]


@pytest.mark.parametrize(
  ("keys", "is_nan"),
  [([[1, 1, 0], [0, 0, 0]], False), ([[1, 1, 0], [1, 0, 1]], True), ([[0, 1, 1]], True)],
)
def test_padding_before_tokens_gives_nan_with_a_kernel_that_takes_lengths(keys, is_nan):
  keys = jnp.asarray(keys)
  for mask in (SegmentMask(keys, jnp.ones_like(keys)), SegmentMask(jnp.ones_like(keys), keys)):
    assert bool(jnp.isnan(nan_if_padding_precedes_tokens(mask))) == is_nan


@pytest.mark.parametrize("leading", [0, 1])
def test_padding_before_tokens_gives_nan_in_a_decoder_without_a_bias(monkeypatch, leading):
  monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, *others, **options: q)
  q = jnp.ones((1, 4, 2, 8), jnp.bfloat16)
  tokens = jnp.arange(4)[None] >= leading
  output = fused_attention("cudnn", q, q, q, None, SegmentMask(tokens, tokens, causal=True))
  assert output.dtype == q.dtype
  assert bool(jnp.all(jnp.isnan(output))) == bool(leading)
