"""Scanned T5 in use: decoding, Adafactor, fp8 and the size of compiled programs."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from scalable_trees import PLAIN, scalable, to_scanned, to_unscanned
from tiny_models import create_state, initialize, make_batch, make_model, params_of

from rosetta_t5.networks.config import ScalableT5Config
from rosetta_t5.networks.precision import TransformerEngineConfig, choose_fp8, with_fp8
from rosetta_t5.networks.transformer import Transformer
from rosetta_t5.training.step import accumulate_gradients

UNSCANNED, SCANNED = scalable(scan_layers=False), scalable()
KEY = jax.random.PRNGKey(0)


@functools.cache
def beams(module):
  """Returns the tokens of three beams per example and their scores."""
  params, batch = params_of(PLAIN), make_batch(2, inputs=6, targets=5)
  if isinstance(module.config, ScalableT5Config):
    params = to_unscanned(params)
    params = to_scanned(params) if module.scan_layers else params
  predict = functools.partial(
    make_model(module).predict_batch_with_aux, num_decodes=3, return_all_decodes=True
  )
  tokens, aux = jax.jit(predict)(params, batch)
  return tokens, aux["scores"]


@pytest.mark.slow
@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.slow), True])
def test_beams_equal_those_of_plain_t5(scan):
  tokens, scores = beams(Transformer(PLAIN))
  assert len({tuple(decode) for decode in np.asarray(tokens).reshape(-1, 5)}) > 3
  got_tokens, got_scores = beams(Transformer(scalable(scan_layers=scan)))
  np.testing.assert_array_equal(got_tokens, tokens)
  np.testing.assert_allclose(got_scores, scores, atol=1e-5)


def train_state(config, params):
  shapes = jax.eval_shape(lambda: initialize(Transformer(config), KEY))
  return create_state({"params": params, "params_axes": shapes["params_axes"]})


@pytest.mark.slow
def test_adafactor_treats_each_scanned_layer_as_a_separate_parameter():
  # From 128 on, Adafactor factors matrices whether they are stacked or not.
  wide = dataclasses.replace(PLAIN, emb_dim=128, mlp_dim=256, num_encoder_layers=1)
  plain, grads = params_of(wide), jax.tree.map(np.cos, params_of(wide))
  trees = [to_unscanned(tree, wide) for tree in (plain, grads)]

  step = jax.jit(lambda state, grads: state.apply_gradient(grads, learning_rate=0.01))

  def updated(state, grads):
    for _ in range(2):
      state = step(state, grads)
    return state.params, state.param_states

  apart, _ = updated(train_state(scalable(wide, scan_layers=False), trees[0]), trees[1])
  params, moments = updated(train_state(scalable(wide), to_scanned(trees[0])), to_scanned(trees[1]))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, to_scanned(apart))
  # Adafactor must not average over the 2 layers of 128 rows and 4 heads of size 4.
  query = moments["decoder"]["decoder"]["self_attention"]["query"]["kernel"]
  assert query.v.size == 1
  assert {query.v_row.size, query.v_col.size} == {2 * 128, 2 * 16}
  assert not np.allclose(params["decoder"]["decoder"]["mlp"]["wo"]["kernel"], 0.0)


def program_size(config, layers):
  """Returns the length of the program of a training step's gradients."""
  config = dataclasses.replace(config, num_encoder_layers=layers, num_decoder_layers=layers)
  model = make_model(Transformer(config))
  params = jax.eval_shape(lambda: initialize(model.module, KEY)["params"])
  step = jax.jit(jax.grad(lambda p: model.loss_fn(p, make_batch(), KEY)[0]))
  return len(step.lower(params).as_text())


@pytest.mark.slow
def test_the_program_of_scanned_layers_does_not_grow_with_their_number():
  scanned = [program_size(SCANNED, layers) for layers in (2, 24)]
  assert scanned[1] < 1.02 * scanned[0]
  # Six separate layers already have a longer program.
  assert program_size(UNSCANNED, 6) > 1.5 * scanned[1]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_fp8_scales_each_scanned_layer_by_its_own_maxima(recipe):
  fp8 = choose_fp8(TransformerEngineConfig(enabled=1, recipe=recipe, emulate=True))
  # The two layers that need scales of their own are the encoder's.
  plain = dataclasses.replace(PLAIN, num_decoder_layers=1)
  apart = to_unscanned(params_of(plain), plain)
  # The first layer has large weights; with a shared scale the second's would be rounded to zero.
  apart["encoder"]["layers_0"] = jax.tree.map(lambda w: 64 * w, apart["encoder"]["layers_0"])
  results = [
    one_step(scalable(plain, scan_layers=scan), fp8, to_scanned(apart) if scan else apart)
    for scan in (False, True)
  ]
  (loss, grads, scales), (got_loss, got_grads, got_scales) = results
  np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
  for got, expected in zip(
    jax.tree.leaves(got_grads["encoder"]["encoder"]["mlp"]),
    jax.tree.leaves(to_scanned(grads)["encoder"]["encoder"]["mlp"]),
    strict=True,
  ):
    np.testing.assert_allclose(got, expected, rtol=1e-2, atol=1e-2 * np.abs(expected).max())
  assert bool(scales) is (recipe == "delayed")
  if scales:
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2), got_scales, to_scanned(scales, 0)
    )


def one_step(config, fp8, params):
  """Returns loss and gradients of a batch, and the maxima that scale the next fp8 step."""
  model = with_fp8(make_model(Transformer(config)), fp8)
  variables = jax.eval_shape(lambda: initialize(model.module, KEY))
  zeros = {
    name: jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), collection)
    for name, collection in variables.items()
    if not name.startswith("params")
  }
  state = create_state({**zeros, "params": params, "params_axes": variables["params_axes"]})
  grads, loss, _, mutables = jax.jit(
    lambda state: accumulate_gradients(model.loss_fn, state, make_batch(4), KEY)
  )(state)
  return loss, grads, mutables.get(OVERWRITE_WITH_GRADIENT, {})
