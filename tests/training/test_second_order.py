"""SOAP, Shampoo, K-FAC and Sophia against their papers' formulas, computed in numpy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from tiny_models import DECODER_ONLY, decoder_only_variables, make_batch, make_decoder_only_model

from rosetta_t5.adapters import LoRA
from rosetta_t5.adapters.adapter import AdapterOptimizer
from rosetta_t5.networks.layers.dense import DenseGeneral
from rosetta_t5.networks.layers.matmuls import KFAC_FACTORS
from rosetta_t5.training import TrainState
from rosetta_t5.training.optimizers import optax_wrapper as optimizers
from rosetta_t5.training.optimizers.matrices import shampoo, soap
from rosetta_t5.training.optimizers.optimizer_def import StepLoss
from rosetta_t5.training.optimizers.transformations import hessian_diagonal, precondition_by_kfac
from rosetta_t5.training.step import train_step

RNG = np.random.default_rng(0)
# A matrix, two scanned matrices and a vector.
SHAPES = {"kernel": (4, 3), "scanned": (4, 2, 3), "scale": (4,)}
AXES = {"kernel": P("embed", "mlp"), "scanned": P("embed", "layers", "mlp"), "scale": P("embed")}
STEPS = 5
GRADS = [{n: RNG.normal(size=s) for n, s in SHAPES.items()} for _ in range(STEPS)]


def updates(make, **options):
  """Returns the sum of the updates of all steps, for the learning rate 1 without weight decay."""
  definition = optimizers.chain(
    [lambda learning_rate, param_axes: make(learning_rate, param_axes, weight_decay=0, **options)]
  )
  definition.set_param_axes(AXES)
  optimizer = definition.create({name: jnp.zeros(shape) for name, shape in SHAPES.items()})
  for grads in GRADS:
    grads = jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), grads)
    optimizer = optimizer.apply_gradient(grads, learning_rate=1.0)
  return optimizer.target


def matrix_grads(name):
  """Returns the gradients of one matrix in all steps; `scanned` is that of the second layer."""
  return [g[name][:, 1] if name == "scanned" else g[name] for g in GRADS]


def assert_matches(after, want):
  """Compares the parameters with want(the gradients of one matrix)."""
  for name in ("kernel", "scanned"):
    found = after[name][:, 1] if name == "scanned" else after[name]
    np.testing.assert_allclose(found, want(matrix_grads(name)), rtol=2e-3, atol=2e-3)


def numpy_adam(grads, b1, b2):
  mu = nu = total = 0.0
  for step, g in enumerate(grads, 1):
    mu, nu = b1 * mu + (1 - b1) * g, b2 * nu + (1 - b2) * g * g
    total = total - (mu / (1 - b1**step)) / np.sqrt(nu / (1 - b2**step))
  return total


def numpy_soap(grads, b=0.95, frequency=2, one_sided=False):
  """Algorithm 3 of the paper; the first step only initializes the bases."""
  left, right = (1 - b) * grads[0] @ grads[0].T, (1 - b) * grads[0].T @ grads[0]
  q_left, q_right = np.linalg.eigh(left)[1], np.linalg.eigh(right)[1]
  if one_sided:
    q_left = np.eye(len(left))
  mu = nu = total = 0.0
  for step, g in enumerate(grads[1:], 1):
    rotated = q_left.T @ g @ q_right
    mu, nu = b * mu + (1 - b) * g, b * nu + (1 - b) * rotated**2
    corrected = (q_left.T @ mu @ q_right) / (1 - b**step)
    total = total - q_left @ (corrected / np.sqrt(nu / (1 - b**step))) @ q_right.T
    left, right = b * left + (1 - b) * g @ g.T, b * right + (1 - b) * g.T @ g
    if step % frequency == 0:
      q_right = np.linalg.qr(right @ q_right)[0]
      q_left = q_left if one_sided else np.linalg.qr(left @ q_left)[0]
  return total


def numpy_shampoo(grads, b1=0.9, b2=0.99, eps=1e-3, frequency=2, one_sided=False):
  def root(covariance, exponent):
    values, vectors = np.linalg.eigh(covariance)
    damped = np.maximum(values, 0) + eps * values[-1]
    return vectors @ np.diag(damped**exponent) @ vectors.T

  left = right = mu = nu = total = 0.0
  for step, g in enumerate(grads, 1):
    left, right = b2 * left + (1 - b2) * g @ g.T, b2 * right + (1 - b2) * g.T @ g
    if (step - 1) % frequency == 0:
      exponent = -0.5 if one_sided else -0.25
      root_left = np.eye(len(left)) if one_sided else root(left, exponent)
      root_right = root(right, exponent)
    mu, nu = b1 * mu + (1 - b1) * g, b2 * nu + (1 - b2) * g * g
    adam = (mu / (1 - b1**step)) / np.sqrt(nu / (1 - b2**step))
    direction = root_left @ mu @ root_right
    total = total - direction * np.linalg.norm(adam) / np.linalg.norm(direction)
  return total


@pytest.mark.slow
def test_soap_is_adam_in_the_eigenbasis_of_the_covariances():
  assert_matches(updates(soap, precondition_frequency=2), numpy_soap)


@pytest.mark.slow
def test_soap_leaves_a_side_that_is_too_large_as_it_is():
  after = updates(soap, precondition_frequency=2, max_precond_dim=3)
  assert_matches(after, lambda grads: numpy_soap(grads, one_sided=True))


@pytest.mark.slow
def test_soap_is_adam_for_vectors_after_the_first_step():
  want = numpy_adam([g["scale"] for g in GRADS[1:]], 0.95, 0.95)
  np.testing.assert_allclose(updates(soap)["scale"], want, rtol=1e-4)


@pytest.mark.slow
def test_shampoo_multiplies_by_inverse_roots_and_has_the_norm_of_adam():
  assert_matches(updates(shampoo, matrix_eps=1e-3, precondition_frequency=2), numpy_shampoo)


def test_shampoo_with_one_side_uses_the_inverse_square_root():
  after = updates(shampoo, matrix_eps=1e-3, precondition_frequency=2, max_precond_dim=3)
  assert_matches(after, lambda grads: numpy_shampoo(grads, one_sided=True))


def test_shampoo_is_adam_for_vectors():
  want = numpy_adam([g["scale"] for g in GRADS], 0.9, 0.99)
  np.testing.assert_allclose(updates(shampoo)["scale"], want, rtol=1e-4)


def test_factors_are_split_over_the_axes_of_their_parameter():
  for make in (soap, shampoo):
    definition = optimizers.chain([make])
    definition.set_param_axes(AXES)
    optimizer = definition.create({name: jnp.zeros(shape) for name, shape in SHAPES.items()})
    (state,) = (s[0] for s in definition.derive_logical_axes(optimizer, AXES).state.param_states)
    for name, stack in (("kernel", ()), ("scanned", ("layers",))):
      assert state.covariances[name].rows == P(*stack, "embed", "mlp")
      assert state.covariances[name].columns == P(*stack, "mlp", "embed")
    assert state.mu == state.nu == AXES


def squared_error(layer, params, target):
  """Returns zeros → the error of a dense layer whose factors are their gradients."""

  def loss(zeros, x):
    y = layer.apply({"params": params, KFAC_FACTORS: zeros}, x)
    return jnp.sum((y - target) ** 2)

  return loss


@pytest.mark.slow
@pytest.mark.parametrize("divisor", [None, 2.0])
def test_factors_are_the_means_over_rows_of_inputs_and_output_gradients(divisor):
  x, target = RNG.normal(size=(2, 5, 4)), RNG.normal(size=(2, 5, 3))
  layer = DenseGeneral(3, kernel_divisor=None if divisor is None else jnp.float32(divisor))
  params = {"kernel": jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32)}
  loss = squared_error(layer, params, jnp.asarray(target, jnp.float32))
  zeros = {"rows": jnp.zeros((4, 4)), "columns": jnp.zeros((3, 3))}
  factors = jax.grad(loss)(zeros, jnp.asarray(x, jnp.float32))
  rows, scale = x.reshape(10, 4), divisor or 1.0
  # The derivatives by the product of the row and the stored kernel.
  gradients = 2 * (rows @ params["kernel"] / scale - target.reshape(10, 3)) / scale
  np.testing.assert_allclose(factors["rows"], rows.T @ rows / 10, rtol=1e-5)
  np.testing.assert_allclose(factors["columns"], gradients.T @ gradients / 10, rtol=1e-4)


@pytest.mark.slow
def test_kfac_multiplies_by_the_inverses_of_the_damped_factors():
  x, target = RNG.normal(size=(7, 4)), RNG.normal(size=(7, 3))
  layer = DenseGeneral(3)
  params = {"layer": {"kernel": jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32)}}

  def loss_of(params, variables=None):
    collections = {n: v["layer"] for n, v in (variables or {}).items()}
    y = layer.apply({"params": params["layer"], **collections}, jnp.asarray(x, jnp.float32))
    return jnp.sum((y - jnp.asarray(target, jnp.float32)) ** 2)

  transformation = precondition_by_kfac(0.1, damping=0.01, kl_clip=None)
  grads = jax.grad(loss_of)(params)
  got, _ = transformation.update(
    grads, transformation.init(params), params, loss=StepLoss(jnp.zeros(()), loss_of, 1)
  )
  residual = 2 * (x @ np.asarray(params["layer"]["kernel"], np.float64) - target)
  a, g = x.T @ x / 7, residual.T @ residual / 7
  a += 0.1 * np.trace(a) / 4 * np.eye(4)
  g += 0.1 * np.trace(g) / 3 * np.eye(3)
  want = np.linalg.inv(a) @ (x.T @ residual) @ np.linalg.inv(g)
  np.testing.assert_allclose(got["layer"]["kernel"], want, rtol=1e-3)


@pytest.mark.slow
def test_kl_clip_limits_the_quadratic_change_of_the_loss():
  params = {"layer": {"kernel": jnp.eye(3)}}

  def loss_of(params, variables=None):
    return sum(jnp.sum(x) for x in jax.tree.leaves(variables))  # all factors are matrices of ones

  def direction(kl_clip):
    transformation = precondition_by_kfac(0.1, kl_clip=kl_clip)
    state = transformation.init(params)
    loss = StepLoss(jnp.zeros(()), loss_of, 1)
    return transformation.update(params, state, params, loss=loss)[0]["layer"]["kernel"]

  free = direction(None)
  product = jnp.trace(free)  # with the gradient, an identity
  np.testing.assert_allclose(direction(1e-3), jnp.sqrt(1e-3 / (0.01 * product)) * free, rtol=1e-5)
  np.testing.assert_array_equal(direction(1e9), free)


def test_error_names_a_skipped_layer_that_does_not_exist():
  transformation = precondition_by_kfac(0.1, skip_layers=["dense/.*"])
  with pytest.raises(ValueError, match=r"'dense/\.\*' matches no parameter.*'layer/kernel'"):
    transformation.init({"layer": {"kernel": jnp.eye(3)}})


def test_kfac_is_refused_if_an_adapter_leaves_no_kernel_to_train():
  chained = optimizers.chain([precondition_by_kfac, optax.lamb])
  definition = AdapterOptimizer(chained, LoRA(targets=("query",)))
  layer = {"kernel": jnp.eye(3), "lora_a": jnp.ones((3, 2)), "lora_b": jnp.ones((2, 3))}
  expected = "needs dense kernels, but only lora_a, lora_b are trained: set another OPTIMIZER"
  with pytest.raises(ValueError, match=expected):
    definition.create({"query": layer})


def kfac_factors(config):
  """Returns the factors of a decoder-only model after one step."""
  model = make_decoder_only_model(config)
  definition = optimizers.chain([precondition_by_kfac, optax.lamb])
  state = TrainState.create(definition, decoder_only_variables(config))
  batch = {n: v for n, v in make_batch(4).items() if n.startswith("decoder")}
  step = functools.partial(
    train_step,
    loss_fn=model.loss_fn,
    learning_rate_fn=lambda _: jnp.float32(0.01),
  )
  return jax.jit(step)(state, batch, jax.random.PRNGKey(0))[0].param_states[0].factors


@pytest.mark.slow
def test_scanned_and_rematerialized_layers_have_factors_of_their_own():
  config = DECODER_ONLY.replace(positions="rotary", scan_layers=True, remat_policy="full")
  (layers,) = (v for n, v in kfac_factors(config)["decoder"].items() if "mlp" in v)
  kernel = layers["mlp"]["wi_0"]["kernel"]
  assert kernel.rows.shape == (2, 16, 16)
  assert kernel.columns.shape == (2, 24, 24)
  assert all(jnp.trace(kernel.columns[layer]) > 0 for layer in range(2))
  assert jnp.any(kernel.rows[0] != kernel.rows[1])


def test_error_says_that_kfac_needs_separate_projections():
  config = DECODER_ONLY.replace(fuse_qkv_params=True)
  with pytest.raises(ValueError, match=r"cannot measure query: set fuse_qkv_params = False"):
    kfac_factors(config)


@pytest.mark.slow
def test_sophia_estimates_the_diagonal_of_the_hessian():
  curvatures = {"w": jnp.asarray([1.0, 2.0, 3.0])}

  def loss_of(params):
    return jnp.sum(curvatures["w"] * params["w"] ** 2) / 2

  transformation = hessian_diagonal()
  params = {"w": jnp.ones(3)}
  loss = StepLoss(jnp.zeros(()), loss_of, num_microbatches=2)
  got, _ = transformation.update(params, transformation.init(params), params, loss=loss)
  np.testing.assert_allclose(got["w"], 2 * curvatures["w"])
