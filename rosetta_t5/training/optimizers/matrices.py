"""Parameters as stacks of matrices, and two optimizers that treat them so.

Shampoo (Gupta et al. 2018, arXiv:1802.09568) has moving averages and Adam's step size; SOAP (Vyas et al.
2024, arXiv:2409.11321) is Adam in the eigenbasis of Shampoo's factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from rosetta_t5.argument_types import NonNegativeNumber, Positive, PositiveNumber, Rate
from rosetta_t5.parallel.placement import constrain
from rosetta_t5.training.optimizers.optimizer_def import axes_like, path_name

PyTree = Any
AxisNames = Sequence[str | None]

# Logical axes along which independent matrices are stacked.
_STACKED = frozenset({"layers", "stack", "expert"})
# Logical axes of tables and heads: each row or column belongs to one token, bucket or expert.
_TABLES = frozenset({"vocab", "relpos_buckets", "abspos_buckets", "unmodeled"})


class MatrixDims(NamedTuple):
  """The dimensions of a parameter that is a stack of matrices: those of the stack, rows and columns."""

  stack: tuple[int, ...]
  rows: tuple[int, ...]
  columns: tuple[int, ...]

  def to_matrices(self, array: jax.Array) -> Float[Array, "... I O"]:
    """Returns the matrices of an array with the parameter's shape."""
    stack = (array.shape[dim] for dim in self.stack)
    ordered = array.transpose(self.stack + self.rows + self.columns)
    return ordered.reshape(*stack, *self.sizes(array.shape))

  def to_parameter(
    self, matrices: Float[Array, "... I O"], shape: Sequence[int]
  ) -> Float[Array, "..."]:
    """Reverses `to_matrices` for a parameter of this shape."""
    order = self.stack + self.rows + self.columns
    ordered = matrices.reshape([shape[dim] for dim in order])
    return ordered.transpose([order.index(dim) for dim in range(len(shape))])

  def sizes(self, shape: Sequence[int]) -> tuple[int, int]:
    """Returns the number of rows, I, and of columns, O."""
    rows, columns = ([shape[dim] for dim in dims] for dims in (self.rows, self.columns))
    return math.prod(rows), math.prod(columns)

  def factor_axes(self, factors: Factors, names: AxisNames) -> Factors:
    """Returns the logical axes of a parameter's factors.

    A factor has two dimensions of one size, but a mesh axis can split only one of them. The second one
    therefore has the axis of the other side: a factor is split over as many devices as its parameter.
    """
    stack = [names[dim] for dim in self.stack]
    row, column = names[self.rows[0]], names[self.columns[0]]
    of_rows, of_columns = PartitionSpec(*stack, row, column), PartitionSpec(*stack, column, row)
    return factors.where_present(of_rows, of_columns)


class Factors(NamedTuple):
  """One array for the rows and one for the columns of a parameter's matrices; None for no array.

  Attributes:
    rows: [*stack, I, I].
    columns: [*stack, O, O].
  """

  rows: Any
  columns: Any

  def where_present(self, rows: Any, columns: Any) -> Factors:
    """Returns these values in place of the arrays, and None where there is no array."""
    return Factors(
      rows=None if self.rows is None else rows, columns=None if self.columns is None else columns
    )


def matrix_dims(ndim: int, names: AxisNames | None, path: str = "") -> MatrixDims | None:
  """Returns how a parameter is a stack of matrices; None for vectors, tables and heads.

  Args:
    ndim: the number of the parameter's dimensions.
    names: its logical axes. Without them, a parameter of two dimensions is a matrix.
    path: its path; without logical axes, an `embedding` is a table.
  """
  if not names:
    is_matrix = ndim == 2 and not path.endswith("embedding")
    return MatrixDims((), (0,), (1,)) if is_matrix else None
  stack = tuple(dim for dim, name in enumerate(names) if name in _STACKED)
  dims = tuple(dim for dim in range(ndim) if dim not in stack)
  if len(dims) < 2 or not _TABLES.isdisjoint(names):
    return None
  # The other dimensions are those of the input and then those of the output. One of both is `embed`.
  split = 1 if names[dims[0]] == "embed" else len(dims) - 1
  return MatrixDims(stack, dims[:split], dims[split:])


