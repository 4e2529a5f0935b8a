"""Shampoo (Gupta et al. 2018, arXiv:1802.09568) with moving averages and Adam's step size."""

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
