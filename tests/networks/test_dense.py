"""Projections and feed-forward blocks."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rosetta_t5.networks.layers.decoding_cache import PRECOMPUTED
from rosetta_t5.networks.layers.dense import DenseGeneral, MlpBlock, activation_function

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4, 5)), jnp.float32)


@pytest.mark.parametrize(("features", "axis"), [(7, -1), ((2, 3), -1), (7, (-2, -1)), ((2, 3), 3)])
def test_kernel_joins_the_dimensions_of_each_side(features, axis):
  module = DenseGeneral(features, axis=axis, kernel_axes=("embed", "mlp"))
  variables = module.init(jax.random.PRNGKey(0), X)
  kernel = variables["params"]["kernel"]
  assert kernel.shape == (20 if axis == (-2, -1) else 5, int(np.prod(features)))
  assert variables["params_axes"]["kernel_axes"].names == ("embed", "mlp")
  kept = X.shape[:2] if axis == (-2, -1) else X.shape[:3]
  expected = np.asarray(X).reshape(*kept, -1) @ np.asarray(kernel)
  got = module.apply({"params": variables["params"]}, X)
  np.testing.assert_allclose(got, expected.reshape(*kept, *np.ravel(features)), atol=1e-5)


def test_only_the_last_dimensions_can_be_contracted():
  with pytest.raises(ValueError, match=r"last dimensions of \(2, 3, 4, 5\), got \(0, -1\)"):
    DenseGeneral(7, axis=(0, -1)).init(jax.random.PRNGKey(0), X)


def test_the_matmul_uses_dtype_and_the_kernel_is_float32():
  module = DenseGeneral(7, dtype=jnp.bfloat16)
  variables = module.init(jax.random.PRNGKey(0), X)
  assert variables["params"]["kernel"].dtype == jnp.float32
  assert module.apply(variables, X).dtype == jnp.bfloat16


def block(params, **arguments):
  module = MlpBlock(intermediate_dim=6, intermediate_dropout_rate=0.0, **arguments)
  return module.apply(
    {"params": {name: {"kernel": kernel} for name, kernel in params.items()}}, X[0]
  )


def test_two_activations_are_multiplied_and_one_has_the_kernel_wi():
  rng = np.random.default_rng(1)
  a, b = (jnp.asarray(rng.normal(size=(5, 6)), jnp.float32) for _ in range(2))
  out = jnp.asarray(rng.normal(size=(6, 5)), jnp.float32)
  gated = block({"wi_0": a, "wi_1": b, "wo": out}, activations=("gelu", "linear"))
  np.testing.assert_allclose(gated, (nn.gelu(X[0] @ a) * (X[0] @ b)) @ out, atol=1e-5)
  plain = block({"wi": a, "wo": out}, activations=("relu",))
  np.testing.assert_allclose(plain, np.maximum(X[0] @ a, 0) @ out, atol=1e-5)


def test_dropout_drops_the_same_hidden_features_at_every_position():
  module = MlpBlock(intermediate_dim=16, activations=("linear",), intermediate_dropout_rate=0.5)
  eye = {"params": {"wi": {"kernel": jnp.eye(16)}, "wo": {"kernel": jnp.eye(16)}}}
  output = module.apply(eye, jnp.ones((3, 4, 16)), rngs={"dropout": jax.random.PRNGKey(0)})
  np.testing.assert_array_equal(output, jnp.broadcast_to(output[:, :1], output.shape))
  assert set(np.unique(output)) == {0.0, 2.0}
  assert len(np.unique(output[:, 0], axis=0)) == 3, "every example has its own dropped features"


def test_an_unknown_activation_is_refused_with_known_ones():
  text = (
    "T5Config.mlp_activations names 'gleu', which flax.linen does not have: use 'linear', 'gelu'"
  )
  with pytest.raises(ValueError, match=text):
    activation_function("gleu")


def test_an_activation_may_be_a_function():
  assert activation_function(jnp.tanh) is jnp.tanh


def test_a_precomputed_kernel_replaces_the_parameter():
  module = DenseGeneral((2, 3), axis=(-2, -1))
  params = module.init(jax.random.PRNGKey(0), X)["params"]
  expected, kept = module.apply({"params": params}, X, mutable=[PRECOMPUTED])
  np.testing.assert_array_equal(kept[PRECOMPUTED]["kernel"], params["kernel"].T)
  np.testing.assert_allclose(module.apply({"params": params} | kept, X), expected, atol=1e-6)
  doubled = jax.tree.map(lambda x: 2 * x, kept)
  np.testing.assert_allclose(module.apply({"params": params} | doubled, X), 2 * expected, atol=1e-5)
