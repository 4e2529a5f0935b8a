"""The settings of today's families, compared with logits that Transformers has computed.

`transformers_families.py` has the models and records the logits.
"""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers_families import FAMILIES, LLAMA3, RECORDED, VOCAB, draw, tokens

from rosetta_t5.kernels.cross_entropy import chunked_cross_entropy, cross_entropy
from rosetta_t5.networks.config import T5Config, TransformerConfig
from rosetta_t5.networks.transformer import DecoderWrapper, Transformer

SIZES = {"vocab_size": VOCAB, "emb_dim": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2}
SIZES |= {"head_dim": 8, "mlp_dim": 48, "dropout_rate": 0.0, "positions": "rotary"}
SIZES |= {"query_scale": 8**-0.5, "divide_tied_logits": False, "logits_via_embedding": True}
SIZES |= {"mlp_activations": ("silu", "linear")}
GEMMA = {"mlp_activations": ("gelu", "linear"), "norm": "rms_plus_one", "post_norms": True}
GEMMA |= {"embedding_scale": 32**0.5, "query_scale": 12**-0.5, "window": 5}
GEMMA |= {"layer_pattern": ("local", "global")}

CONFIGS = {
  "llama": {"logits_via_embedding": False, "rope_theta": 5e3, "rope_scaling": LLAMA3},
  "qwen2": {"qkv_bias": True, "rope_theta": 1e4},
  "gemma2": GEMMA | {"attention_softcap": 3.0, "logit_softcap": 4.0},
  "gemma3": GEMMA
  | {
    "qk_norm": True,
    "rope_theta": 1e5,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "local_rope_theta": 1e4,
  },
  "cohere": {
    "norm": "layer_without_bias",
    "norm_epsilon": 1e-5,
    "rope_interleaved": True,
    "parallel_blocks": True,
    "logit_scale": 0.25,
  },
}

T5GEMMA = Transformer(
  T5Config(
    **{k: v for k, v in SIZES.items() if k != "num_layers"} | GEMMA,
    num_encoder_layers=2,
    num_decoder_layers=2,
    attention_softcap=3.0,
    logit_softcap=4.0,
    shared_embedding=False,
  )
)

# Our name in a layer → Transformers'.
LAYER = {
  "pre_self_attention_layer_norm/scale": "input_layernorm.weight",
  "pre_mlp_layer_norm/scale": "post_attention_layernorm.weight",
  "self_attention/out/kernel": "self_attn.o_proj.weight",
  "mlp/wi_0/kernel": "mlp.gate_proj.weight",
  "mlp/wi_1/kernel": "mlp.up_proj.weight",
  "mlp/wo/kernel": "mlp.down_proj.weight",
}
LAYER |= {
  f"self_attention/{ours}/{part}": f"self_attn.{ours[0]}_proj.{theirs}"
  for ours in ("query", "key", "value")
  for part, theirs in (("kernel", "weight"), ("bias", "bias"))
}
GEMMA_LAYER = LAYER | {
  "post_self_attention_layer_norm/scale": "post_attention_layernorm.weight",
  "pre_mlp_layer_norm/scale": "pre_feedforward_layernorm.weight",
  "post_mlp_layer_norm/scale": "post_feedforward_layernorm.weight",
  "self_attention/query_norm/scale": "self_attn.q_norm.weight",
  "self_attention/key_norm/scale": "self_attn.k_norm.weight",
}
ENDS = {
  "token_embedder/embedding": "model.embed_tokens.weight",
  "decoder_norm/scale": "model.norm.weight",
  "logits_dense/kernel": "lm_head.weight",
}


# Gemma's names in T5Gemma.
T5GEMMA_LAYER = {
  ours: theirs.replace("input_layernorm", "pre_self_attn_layernorm").replace(
    "post_attention_layernorm", "post_self_attn_layernorm"
  )
  for ours, theirs in GEMMA_LAYER.items()
}
T5GEMMA_LAYER |= {
  ours.replace("self_attention", "attention"): theirs for ours, theirs in T5GEMMA_LAYER.items()
}
T5GEMMA_LAYER |= {
  f"encoder_decoder_attention/{name}/kernel": f"cross_attn.{name[0]}_proj.weight"
  for name in ("query", "key", "value", "out")
}
T5GEMMA_LAYER |= {
  f"{when}_cross_attention_layer_norm/scale": f"{when}_cross_attn_layernorm.weight"
  for when in ("pre", "post")
}


