"""Muon (Jordan et al. 2024) for the parameters of our networks: optax's, which gets their matrices."""

from __future__ import annotations

from typing import Any

import jax
import optax

from rosetta_t5.argument_types import NonNegativeNumber, Positive, PositiveNumber, Rate
from rosetta_t5.training.optimizers.second_order.matrices import MatrixDims, tree_matrix_dims

PyTree = Any


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
