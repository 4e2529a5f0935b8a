"""What a network traces for a GPU computes the same numbers, here on a CPU."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from tiny_models import T5_1_1, assert_close, make_batch, make_model, params_of

from rosetta_t5.networks.gpu_fusion import (
  global_norm,
  square_sums,
  sums_of_squares,
  with_common_factor,
)
from rosetta_t5.networks.transformer import Transformer
from rosetta_t5.training.optimizers.adafactor import Adafactor
from rosetta_t5.training.optimizers.optax_wrapper import chain

GPU = AbstractDevice("NVIDIA H200", num_cores=None, platform="gpu")


@pytest.mark.slow
@pytest.mark.parametrize("length_first", [pytest.param(False, marks=pytest.mark.slow), True])
def test_loss_and_gradients_do_not_depend_on_the_device(length_first):
  config = T5_1_1.replace(transpose_batch_sequence=length_first, dropout_rate=0.1)
  model, params, batch = make_model(Transformer(config)), params_of(config), make_batch(3)
  on_gpu = jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=GPU))
  texts, results = [], []
  for target in (contextlib.nullcontext(), on_gpu):

    def loss(params):
      return model.loss_fn(params, batch, jax.random.PRNGKey(0))[0]

    with target:
      traced = jax.jit(jax.value_and_grad(loss)).trace(params)
    texts.append(str(traced.jaxpr))
    results.append(traced.lower(lowering_platforms=("cpu",)).compile()(params))
  assert texts[0] != texts[1]
  assert_close(results[1], results[0], 1e-5)


def as_on_gpu(fn, *args, devices=1):
  """Returns what a program that is traced for GPUs computes."""
  with jax.sharding.use_abstract_mesh(AbstractMesh((devices,), ("data",), abstract_device=GPU)):
    traced = jax.jit(fn).trace(*args)
  return traced.lower(lowering_platforms=("cpu",)).compile()(*args)


@pytest.mark.parametrize("devices", [1, 6])
def test_sums_of_rows_add_up_to_the_square_of_each_array(devices):
  arrays = [
    np.random.default_rng(0).normal(size=size) for size in ((4, 8), (3,), (4, 8), (), (2, 3, 6))
  ]
  squares = as_on_gpu(square_sums, [jnp.float32(x) for x in arrays], devices=devices)
  np.testing.assert_allclose(squares, [np.square(x).sum() for x in arrays], rtol=1e-6)


@pytest.mark.parametrize("axis", [(), (0,), (1,), (0, 2), (1, 2)])
def test_squares_are_added_up_over_the_given_dimensions(axis):
  arrays = [np.random.default_rng(n).normal(size=(48, 3, 10)) for n in range(2)]
  sums = as_on_gpu(
    functools.partial(sums_of_squares, axis=axis), [jnp.float32(x) for x in arrays], devices=2
  )
  expected = [np.square(x).sum(axis=axis, keepdims=True) for x in arrays]
  np.testing.assert_allclose(sums, expected, rtol=1e-6)


@pytest.mark.parametrize(
  "settings",
  [{}, {"factored": False, "beta1": 0.9}, {"multiply_by_parameter_scale": False}],
  ids=["default", "momentum", "absolute"],
)
def test_adafactor_updates_parameters_of_one_shape_together_as_each_by_itself(settings):
  rng = np.random.default_rng(0)
  shapes = {"a": (256, 144), "b": (256, 144), "c": (144, 256), "d": (144,), "e": (144,), "f": ()}
  params = {name: jnp.float32(rng.normal(size=shape)) for name, shape in shapes.items()}
  grads = {name: jnp.float32(rng.normal(size=shape)) for name, shape in shapes.items()}
  optimizer = Adafactor(learning_rate=0.01, **settings)
  state = optimizer.init_state(params)

  def update(params, state, grads):
    return optimizer.apply_gradient(optimizer.hyper_params, params, state, grads)

  expected = jax.jit(update)(params, state, grads)
  updated = as_on_gpu(update, params, state, grads, devices=2)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), updated, expected
  )


@pytest.mark.parametrize("is_subclass", [True, False])
def test_a_users_rule_for_one_parameter_replaces_that_of_adafactor(is_subclass):
  def keep(step, hyper_params, param, state, grad, path):
    return param, state

  if is_subclass:
    frozen = type("Frozen", (Adafactor,), {"apply_param_gradient": staticmethod(keep)})
    optimizer = frozen(learning_rate=0.01)
  else:
    optimizer = Adafactor(learning_rate=0.01)
    optimizer.apply_param_gradient = keep
  params = {name: jnp.ones((144, 256)) for name in "ab"}

  def update(params):
    state = optimizer.init_state(params)
    return optimizer.apply_gradient(optimizer.hyper_params, params, state, params)[0]

  jax.tree.map(np.testing.assert_array_equal, as_on_gpu(update, params), params)


def make_clip():
  """Returns optax's clip, three gradients, and a function of these: the parameters after a step from zero."""
  rng = np.random.default_rng(0)
  grads = {name: jnp.float32(rng.normal(size=(3, 8))) for name in "abc"}
  clip = optax.clip_by_global_norm(1.0)
  optimizer = chain([clip, optax.sgd(1.0)])
  state = optimizer.init_state(grads)

  def update(grads):
    params = jax.tree.map(jnp.zeros_like, grads)
    return optimizer.apply_gradient(optimizer.hyper_params, params, state, grads)[0]

  return clip, grads, update


