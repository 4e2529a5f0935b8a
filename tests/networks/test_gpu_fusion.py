"""What a network traces for a GPU computes the same numbers, here on a CPU."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from tiny_models import T5_1_1, assert_close, make_batch, make_model, params_of

from rosetta_t5.networks.gpu_fusion import with_common_factor
from rosetta_t5.networks.transformer import Transformer

GPU = AbstractDevice("NVIDIA H200", num_cores=None, platform="gpu")


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


def test_a_common_factor_does_not_change_a_bit():
  grads = {"a": jnp.array([1 / 3, -0.0, jnp.inf]), "b": jnp.array([1 / 3], jnp.bfloat16)}
  with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=GPU)):
    traced = jax.jit(with_common_factor).trace(grads)
  assert str(traced.jaxpr).count("mul") == 2
  same = traced.lower(lowering_platforms=("cpu",)).compile()(grads)
  for name, grad in grads.items():
    assert same[name].dtype == grad.dtype
    np.testing.assert_array_equal(np.signbit(same[name]), np.signbit(grad))
    np.testing.assert_array_equal(same[name], grad)


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