def config_of(family, **changes):
  return TransformerConfig(**{**SIZES, **CONFIGS[family], **changes})


def their_name(family, path):
  ours = "/".join(path[1:])
  if family == "t5gemma":
    stack = f"model.{path[0]}"
    if not ours.startswith("layers_"):
      return f"{stack}.{'norm' if 'norm' in ours else 'embed_tokens'}.weight"
    layer, name = ours.removeprefix("layers_").split("/", 1)
    return f"{stack}.layers.{layer}.{T5GEMMA_LAYER[name]}"
  if ours in ENDS:
    return ENDS[ours]
  layer, name = ours.removeprefix("layers_").split("/", 1)
  names = GEMMA_LAYER if family.startswith("gemma") else LAYER
  return f"model.layers.{layer}.{names[name]}"


def params_of(family):
  module = T5GEMMA if family == "t5gemma" else DecoderWrapper(config_of(family))
  ids = [jnp.ones((1, 2), jnp.int32)] * (3 if family == "t5gemma" else 2)
  shapes = jax.eval_shape(module.init, jax.random.PRNGKey(0), *ids)["params"]

  def weights(path, leaf):
    keys = [key.key for key in path]
    is_kernel = keys[-1] == "kernel"
    drawn = draw(their_name(family, keys), leaf.shape[::-1] if is_kernel else leaf.shape)
    return jnp.asarray(drawn.T if is_kernel else drawn)

  return jax.tree_util.tree_map_with_path(weights, shapes)


def logits_of(config, params, **options):
  targets = jnp.asarray(tokens(), jnp.int32)
  module = DecoderWrapper(config)
  run = jax.jit(
    lambda p: module.apply({"params": p}, targets, targets, enable_dropout=False, **options)
  )
  return run(params)


# The other families have few settings that these two have not.
QUICK = ("llama", "gemma3")


def marks(family):
  return [pytest.mark.slow] * (family not in QUICK)


@pytest.mark.parametrize(
  ("kernel", "family"),
  [
    *(pytest.param("xla", family, marks=marks(family)) for family in FAMILIES),
    *(pytest.param("flash", family, marks=pytest.mark.slow) for family in FAMILIES),
  ],
)
def test_logits_equal_those_of_transformers(family, kernel):
  recorded = json.loads(RECORDED.read_text())["every third position and fifth logit"][family]
  found = logits_of(config_of(family, attention_kernel=kernel), params_of(family))
  np.testing.assert_allclose(found[:, ::3, ::5], recorded, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"attention_kernel": "flash", "fuse_qkv_params": True}])
def test_logits_of_an_encoder_decoder_equal_those_of_transformers(changes):
  recorded = json.loads(RECORDED.read_text())["every third position and fifth logit"]["t5gemma"]
  inputs, targets = (jnp.asarray(x, jnp.int32) for x in (tokens(), tokens()[:, ::-1]))
  module = Transformer(T5GEMMA.config.replace(**changes))
  run = jax.jit(
    lambda p: module.apply({"params": p}, inputs, targets, targets, enable_dropout=False)
  )
  np.testing.assert_allclose(run(params_of("t5gemma"))[:, ::3, ::5], recorded, atol=2e-4)