@pytest.mark.parametrize("scale", [1e-3, 1e3, 1e18, 1e20, np.inf, np.nan])
def test_gradients_are_clipped_as_optax_clips_them(scale):
  clip, grads, update = make_clip()
  grads["a"] *= scale
  expected = jax.tree.map(jnp.negative, clip.update(grads, clip.init(grads))[0])
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-6), as_on_gpu(update, grads), expected
  )


def test_the_clip_of_optax_is_recognized():
  _, grads, update = make_clip()
  on_cpu = jax.jit(update).trace(grads).jaxpr
  with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=GPU)):
    on_gpu = jax.jit(update).trace(grads).jaxpr
  assert str(on_gpu) != str(on_cpu), (
    "optax.clip_by_global_norm(...).update has another name: change `is_clip` in optax_wrapper.py, or GPUs compute the "
    "norm in more kernels"
  )


def test_the_norm_of_no_arrays_is_zero():
  assert global_norm({}) == as_on_gpu(global_norm, {}) == 0.0


def test_a_common_factor_does_not_change_a_bit():
  grads = {"a": jnp.array([1 / 3, -0.0, jnp.inf]), "b": jnp.array([1 / 3], jnp.bfloat16)}
  same = as_on_gpu(with_common_factor, grads)
  for name, grad in grads.items():
    assert same[name].dtype == grad.dtype
    np.testing.assert_array_equal(np.signbit(same[name]), np.signbit(grad))
    np.testing.assert_array_equal(same[name], grad)


@pytest.mark.slow
def test_a_decoding_loop_for_a_gpu_reads_kernels_that_are_cast_before_it():
  config = T5_1_1.replace(dtype=jnp.bfloat16)
  model, params, batch = make_model(Transformer(config)), params_of(config), make_batch(3)
  with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=GPU)):
    traced = jax.jit(model.predict_batch).trace(params, batch)
  (loop,) = (eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "while")
  kernels = {
    leaf.shape
    for path, leaf in jax.tree_util.tree_leaves_with_path(params["decoder"])
    if "layers" in str(path) and leaf.ndim == 2
  }
  assert kernels <= {each.aval.shape for each in loop.invars if each.aval.dtype == jnp.bfloat16}
  decodes = traced.lower(lowering_platforms=("cpu",)).compile()(params, batch)
  np.testing.assert_array_equal(decodes, jax.jit(model.predict_batch)(params, batch))