def tree_matrix_dims(params: PyTree, param_axes: PyTree | None) -> PyTree:
  """Returns a tree like `params` with the `MatrixDims` of each parameter, or None."""

  def dims(path: Sequence[Any], param: Any, axes: Any) -> MatrixDims | None:
    return matrix_dims(param.ndim, axes, path_name(path))

  return jax.tree_util.tree_map_with_path(dims, params, axes_like(params, param_axes))


def zero_factors(params: PyTree, dims: PyTree, max_dim: int) -> PyTree:
  """Returns a tree like `params` with zeros as the factors of each parameter.

  Args:
    params: the parameters.
    dims: `tree_matrix_dims` of them. Other parameters than matrices have no factors.
    max_dim: a side of a matrix that is larger has none either.
  """

  def zeros(param: jax.Array, dim: MatrixDims | None) -> Factors:
    if dim is None:
      return Factors(None, None)
    stack, sizes = [param.shape[i] for i in dim.stack], dim.sizes(param.shape)
    sides = [jnp.zeros((*stack, n, n), jnp.float32) if n <= max_dim else None for n in sizes]
    return Factors(*sides)

  return jax.tree.map(zeros, params, dims)


def gram_factors(grads: PyTree, dims: PyTree, like: PyTree) -> PyTree:
  """Returns G·Gᵀ and Gᵀ·G of each gradient, where the tree of factors `like` has an array."""

  def grams(grad: jax.Array, dim: MatrixDims | None, factors: Factors) -> Factors:
    if dim is None:
      return factors
    matrices = dim.to_matrices(grad.astype(jnp.float32))
    return factors.where_present(_gram(matrices), _gram(matrices.mT))

  return jax.tree.map(grams, grads, dims, like)


def multiply(factors: PyTree, tree: PyTree, dims: PyTree) -> PyTree:
  """Returns rows · M · columnsᵀ for each matrix M of a tree like the parameters.

  Missing factors are identities.
  """

  def product(array: jax.Array, dim: MatrixDims | None, sides: Factors) -> jax.Array:
    if dim is None:
      return array
    matrices = dim.to_matrices(array)
    if sides.rows is not None:
      matrices = exact_matmul(sides.rows, matrices)
    if sides.columns is not None:
      matrices = exact_matmul(matrices, sides.columns.mT)
    return dim.to_parameter(matrices, array.shape)

  return jax.tree.map(product, tree, dims, factors)


def _gram(matrices: jax.Array) -> jax.Array:
  # XLA (jax 0.10) computes a wrong M·Mᵀ if both dimensions of the result are split over devices.
  return constrain(exact_matmul(matrices, matrices.mT), (None,) * matrices.ndim)


