"""The choice of the attention kernel, and the errors for unsupported settings."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest
from tiny_models import T5_1_1, make_batch, make_model, params_of

from rosetta_t5.kernels.attention import KERNELS, AttentionCase, Operands, Visibility, attend
from rosetta_t5.kernels.xla_attention import xla_attention
from rosetta_t5.networks.kernel_measurement import kernel_of
from rosetta_t5.networks.transformer import T5Config, Transformer

GPU = types.SimpleNamespace(platform="gpu")
CASE = AttentionCase(6, 6, heads=2, kv_heads=2, head_dim=8, dtype="bfloat16")


def config(**changes):
  return dataclasses.replace(T5_1_1, **changes)


def test_the_default_kernel_is_the_reference_with_a_reason():
  choice = kernel_of(T5_1_1)
  assert choice.name == "xla"
  assert choice.reason.startswith("auto: ")
  assert kernel_of(config(attention_kernel="xla")) == ("xla", "set")
  assert kernel_of(config(attention_kernel="flash")).reason == (
    "set; interpreted, because there is no GPU: slow"
  )


def test_cudnn_without_a_gpu_is_refused_before_anything_is_computed():
  model = make_model(Transformer(config(attention_kernel="cudnn")))
  with pytest.raises(
    ValueError, match="'cudnn' needs an NVIDIA GPU, but jax runs on cpu: set it to"
  ):
    jax.eval_shape(model.eval_fn, params_of(T5_1_1), make_batch())


@pytest.mark.parametrize(
  ("changes", "text"),
  [
    ({"dtype": "float32"}, "computes in bfloat16, but dtype is float32"),
    ({"head_dim": 4}, "needs a head_dim that is a multiple of 8, got 4"),
    ({"packed": True}, "does not support packed examples: set it to 'flash'"),
    ({"keys": 5}, "only if lengths are even, got 6 and 5"),
    (
      {"window": (3, 3)},
      "supports no window and no softcap, got (3, 3) and None: set it to 'flash'",
    ),
    ({"softcap": 30.0}, "supports no window and no softcap, got None and 30.0: set it to 'flash'"),
    ({"context_shards": 2}, "does not support the mesh axis 'context': set it to 'flash'"),
  ],
)
def test_what_cudnn_cannot_compute_is_refused(changes, text):
  assert KERNELS["cudnn"].refuses(CASE, GPU) is None
  refuses = {
    name: kernel.refuses(dataclasses.replace(CASE, **changes), GPU)
    for name, kernel in KERNELS.items()
  }
  assert text in refuses["cudnn"]
  assert refuses["flash"] is refuses["xla"] is None


def test_fused_kernels_refuse_prefixes():
  ids = jnp.ones((1, 4), jnp.int32)
  q = jnp.ones((1, 4, 2, 8))
  with pytest.raises(ValueError, match="'flash' supports causal attention only"):
    attend("flash", Operands(q, q, q, None, Visibility(ids, ids, prefix_BT=ids, causal=True)))


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


@pytest.mark.slow
def test_dropout_scales_the_values():
  q, k, v = jax.random.normal(jax.random.PRNGKey(0), (3, 2, 6, 2, 4))
  factor = jax.random.bernoulli(jax.random.PRNGKey(1), 0.5, (2, 2, 6)).astype(jnp.float32) * 2
  ids = jnp.ones((2, 6), jnp.int32)
  got = attend("flash", Operands(q, k, v, None, Visibility(ids, ids), factor))
  want = xla_attention(q, k, v, value_scale_BGS=factor)
  assert jnp.allclose(got, want, atol=1e-5)
  assert not jnp.allclose(got, xla_attention(q, k, v), atol=1e-2)


@pytest.fixture
def cudnn(monkeypatch):
  """Returns cuDNN's call with jax's function replaced by one that returns its queries plus its bias."""
  seen = {}

  def record(q, k, v, bias=None, **options):
    seen.update(options)
    return q if bias is None else q + bias.mean()

  monkeypatch.setattr(jax.nn, "dot_product_attention", record)
  return lambda *arguments: (KERNELS["cudnn"].run(Operands(*arguments)), seen)


def test_lengths_for_cudnn_reach_the_last_token_and_are_never_zero(cudnn):
  ids = jnp.asarray([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]])
  q = jnp.ones((3, 4, 2, 8), jnp.bfloat16)
  _, seen = cudnn(q, q, q, None, Visibility(ids, ids))
  assert seen["query_seq_lengths"].tolist() == seen["key_value_seq_lengths"].tolist() == [2, 3, 1]


@pytest.mark.parametrize(
  ("keys", "is_nan"),
  [([[1, 1, 0], [0, 0, 0]], False), ([[1, 1, 0], [1, 0, 1]], True), ([[0, 1, 1]], True)],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_padding_before_tokens_gives_nan_with_a_kernel_that_takes_lengths(
  cudnn, keys, is_nan, with_bias
):
  """The check is added to the bias, or to the queries of a decoder without one."""
  keys = jnp.asarray(keys)
  q = jnp.ones((*keys.shape, 2, 8), jnp.bfloat16)
  bias = jnp.zeros((1, 2, 3, 3), jnp.bfloat16) if with_bias else None
  for pair in ((keys, jnp.ones_like(keys)), (jnp.ones_like(keys), keys)):
    output, _ = cudnn(q, q, q, bias, Visibility(*pair, causal=not with_bias))
    assert output.dtype == q.dtype
    assert bool(jnp.all(jnp.isnan(output))) == is_nan
