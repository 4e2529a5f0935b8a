"""Shampoo (Gupta et al. 2018, arXiv:1802.09568), and SOAP (Vyas et al. 2024, arXiv:2409.11321).

Shampoo has moving averages and Adam's step size; SOAP is Adam in the eigenbasis of Shampoo's factors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rosetta_t5.argument_types import NonNegativeNumber, Positive, PositiveNumber, Rate
from rosetta_t5.training.optimizers.second_order import matrices

PyTree = Any


class ShampooState(NamedTuple):
  """The state of Shampoo.

  Attributes:
    step: the number of completed steps.
    mu: the first moment.
    nu: the second moment.
    covariances: the averages of G·Gᵀ and Gᵀ·G, as `Factors`.
    roots: their inverse fourth roots; the inverse square root of one whose other side is too large.
  """

  step: jax.Array
  mu: PyTree
  nu: PyTree
  covariances: PyTree
  roots: PyTree


def shampoo(
  learning_rate: Any,
  param_axes: PyTree = None,
  b1: Rate = 0.9,
  b2: Rate = 0.99,
  eps: PositiveNumber = 1e-8,
  matrix_eps: PositiveNumber = 1e-6,
  weight_decay: NonNegativeNumber = 0.01,
  precondition_frequency: Positive = 20,
  max_precond_dim: Positive = 4096,
) -> optax.GradientTransformation:
  """Shampoo for matrices; AdamW for embeddings, the output layer, relative biases, norms and biases.

  The update of a matrix has the direction L^(-1/4)·M·R^(-1/4) and the norm of Adam's update
  ("grafting", as in Shi et al. 2023, arXiv:2309.06497).

  Args:
    learning_rate: the learning rate, a number or a schedule.
    param_axes: the logical axes of the parameters, which `OptaxWrapper` passes.
    b1: the decay of the first moment M.
    b2: the decay of the second moment and of the covariances L and R.
    eps: a constant added to the root of the second moment.
    matrix_eps: a fraction of the largest eigenvalue that is added to all eigenvalues.
    weight_decay: the weight decay.
    precondition_frequency: steps between updates of the inverse roots.
    max_precond_dim: a larger side of a matrix has no covariance; the other side then has the
      exponent -1/2.
  """
  return optax.chain(
    _scale_by_shampoo(param_axes, b1, b2, eps, matrix_eps, precondition_frequency, max_precond_dim),
    optax.add_decayed_weights(weight_decay),
    optax.scale_by_learning_rate(learning_rate),
  )


def _scale_by_shampoo(
  param_axes: PyTree, b1: float, b2: float, eps: float, matrix_eps: float, period: int, max_dim: int
) -> optax.GradientTransformation:
  """Returns Shampoo without learning rate and weight decay; `shampoo` explains the arguments."""

  def init(params: PyTree) -> ShampooState:
    zeros = matrices.zero_factors(params, matrices.tree_matrix_dims(params, param_axes), max_dim)
    mu, nu = (optax.tree.zeros_like(params, dtype=jnp.float32) for _ in range(2))
    return ShampooState(jnp.zeros((), jnp.int32), mu, nu, zeros, jax.tree.map(jnp.copy, zeros))

  def update(
    grads: PyTree, state: ShampooState, params: PyTree = None
  ) -> tuple[PyTree, ShampooState]:
    del params
    dims = matrices.tree_matrix_dims(grads, param_axes)
    step = state.step + 1
    mu = optax.tree.update_moment(grads, state.mu, b1, 1)
    nu = optax.tree.update_moment(grads, state.nu, b2, 2)
    grams = matrices.gram_factors(grads, dims, state.covariances)
    covariances = optax.incremental_update(grams, state.covariances, 1 - b2)
    roots = jax.lax.cond(
      state.step % period == 0,
      lambda: jax.tree.map(
        inverse_roots, covariances, is_leaf=lambda node: isinstance(node, matrices.Factors)
      ),
      lambda: state.roots,
    )
    mu_hat = optax.tree.bias_correction(mu, b1, step)
    nu_hat = optax.tree.bias_correction(nu, b2, step)
    adam = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu_hat, nu_hat)
    updates = matrices.map_params(_graft, matrices.multiply(roots, mu_hat, dims), adam, dims)
    return updates, ShampooState(step, mu, nu, covariances, roots)

  def inverse_roots(covariances: matrices.Factors) -> matrices.Factors:
    sides = sum(side is not None for side in covariances)

    def root(covariance: jax.Array) -> jax.Array:
      values, vectors = jnp.linalg.eigh(covariance)
      largest = jnp.maximum(values[..., -1:], jnp.finfo(values.dtype).tiny)
      damped = jnp.maximum(values, 0.0) + matrix_eps * largest
      return matrices.exact_matmul(vectors * damped[..., None, :] ** (-0.5 / sides), vectors.mT)

    return jax.tree.map(root, covariances)

  return optax.GradientTransformation(init, update)


def _graft(direction: jax.Array, adam: jax.Array, dims: matrices.MatrixDims | None) -> jax.Array:
  """Returns the direction with the norm of Adam's update, matrix by matrix; else Adam's update."""
  if dims is None:
    return adam
  norm, wanted = (
    jnp.linalg.norm(dims.to_matrices(x), axis=(-2, -1), keepdims=True) for x in (direction, adam)
  )
  tiny = jnp.finfo(norm.dtype).tiny
  grafted = dims.to_matrices(direction) * (wanted / jnp.maximum(norm, tiny))
  return dims.to_parameter(grafted, direction.shape)


class SoapState(NamedTuple):
  """The state of SOAP.

  Attributes:
    step: the number of completed steps.
    mu: the first moment.
    nu: the second moment, in the eigenbasis.
    covariances: the averages of G·Gᵀ and Gᵀ·G, as `Factors`.
    bases: their eigenvectors, as columns.
  """

  step: jax.Array
  mu: PyTree
  nu: PyTree
  covariances: PyTree
  bases: PyTree


def soap(
  learning_rate: Any,
  param_axes: PyTree = None,
  b1: Rate = 0.95,
  b2: Rate = 0.95,
  eps: PositiveNumber = 1e-8,
  weight_decay: NonNegativeNumber = 0.01,
  precondition_frequency: Positive = 10,
  max_precond_dim: Positive = 4096,
) -> optax.GradientTransformation:
  """SOAP for matrices; AdamW for embeddings, the output layer, relative biases, norms and biases.

  As in the authors' implementation, the first step only initializes the eigenbases.

  Args:
    learning_rate: the learning rate, a number or a schedule.
    param_axes: the logical axes of the parameters, which `OptaxWrapper` passes.
    b1: the decay of the first moment.
    b2: the decay of the second moment and of the covariances.
    eps: a constant added to the root of the second moment.
    weight_decay: the weight decay.
    precondition_frequency: steps between updates of the eigenbases.
    max_precond_dim: a larger side of a matrix has no eigenbasis.
  """
  return optax.chain(
    _scale_by_soap(param_axes, b1, b2, eps, precondition_frequency, max_precond_dim),
    optax.add_decayed_weights(weight_decay),
    optax.scale_by_learning_rate(learning_rate),
  )


def _scale_by_soap(
  param_axes: PyTree, b1: float, b2: float, eps: float, period: int, max_dim: int
) -> optax.GradientTransformation:
  """Returns SOAP without learning rate and weight decay; `soap` explains the arguments."""

  def init(params: PyTree) -> SoapState:
    zeros = matrices.zero_factors(params, matrices.tree_matrix_dims(params, param_axes), max_dim)
    identities = jax.tree.map(lambda x: jnp.broadcast_to(jnp.eye(x.shape[-1]), x.shape), zeros)
    mu, nu = (optax.tree.zeros_like(params, dtype=jnp.float32) for _ in range(2))
    return SoapState(jnp.zeros((), jnp.int32), mu, nu, zeros, identities)

  def update(grads: PyTree, state: SoapState, params: PyTree = None) -> tuple[PyTree, SoapState]:
    del params
    dims = matrices.tree_matrix_dims(grads, param_axes)
    grams = matrices.gram_factors(grads, dims, state.covariances)
    covariances = optax.incremental_update(grams, state.covariances, 1 - b2)

    def adam_step() -> tuple[PyTree, PyTree, PyTree]:
      to_basis = jax.tree.map(jnp.matrix_transpose, state.bases)
      mu = optax.tree.update_moment(grads, state.mu, b1, 1)
      nu = optax.tree.update_moment(matrices.multiply(to_basis, grads, dims), state.nu, b2, 2)
      mu_hat = optax.tree.bias_correction(matrices.multiply(to_basis, mu, dims), b1, state.step)
      nu_hat = optax.tree.bias_correction(nu, b2, state.step)
      adam = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu_hat, nu_hat)
      return matrices.multiply(state.bases, adam, dims), mu, nu

    def first_step() -> tuple[PyTree, PyTree, PyTree]:
      return optax.tree.zeros_like(grads), state.mu, state.nu

    is_first = state.step == 0
    updates, mu, nu = jax.lax.cond(is_first, first_step, adam_step)
    is_due = state.step % period == 0
    bases = jax.lax.switch(
      jnp.where(is_first, 0, jnp.where(is_due, 1, 2)),
      (
        lambda: jax.tree.map(lambda c: jnp.linalg.eigh(c).eigenvectors, covariances),
        lambda: jax.tree.map(_improved_basis, covariances, state.bases),
        lambda: state.bases,
      ),
    )
    return updates, SoapState(state.step + 1, mu, nu, covariances, bases)

  return optax.GradientTransformation(init, update)


def _improved_basis(covariance: jax.Array, basis: jax.Array) -> jax.Array:
  """Returns the basis after one step of the power iteration with QR."""
  return jnp.linalg.qr(matrices.exact_matmul(covariance, basis)).Q
