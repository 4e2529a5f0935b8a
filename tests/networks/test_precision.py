"""fp8 in the network: which matmuls use it, what is trained, and which settings are accepted."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import T5_1_1, Bigram, create_state, make_batch, make_model, params_of

from rosetta_t5.networks.precision import (
  TransformerEngineConfig,
  choose_fp8,
  describe_computation,
  with_fp8,
)
from rosetta_t5.networks.transformer import Transformer
from rosetta_t5.training import train_step

RECIPES = ("current", "delayed")
OVERWRITTEN = "_overwrite_with_gradient"
KEY = jax.random.PRNGKey(0)
BATCH = make_batch()
SHAPES = {name: array.shape for name, array in BATCH.items()}


@functools.cache
def fp8_model(recipe="current", **switches):
  config = dataclasses.replace(T5_1_1, dtype="bfloat16", **switches)
  te_config = TransformerEngineConfig(enabled=1, recipe=recipe, emulate=True)
  return with_fp8(make_model(Transformer(config), z_loss=1e-4), choose_fp8(te_config))


@functools.cache
def start(recipe, microbatches=None):
  """Returns a compiled training step and the initial state."""
  model = fp8_model(recipe) if recipe else make_model(bfloat16(), z_loss=1e-4)
  shapes = jax.eval_shape(lambda key: model.get_initial_variables(key, SHAPES), KEY)
  variables = {"params": params_of(T5_1_1), "params_axes": shapes["params_axes"]}
  if OVERWRITTEN in shapes:
    variables |= {
      OVERWRITTEN: jax.tree_util.tree_map_with_path(_initial_scale, shapes[OVERWRITTEN])
    }
  step = functools.partial(
    train_step,
    loss_fn=model.loss_fn,
    learning_rate_fn=lambda _: jnp.float32(0.03),
    num_microbatches=microbatches,
  )
  return jax.jit(step), create_state(variables)


@functools.cache
def trained(recipe, steps=8, microbatches=None):
  """Returns the losses and the final state of a short training run."""
  step, state = start(recipe, microbatches)
  losses = []
  for _ in range(steps):
    state, metrics = step(state, BATCH, KEY)
    losses.append(float(metrics["loss"].compute()))
  return losses, state


@functools.cache
def evaluation(recipe, **switches):
  """Returns the lowered program of an evaluation step."""
  return jax.jit(fp8_model(recipe, **switches).eval_fn).lower(params_of(T5_1_1), BATCH)


def _initial_scale(path, leaf):
  return jnp.full(leaf.shape, float("scale" in path[-1].key), leaf.dtype)


def bfloat16():
  return Transformer(dataclasses.replace(T5_1_1, dtype="bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [pytest.param("current", marks=pytest.mark.slow), "delayed"])
def test_training_in_fp8_follows_training_in_bfloat16(recipe):
  losses, _ = trained(recipe)
  plain, _ = trained(None)
  assert plain[-1] < 0.7 * plain[0]
  np.testing.assert_allclose(losses, plain, rtol=0.07)
  assert losses != plain


def test_projections_use_fp8_but_logits_and_attention_do_not():
  text = evaluation("current").as_text()
  # Two operands. Encoder: 4 of attention, 3 of the feed-forward block; decoder: 4, 4 and 3.
  assert len(re.findall(r"stablehlo.convert %.*-> tensor<.*f8E4M3FN>", text)) == 2 * 18
  # The others: two matmuls in each of three attentions, two biases, and the logits.
  assert text.count("stablehlo.dot_general") == 18 + 9


@pytest.mark.slow
def test_delayed_scales_are_replaced_in_each_microbatch_and_not_trained():
  _, whole = trained("delayed", steps=1)
  _, parts = trained("delayed", steps=1, microbatches=2)
  for state in (whole, parts):
    assert OVERWRITTEN not in state.params
    assert not any(OVERWRITTEN in str(path) for path, _ in _leaves(state.param_states))
  for path, history in _leaves(whole.flax_mutables):
    if "amax_history" in str(path):
      assert np.count_nonzero(history) == 1
      by_parts = functools.reduce(lambda tree, key: tree[key.key], path, parts.flax_mutables)
      assert np.count_nonzero(by_parts) == 2, "one maximum for each microbatch"
      if "kernel" in str(path):
        np.testing.assert_array_equal(by_parts[:1], history[:1])


def _leaves(tree):
  return jax.tree_util.tree_leaves_with_path(tree)


def test_evaluation_with_delayed_scaling_uses_the_maximum_of_each_array():
  programs = [evaluation(recipe).as_text() for recipe in RECIPES]
  assert programs[0] == programs[1]
  assert "f8E4M3FN" in programs[0]


def test_fp8_does_not_change_the_parameters():
  shapes = jax.eval_shape(lambda key: fp8_model().get_initial_variables(key, SHAPES), KEY)
  plain = jax.eval_shape(lambda key: make_model(bfloat16()).get_initial_variables(key, SHAPES), KEY)
  assert shapes == plain


@pytest.mark.slow
def test_fused_projections_differ_only_by_rounding():
  loss, fused = (
    evaluation("current", **switches).compile()(params_of(T5_1_1), BATCH)[0]
    for switches in ({}, {"fuse_qkv_params": True})
  )
  np.testing.assert_allclose(fused, loss, rtol=5e-3)


def test_hardware_without_fp8_uses_dtype_unless_fp8_is_required():
  choice = choose_fp8(TransformerEngineConfig)  # the class, as gin passes it
  assert choice.matmul is None
  assert re.search("off: a cpu has no fp8 .*; running in T5Config.dtype", choice.text)
  model = make_model()
  assert with_fp8(model, choice) is model
  for asked in ({"enabled": 1}, {"enable_fp8": 1}, {"enabled": True}):
    with pytest.raises(ValueError, match=r"enabled = 1, but a cpu has no fp8 .*ENABLE_FP8=0"):
      choose_fp8(TransformerEngineConfig(**asked))
  for off in (None, TransformerEngineConfig(enabled=0), TransformerEngineConfig(enable_fp8=0)):
    assert choose_fp8(off).text == "off"


@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    ({"enabled": 2}, "TransformerEngineConfig.enabled = 2 must be True or False, or 1 or 0"),
    (
      {"recipe": "delay"},
      r"recipe must be one of 'current', 'delayed', got 'delay' \(did you mean 'delayed'\?\)",
    ),
    ({"backend": "xla"}, "backend must be one of 'auto', 'native', 'te', got 'xla'"),
    ({"fp8_format": "e4m3"}, "fp8_format must be one of 'hybrid', got 'e4m3'"),
    ({"enabled": 1, "enable_fp8": 0}, "enabled = 1 contradicts its other name, enable_fp8 = 0"),
  ],
)
def test_unknown_values_are_refused(arguments, text):
  with pytest.raises(ValueError, match=text):
    TransformerEngineConfig(**arguments)


def test_a_missing_backend_and_a_module_without_fp8_are_refused():
  with pytest.raises(ValueError, match="Engine is not installed: set backend = 'native'"):
    choose_fp8(TransformerEngineConfig(enabled=1, backend="te", emulate=True))
  choice = choose_fp8(TransformerEngineConfig(enabled=1, emulate=True))
  with pytest.raises(
    ValueError, match=r"te_config_cls requests fp8, but Bigram does not support it"
  ):
    with_fp8(make_model(Bigram()), choice)


def test_the_header_describes_the_computation():
  choice = choose_fp8(TransformerEngineConfig(enabled=1, emulate=True))
  text = describe_computation(fp8_model(fuse_qkv_params=True), choice)
  assert text == (
    "bfloat16; fp8 XLA's own matmuls, current scaling (auto: needs no state and no further package, "
    "emulated); attention by xla (auto: another kernel is chosen only on a GPU); fused qkv"
  )
  assert describe_computation(make_model(Bigram()), choice) is None
