"""Optax transformations: an average of the parameters, masks and learning rates by name, and Muon."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rosetta_t5.argument_types import NonNegativeNumber, Positive, PositiveNumber, Rate, near_hint
from rosetta_t5.training.optimizers.matrices import MatrixDims, tree_matrix_dims
from rosetta_t5.training.optimizers.optimizer_def import path_name

PyTree = Any


class AverageState(NamedTuple):
  """The average, a tree like the parameters."""

  parameter_average: PyTree


def average_parameters(decay: Rate = 0.999) -> optax.GradientTransformation:
  """Returns a transformation that averages the parameters; it must be the last one of a `chain`.

  It does not change the updates. Evaluations, predictions and exports use the average
  (Polyak and Juditsky 1992; with exponential weights).

  Args:
    decay: the weight of the average in decay · average + (1 − decay) · parameters.
  """

  def init(params: PyTree) -> AverageState:
    return AverageState(jax.tree.map(jnp.copy, params))  # The step donates both trees.

  def update(updates: PyTree, state: AverageState, params: PyTree = None) -> tuple[PyTree, Any]:
    new_params = optax.apply_updates(params, updates)
    average = optax.incremental_update(new_params, state.parameter_average, 1.0 - decay)
    return updates, AverageState(average)

  return optax.GradientTransformation(init, update)


def averaged_parameters(params: PyTree, optax_state: PyTree) -> PyTree:
  """Returns the parameters to evaluate: the average that an optax state has, else `params`.

  A schedule-free optimizer has one too, which is computed from its state and the parameters.
  """
  has_average = (AverageState, optax.contrib.ScheduleFreeState)
  nodes = jax.tree.leaves(optax_state, is_leaf=lambda node: isinstance(node, has_average))
  last = next((node for node in reversed(nodes) if isinstance(node, has_average)), None)
  if isinstance(last, AverageState):
    return last.parameter_average
  return params if last is None else optax.contrib.schedule_free_eval_params(last, params)


def all_except(patterns: Sequence[str]) -> Callable[[PyTree], PyTree]:
  """Returns a mask for optax, such as `optax.adamw.mask`: True for parameters that no pattern matches.

  Args:
    patterns: regular expressions that match whole paths, such as `.*/(scale|bias)`.
  """

  def mask(params: PyTree) -> PyTree:
    return jax.tree.map(lambda index: index == len(patterns), _first_matches(params, patterns))

  return mask


def scale_by_name(factors: Mapping[str, NonNegativeNumber]) -> optax.GradientTransformation:
  """Returns a transformation that multiplies the updates of parameters by a factor.

  After an optimizer in `chain`, the factors are those of learning rates; 0 freezes a parameter.

  Args:
    factors: factors by regular expressions that match whole paths, such as
      {'encoder/layers_[0-5]/.*': 0.1}. The first match counts. Other parameters have the factor 1.
  """
  numbers = [*factors.values(), 1.0]

  def update(updates: PyTree, params: PyTree | None = None) -> PyTree:
    indices = _first_matches(updates, list(factors))
    return jax.tree.map(lambda value, index: value * numbers[index], updates, indices)

  return optax.stateless(update)


def _first_matches(params: PyTree, patterns: Sequence[str]) -> PyTree:
  """Returns a tree like `params` with the index of the first pattern that matches each whole path.

  The index is the number of patterns where none matches.

  Raises:
    ValueError: a pattern is not a regular expression, or matches no parameter.
  """
  names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
  for pattern in patterns:
    try:
      is_used = any(re.fullmatch(pattern, name) for name in names)
    except re.error as error:
      raise ValueError(
        f"{pattern!r} is not a regular expression ({error}): any characters are '.*', not '*'"
      ) from error
    if not is_used:
      raise ValueError(
        f"the regular expression {pattern!r} matches no parameter{near_hint(pattern, names)}: it must "
        f"match the whole path, such as {names[0]!r}"
      )

  def index_of(path: Any, _: Any) -> int:
    name = path_name(path)
    return next((i for i, one in enumerate(patterns) if re.fullmatch(one, name)), len(patterns))

  return jax.tree_util.tree_map_with_path(index_of, params)


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
    def numbers(_: Any, dims: MatrixDims | None) -> Any:
      return dims and optax.contrib.MuonDimensionNumbers(dims.rows, dims.columns)

    return jax.tree.map(numbers, params, tree_matrix_dims(params, param_axes))

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
