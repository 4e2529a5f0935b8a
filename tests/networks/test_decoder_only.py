"""The decoder-only network: T5X's parameter tree, packing, prefixes and prefilled caches."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import DECODER_ONLY, decoder_only_params

from rosetta_t5.networks.transformer import DecoderWrapper, TransformerConfig

TOKENS = np.random.default_rng(0).integers(2, 32, (3, 8)).astype(np.int32)
INPUTS = np.pad(TOKENS, ((0, 0), (1, 0)))[:, :-1]


@functools.cache
def _apply(names: tuple[str, ...] = (), tied: bool = False):
  def run(params, inputs, targets, *more):
    features = dict(zip(names, more, strict=True))
    module = DecoderWrapper(DECODER_ONLY.replace(logits_via_embedding=tied))
    return module.apply({"params": params}, inputs, targets, enable_dropout=False, **features)

  return jax.jit(run)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_have_the_names_and_shapes_of_t5x(tied):
  params = decoder_only_params(DECODER_ONLY.replace(logits_via_embedding=tied))
  paths = jax.tree_util.tree_leaves_with_path(params)
  shapes = {jax.tree_util.keystr(p, simple=True, separator="/"): x.shape for p, x in paths}
  layer = {
    "mlp/wi_0/kernel": (16, 24),
    "mlp/wi_1/kernel": (16, 24),
    "mlp/wo/kernel": (24, 16),
    "pre_mlp_layer_norm/scale": (16,),
    "pre_self_attention_layer_norm/scale": (16,),
  } | {f"self_attention/{name}/kernel": (16, 16) for name in ("query", "key", "value", "out")}
  expected = {
    "decoder_norm/scale": (16,),
    "relpos_bias/rel_embedding": (4, 32),
    "token_embedder/embedding": (32, 16),
  } | {f"layers_{n}/{name}": shape for n in range(2) for name, shape in layer.items()}
  if not tied:
    expected["logits_dense/kernel"] = (16, 32)
  assert shapes == {f"decoder/{name}": shape for name, shape in expected.items()}


@pytest.mark.slow
def test_tied_logits_are_dot_products_with_the_embedding_divided_by_the_root_of_the_width():
  params = decoder_only_params(DECODER_ONLY)
  table = params["decoder"]["token_embedder"]["embedding"]
  tied = decoder_only_params(DECODER_ONLY.replace(logits_via_embedding=True))
  tied = jax.tree.map(lambda _, value: value, tied, _without_logits(params))
  as_kernel = {"decoder": params["decoder"] | {"logits_dense": {"kernel": table.T / 4}}}
  np.testing.assert_allclose(
    _apply(tied=True)(tied, INPUTS, TOKENS), _apply()(as_kernel, INPUTS, TOKENS), atol=1e-5
  )


def _without_logits(params):
  return {"decoder": {n: v for n, v in params["decoder"].items() if n != "logits_dense"}}


@pytest.mark.slow
def test_attention_is_causal_except_within_a_prefix():
  params = decoder_only_params(DECODER_ONLY)
  changed = INPUTS.copy()
  changed[:, 3] = (changed[:, 3] + 1) % 30 + 2
  prefix = np.broadcast_to(np.arange(8) < 5, (3, 8)).astype(np.int32)

  def has_changed(*more, names=()):
    difference = _apply(names)(params, changed, TOKENS, *more) - _apply(names)(
      params, INPUTS, TOKENS, *more
    )
    return np.abs(difference).max((0, 2)) > 1e-6

  assert has_changed().tolist() == [False] * 3 + [True] * 5
  assert has_changed(prefix, names=("decoder_causal_attention",)).tolist() == [True] * 8


def test_packed_examples_do_not_see_each_other():
  params = decoder_only_params(DECODER_ONLY)
  segments = np.array([[1, 1, 1, 2, 2, 2, 2, 0]] * 3, np.int32)
  targets = np.where(segments > 0, TOKENS, 0)
  inputs = np.where(np.isin(np.arange(8), (0, 3, 7)), 0, INPUTS)
  packed = _apply(("decoder_segment_ids",))(params, inputs, targets, segments)
  for start, end in ((0, 3), (3, 7)):
    alone = [np.zeros((3, 8), np.int32) for _ in range(2)]
    for row, values in zip(alone, (inputs, targets), strict=True):
      row[:, : end - start] = values[:, start:end]
    expected = _apply()(params, *alone)[:, : end - start]
    np.testing.assert_allclose(packed[:, start:end], expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("prompt_length", "is_prefix"),
  [
    (5, True),
    (8, False),
    pytest.param(5, False, marks=pytest.mark.slow),
    pytest.param(8, True, marks=pytest.mark.slow),
  ],
)
def test_decoding_after_prompts_of_different_lengths_gives_the_logits_of_teacher_forcing(
  prompt_length, is_prefix
):
  """The array of prompts may be shorter than the cache."""
  module, params = DecoderWrapper(DECODER_ONLY), decoder_only_params(DECODER_ONLY)
  lengths = np.array([1, 4, 2])
  prefix = jnp.asarray(np.arange(8) <= lengths[:, None], jnp.int32)
  names = ("decoder_causal_attention",) if is_prefix else ()
  features = dict.fromkeys(names, prefix[:, :prompt_length])
  expected = _apply(names)(params, INPUTS, TOKENS, *[prefix for _ in names])
  apply = functools.partial(module.apply, enable_dropout=False, mutable=["cache"])

  @jax.jit
  def fill():
    ones = jnp.ones((3, 8), jnp.int32)
    _, made = apply({"params": params}, ones, ones, decode=True)
    prompts = jnp.asarray((INPUTS * prefix)[:, :prompt_length])
    targets = jnp.asarray(prefix[:, :prompt_length])
    more = {"prefill": True, "prefill_lengths": jnp.asarray(lengths)}
    return apply({"params": params, **made}, prompts, targets, **features, **more)[1]["cache"]

  @jax.jit
  def step(cache, tokens):
    variables = {"params": params, "cache": cache}
    return apply(variables, tokens, tokens, decode=True, max_decode_length=8)

  cache = fill()
  for offset in range(4):
    at = (np.arange(3), lengths + offset)
    logits, changed = step(cache, jnp.asarray(INPUTS[at][:, None]))
    cache = changed["cache"]
    np.testing.assert_allclose(logits[:, 0], expected[at], atol=1e-5)


def test_unsupported_settings_and_arguments_are_refused():
  with pytest.raises(ValueError, match=r"TransformerConfig\.dtype = 'float16' overflows"):
    TransformerConfig(vocab_size=32, dtype="float16")
  with pytest.raises(ValueError, match=re.escape("got 'ful' (did you mean 'full'?)")):
    TransformerConfig(vocab_size=32, remat_policy="ful")
  run = functools.partial(DecoderWrapper(DECODER_ONLY).apply, enable_dropout=False, mutable=True)
  variables = {"params": decoder_only_params(DECODER_ONLY)}
  with pytest.raises(ValueError, match="prefill and decode cannot both be True: first fill"):
    run(variables, jnp.asarray(INPUTS), jnp.asarray(TOKENS), prefill=True, decode=True)
