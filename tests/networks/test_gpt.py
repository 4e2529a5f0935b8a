"""GPT's settings of the decoder-only network: positions, norm, biases, windows, scanned layers."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import GPT, decoder_only_params, stacked

from rosetta_t5.networks.layers.positions import apply_rotary
from rosetta_t5.networks.transformer import DecoderWrapper, TransformerConfig

ROTARY = GPT.replace(positions="rotary", mlp_activations=("gelu", "linear"))
TOKENS = np.random.default_rng(0).integers(2, 32, (3, 8)).astype(np.int32)
INPUTS = np.pad(TOKENS, ((0, 0), (1, 0)))[:, :-1]


@functools.cache
def logits_of(config):
  def run(params, inputs, targets, **features):
    module = DecoderWrapper(config)
    return module.apply({"params": params}, inputs, targets, enable_dropout=False, **features)

  return jax.jit(run)


def decoded_logits(config, params, lengths):
  """Returns the logits [B, T, V] of decoding position by position after prompts of `lengths`."""
  module = DecoderWrapper(config)
  apply = functools.partial(module.apply, enable_dropout=False, mutable=["cache"])

  @jax.jit
  def run(params, tokens, lengths):
    ones = jnp.ones_like(tokens)
    _, made = apply({"params": params}, ones, ones, decode=True)
    prompt = jnp.where(jnp.arange(8)[None] < lengths[:, None], tokens, 0)
    real = (jnp.arange(8)[None] <= lengths[:, None]).astype(jnp.int32)
    variables = {"params": params, **made}
    _, filled = apply(variables, prompt, real, prefill=True, prefill_lengths=lengths)

    def step(cache, offset):
      position = jnp.minimum(lengths + offset, 7)
      token = jnp.take_along_axis(tokens, position[:, None], axis=1)
      logits, new = apply(
        {"params": params, **cache}, token, token, decode=True, max_decode_length=8
      )
      return new, logits[:, 0]

    return jax.lax.scan(step, filled, jnp.arange(8))[1]

  return np.asarray(run(params, INPUTS, jnp.asarray(lengths)))


@pytest.mark.one_quick_variant
@pytest.mark.parametrize(
  "config",
  [
    GPT,
    ROTARY.replace(window=3, layer_pattern=("global", "local")),
    ROTARY.replace(scan_layers=True),
  ],
  ids=["learned", "rotary-local", "rotary-scan"],
)
def test_decoding_after_prompts_of_different_lengths_gives_the_logits_of_teacher_forcing(config):
  loop = config.replace(scan_layers=False)
  params = decoder_only_params(loop)
  expected = logits_of(loop)(params, INPUTS, TOKENS)
  lengths = np.array([1, 4, 6])
  found = decoded_logits(config, stacked(params) if config.scan_layers else params, lengths)
  for row, length in enumerate(lengths):
    np.testing.assert_allclose(
      found[: 8 - length, row], expected[row, length:], rtol=1e-4, atol=1e-5
    )


def test_scanned_layers_equal_a_loop_over_layers():
  params = decoder_only_params(GPT)
  scanned = logits_of(GPT.replace(scan_layers=True, remat_policy="minimal", fuse_qkv_params=True))
  np.testing.assert_allclose(
    scanned(stacked(params), INPUTS, TOKENS), logits_of(GPT)(params, INPUTS, TOKENS), atol=1e-5
  )
  shapes = jax.tree.map(jnp.shape, decoder_only_params(GPT.replace(scan_layers=True)))
  assert shapes == jax.tree.map(jnp.shape, stacked(params))


@pytest.mark.slow
@pytest.mark.parametrize("config", [GPT, ROTARY], ids=["learned", "rotary"])
def test_positions_of_packed_examples_start_from_0(config):
  params = decoder_only_params(config)
  alone = logits_of(config)(params, INPUTS[:2, :4], TOKENS[:2, :4])
  packed = logits_of(config)(
    params,
    INPUTS[:2, :4].reshape(1, 8),
    TOKENS[:2, :4].reshape(1, 8),
    decoder_segment_ids=np.repeat([[1, 2]], 4, axis=1),
    decoder_positions=np.tile(np.arange(4), 2)[None],
  )
  np.testing.assert_allclose(packed.reshape(2, 4, -1), alone, rtol=1e-4, atol=1e-5)


def test_rotary_embeddings_rotate_pairs_and_depend_only_on_distances():
  rng = np.random.default_rng(1)
  q, k = rng.normal(size=(2, 1, 5, 1, 6)).astype(np.float32)
  positions = np.array([[0, 3, 4, 700, 9]])
  pairs = (q[..., :3] + 1j * q[..., 3:]) * np.exp(
    1j * positions[0][:, None, None] / 10_000 ** (np.arange(3) / 3)
  )
  found = np.asarray(apply_rotary(jnp.asarray(q), jnp.asarray(positions)))
  np.testing.assert_allclose(found, np.concatenate([pairs.real, pairs.imag], -1), atol=1e-4)

  def logits(shift):
    rotated = (apply_rotary(jnp.asarray(x), jnp.asarray(positions + shift)) for x in (q, k))
    return np.einsum("bthk,bshk->bts", *rotated)

  np.testing.assert_allclose(logits(0), logits(100), atol=1e-3)


@pytest.mark.slow
def test_padding_never_follows_gives_padding_probability_0():
  params = decoder_only_params(GPT)
  plain = logits_of(GPT)(params, INPUTS, TOKENS)
  without = logits_of(GPT.replace(padding_never_follows=True))(params, INPUTS, TOKENS)
  np.testing.assert_array_equal(without[..., 1:], plain[..., 1:])
  assert np.all(jax.nn.softmax(without)[..., 0] == 0)


def test_sequences_longer_than_the_learned_positions_are_refused():
  tokens = np.ones((1, 9), np.int32)
  text = r"TransformerConfig.max_length must be at least the length of the sequences, 9, got 8"
  with pytest.raises(ValueError, match=text):
    logits_of(GPT)(decoder_only_params(GPT), tokens, tokens)


@pytest.mark.parametrize(
  ("wrong", "text"),
  [
    (
      {"positions": "rotatory"},
      "positions must be one of 'relative', 'learned', 'rotary', got 'rotatory' (did you mean 'rotary'?)",
    ),
    (
      {"norm": "batch"},
      "norm must be one of 'rms', 'rms_plus_one', 'layer', 'layer_without_bias', got",
    ),
    (
      {"positions": "rotary", "head_dim": 3},
      "head_dim must be even for positions = 'rotary', which rotates pairs of features, got 3",
    ),
    ({"window": 4}, "window = 4 and layer_pattern = ('global',) contradict each other"),
    (
      {"layer_pattern": ("local", "globl")},
      "layer_pattern must be one of 'global', 'local', got 'globl'",
    ),
    ({"num_kv_heads": 3}, "num_kv_heads = 3 must divide num_heads = 8"),
    (
      {"local_rope_theta": 1e4},
      "local_rope_theta = 10000.0 needs positions = 'rotary' and local layers",
    ),
    ({"merged_attention": True}, "merged_attention = True has no relative bias to encoded inputs"),
    ({"global_block_size": 4}, "global_block_size = 4 needs an encoder"),
    ({"param_scan_axis": 2}, "param_scan_axis must be 0 or 1, got 2"),
    ({"scale_queries": True, "scale_attn_logits": True}, "would both divide by √head_dim"),
  ],
)
def test_contradictory_configs_are_refused(wrong, text):
  with pytest.raises(ValueError, match=re.escape(text)):
    TransformerConfig(vocab_size=32, **wrong)