@pytest.mark.slow
def test_an_encoder_decoder_with_rotary_positions_decodes_what_it_predicts():
  params = params_of("t5gemma")
  inputs, targets = (jnp.asarray(x, jnp.int32) for x in (tokens(), tokens()[:, ::-1]))
  length = targets.shape[1]
  apply = functools.partial(T5GEMMA.apply, enable_dropout=False)

  def run(params):
    whole = apply({"params": params}, inputs, targets, targets)
    ones = jnp.ones_like(targets)
    _, cache = apply({"params": params}, inputs, ones, ones, decode=True, mutable=["cache"])
    encoded = apply({"params": params}, inputs, method=T5GEMMA.encode)

    def step(cache, token_B):
      variables, token = {"params": params, **cache}, token_B[:, None]
      options = {"decode": True, "max_decode_length": length, "mutable": ["cache"]}
      logits, cache = apply(
        variables, encoded, inputs, token, token, method=T5GEMMA.decode, **options
      )
      return cache, logits[:, 0]

    return whole, jax.lax.scan(step, cache, targets.T)[1].swapaxes(0, 1)

  whole, found = jax.jit(run)(params)
  np.testing.assert_allclose(found, whole, atol=1e-4)


@pytest.mark.parametrize(
  "family", [pytest.param(x, marks=[pytest.mark.slow] * (x != "gemma3")) for x in FAMILIES]
)
def test_decoding_after_prompts_of_different_lengths_gives_the_logits_of_teacher_forcing(family):
  config, params = config_of(family), params_of(family)
  whole = logits_of(config, params)
  ids, lengths = jnp.asarray(tokens(), jnp.int32), jnp.array([3, 9])
  length = ids.shape[1]

  def run(params):
    module = DecoderWrapper(config)

    def apply(cache, *arguments, **options):
      variables = {"params": params, **cache}
      return module.apply(variables, *arguments, enable_dropout=False, mutable=["cache"], **options)

    _, cache = apply({}, jnp.ones_like(ids), jnp.ones_like(ids), decode=True)
    prompts = jnp.where(jnp.arange(length)[None] < lengths[:, None], ids, 0)
    _, cache = apply(cache, prompts, prompts, prefill=True, prefill_lengths=lengths)

    def step(cache, offset):
      token = jnp.take_along_axis(ids, (lengths + offset)[:, None], axis=1)
      logits, cache = apply(cache, token, token, decode=True, max_decode_length=length)
      return cache, logits[:, 0]

    return jax.lax.scan(step, cache, jnp.arange(5))[1]

  found = jax.jit(run)(params)
  for row, start in enumerate(lengths):
    np.testing.assert_allclose(found[:, row], whole[row, start : start + 5], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("window", [5, 20])
def test_the_cache_of_a_local_layer_is_as_long_as_its_window(window):
  module = DecoderWrapper(config_of("gemma3", window=window))
  ids = jnp.ones((2, 14), jnp.int32)
  options = {"decode": True, "enable_dropout": False, "mutable": ["cache"]}
  cache = jax.eval_shape(
    lambda params: module.apply({"params": params}, ids, ids, **options)[1]["cache"],
    params_of("gemma3"),
  )["decoder"]
  lengths = [cache[f"layers_{n}"]["self_attention"]["cached_value"].shape[2] for n in range(4)]
  assert lengths == [min(window, 14), 14] * 2


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"scan_layers": True}, {"fuse_qkv_params": True}])
def test_layers_of_several_kinds_can_be_scanned_and_kernels_stacked(changes):
  config, params = config_of("gemma3"), params_of("gemma3")
  expected = logits_of(config, params)
  if changes.get("scan_layers"):
    inner = dict(params["decoder"])
    layers = [inner.pop(f"layers_{n}") for n in range(4)]
    periods = [{"layers_0": layers[n], "layers_1": layers[n + 1]} for n in (0, 2)]
    inner["decoder"] = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *periods)
    params = {"decoder": inner}
  found = logits_of(config_of("gemma3", **changes), params)
  np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.slow
def test_a_loss_in_chunks_has_the_soft_cap_and_its_gradient():
  config, params = config_of("gemma2"), params_of("gemma2")
  targets = jnp.asarray(tokens(), jnp.int32)

  def losses(params):
    return cross_entropy(logits_of(config, params), targets)[0].sum()

  def chunked(params):
    factors = logits_of(config, params, return_logits=False)
    return chunked_cross_entropy(factors, targets, 0.0, 0.0, 4).loss_BT.sum()

  want, got = (jax.jit(jax.value_and_grad(f))(params) for f in (losses, chunked))
  np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
  for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-3 * float(jnp.abs(b).max()))