def exact_matmul(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns a·b, which GPUs do not round to fewer than 32 bits, as they do by default."""
  return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


class MatricesState(NamedTuple):
  """The state of Shampoo or SOAP.

  Attributes:
    step: the number of completed steps.
    mu: the first moment.
    nu: the second moment; SOAP's is in the eigenbasis.
    covariances: the averages of G·Gᵀ and Gᵀ·G, as `Factors`.
    preconditioners: Shampoo's are their inverse fourth roots, or the inverse square root of one whose other
      side is too large; SOAP's are their eigenvectors, as columns.
  """

  step: jax.Array
  mu: PyTree
  nu: PyTree
  covariances: PyTree
  preconditioners: PyTree


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

  def init(params: PyTree) -> MatricesState:
    step, mu, nu, zeros = _zeros(params, param_axes, max_precond_dim)
    return MatricesState(step, mu, nu, zeros, jax.tree.map(jnp.copy, zeros))

  def update(grads: PyTree, state: MatricesState, params: PyTree = None) -> tuple[PyTree, Any]:
    dims = tree_matrix_dims(grads, param_axes)
    step = state.step + 1
    mu = optax.tree.update_moment(grads, state.mu, b1, 1)
    nu = optax.tree.update_moment(grads, state.nu, b2, 2)
    grams = gram_factors(grads, dims, state.covariances)
    covariances = optax.incremental_update(grams, state.covariances, 1 - b2)
    roots = jax.lax.cond(
      state.step % precondition_frequency == 0,
      lambda: jax.tree.map(lambda _, sides: _inverse_roots(sides, matrix_eps), grads, covariances),
      lambda: state.preconditioners,
    )
    mu_hat = optax.tree.bias_correction(mu, b1, step)
    nu_hat = optax.tree.bias_correction(nu, b2, step)
    adam = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu_hat, nu_hat)
    updates = jax.tree.map(_graft, multiply(roots, mu_hat, dims), adam, dims)
    return updates, MatricesState(step, mu, nu, covariances, roots)

  return _with_decay(init, update, weight_decay, learning_rate)


def _inverse_roots(covariances: Factors, matrix_eps: float) -> Factors:
  sides = sum(side is not None for side in covariances)

  def root(covariance: jax.Array) -> jax.Array:
    values, vectors = jnp.linalg.eigh(covariance)
    largest = jnp.maximum(values[..., -1:], jnp.finfo(values.dtype).tiny)
    damped = jnp.maximum(values, 0.0) + matrix_eps * largest
    return exact_matmul(vectors * damped[..., None, :] ** (-0.5 / sides), vectors.mT)

  return jax.tree.map(root, covariances)


def _graft(direction: jax.Array, adam: jax.Array, dims: MatrixDims | None) -> jax.Array:
  """Returns the direction with the norm of Adam's update, matrix by matrix; else Adam's update."""
  if dims is None:
    return adam
  norm, wanted = (
    jnp.linalg.norm(dims.to_matrices(x), axis=(-2, -1), keepdims=True) for x in (direction, adam)
  )
  tiny = jnp.finfo(norm.dtype).tiny
  grafted = dims.to_matrices(direction) * (wanted / jnp.maximum(norm, tiny))
  return dims.to_parameter(grafted, direction.shape)


def _zeros(params: PyTree, param_axes: PyTree, max_dim: int) -> tuple[Any, ...]:
  """Returns the step, two moments and the covariances at the start."""
  mu, nu = (optax.tree.zeros_like(params, dtype=jnp.float32) for _ in range(2))
  factors = zero_factors(params, tree_matrix_dims(params, param_axes), max_dim)
  return jnp.zeros((), jnp.int32), mu, nu, factors


def _with_decay(
  init: Any, update: Any, weight_decay: float, learning_rate: Any
) -> optax.GradientTransformation:
  """Returns an optimizer whose updates are followed by weight decay and multiplied by the learning rate."""
  return optax.chain(
    optax.GradientTransformation(init, update),
    optax.add_decayed_weights(weight_decay),
    optax.scale_by_learning_rate(learning_rate),
  )


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

  def init(params: PyTree) -> MatricesState:
    step, mu, nu, zeros = _zeros(params, param_axes, max_precond_dim)
    identities = jax.tree.map(lambda x: jnp.broadcast_to(jnp.eye(x.shape[-1]), x.shape), zeros)
    return MatricesState(step, mu, nu, zeros, identities)

  def update(grads: PyTree, state: MatricesState, params: PyTree = None) -> tuple[PyTree, Any]:
    dims = tree_matrix_dims(grads, param_axes)
    grams = gram_factors(grads, dims, state.covariances)
    covariances = optax.incremental_update(grams, state.covariances, 1 - b2)

    def adam_step() -> tuple[PyTree, PyTree, PyTree]:
      to_basis = jax.tree.map(jnp.matrix_transpose, state.preconditioners)
      mu = optax.tree.update_moment(grads, state.mu, b1, 1)
      nu = optax.tree.update_moment(multiply(to_basis, grads, dims), state.nu, b2, 2)
      mu_hat = optax.tree.bias_correction(multiply(to_basis, mu, dims), b1, state.step)
      nu_hat = optax.tree.bias_correction(nu, b2, state.step)
      adam = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu_hat, nu_hat)
      return multiply(state.preconditioners, adam, dims), mu, nu

    def first_step() -> tuple[PyTree, PyTree, PyTree]:
      return optax.tree.zeros_like(grads), state.mu, state.nu

    updates, mu, nu = jax.lax.cond(state.step == 0, first_step, adam_step)
    bases = _new_bases(state.step, precondition_frequency, covariances, state.preconditioners)
    return updates, MatricesState(state.step + 1, mu, nu, covariances, bases)

  return _with_decay(init, update, weight_decay, learning_rate)


def _new_bases(step: jax.Array, period: int, covariances: PyTree, bases: PyTree) -> PyTree:
  return jax.lax.switch(
    jnp.where(step == 0, 0, jnp.where(step % period == 0, 1, 2)),
    (
      lambda: jax.tree.map(lambda c: jnp.linalg.eigh(c).eigenvectors, covariances),
      # One step of the power iteration.
      lambda: jax.tree.map(lambda c, b: jnp.linalg.qr(exact_matmul(c, b)).Q, covariances, bases),
      lambda: bases,
    ),
  )
