"""Parameters as stacks of matrices, and Muon (Jordan et al. 2024), which updates matrices only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from rosetta_t5.argument_types import NonNegativeNumber, Positive, PositiveNumber, Rate
from rosetta_t5.parallel.sharding_constraints import with_sharding_constraint
from rosetta_t5.training.optimizers.param_paths import axes_by_path, path_name

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
    sides = ((factors.rows, (row, column)), (factors.columns, (column, row)))
    return Factors(
      *(None if side is None else PartitionSpec(*stack, *axes) for side, axes in sides)
    )


class Factors(NamedTuple):
  """One array for the rows and one for the columns of a parameter's matrices; None for no array.

  Attributes:
    rows: [*stack, I, I].
    columns: [*stack, O, O].
  """

  rows: Any
  columns: Any


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
  names = {} if param_axes is None else axes_by_path(param_axes)

  def dims(path: Sequence[Any], param: Any) -> MatrixDims | None:
    name = path_name(path)
    return matrix_dims(len(param.shape), names.get(name), name)

  return jax.tree_util.tree_map_with_path(dims, params)


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
    stack = [param.shape[i] for i in dim.stack]
    sizes = dim.sizes(param.shape)
    return Factors(
      *(jnp.zeros((*stack, n, n), jnp.float32) if n <= max_dim else None for n in sizes)
    )

  return map_params(zeros, params, dims)


def gram_factors(grads: PyTree, dims: PyTree, like: PyTree) -> PyTree:
  """Returns G·Gᵀ and Gᵀ·G of each gradient, where the tree of factors `like` has an array."""

  def grams(grad: jax.Array, dim: MatrixDims | None, factors: Factors) -> Factors:
    if dim is None:
      return Factors(None, None)
    matrices = dim.to_matrices(grad.astype(jnp.float32))
    return Factors(
      rows=None if factors.rows is None else _gram(matrices),
      columns=None if factors.columns is None else _gram(matrices.mT),
    )

  return map_params(grams, grads, dims, like)


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

  return map_params(product, tree, dims, factors)


def _gram(matrices: jax.Array) -> jax.Array:
  # XLA (jax 0.10) computes a wrong M·Mᵀ if both dimensions of the result are split over devices.
  return with_sharding_constraint(exact_matmul(matrices, matrices.mT), (None,) * matrices.ndim)


def exact_matmul(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns a·b, which GPUs do not round to fewer than 32 bits, as they do by default."""
  return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def map_params(function: Callable[..., Any], params: PyTree, *trees: PyTree) -> PyTree:
  """Returns a tree like `params` of function(parameter, part of each tree)."""
  structure: Any = jax.tree.structure(params)
  parts = (structure.flatten_up_to(tree) for tree in (params, *trees))
  return structure.unflatten(function(*leaves) for leaves in zip(*parts, strict=True))


def muon(
  learning_rate: Any,
  param_axes: PyTree = None,
  beta: Rate = 0.95,
  ns_steps: Positive = 5,
  consistent_rms: PositiveNumber | None = 0.2,
  weight_decay: NonNegativeNumber = 0.1,
  adam_b1: Rate = 0.9,
  adam_b2: Rate = 0.95,
  adam_weight_decay: NonNegativeNumber = 0.0,
) -> optax.GradientTransformation:
  """Muon for matrices; AdamW for embeddings, the output layer, relative biases, norms and biases.

  Scanned layers and experts are stacks of matrices; a projection to several heads is one matrix.

  Args:
    learning_rate: the learning rate of both, a number or a schedule.
    param_axes: the logical axes of the parameters, which `OptaxWrapper` passes.
    beta: the decay of the momentum.
    ns_steps: the number of Newton-Schulz iterations.
    consistent_rms: the RMS of an update of a matrix before the learning rate. 0.2, about that of AdamW's
      updates, lets both share a learning rate (Liu et al. 2025). None scales by √(max(1, columns / rows)).
    weight_decay: the weight decay of matrices.
    adam_b1: the decay of AdamW's first moment.
    adam_b2: the decay of AdamW's second moment.
    adam_weight_decay: the weight decay of the other parameters.
  """

  def dimension_numbers(params: PyTree) -> PyTree:
    def convert(dims: MatrixDims | None) -> Any:
      return dims and optax.contrib.MuonDimensionNumbers(dims.rows, dims.columns)

    dims = tree_matrix_dims(params, param_axes)
    return jax.tree.map(convert, dims, is_leaf=lambda x: x is None or isinstance(x, MatrixDims))

  return optax.contrib.muon(
    learning_rate,
    beta=beta,
    ns_steps=ns_steps,
    consistent_rms=consistent_rms,
    weight_decay=weight_decay,
    adam_b1=adam_b1,
    adam_b2=adam_b2,
    adam_weight_decay=adam_weight_decay,
    muon_weight_dimension_numbers=dimension_numbers,
  )
