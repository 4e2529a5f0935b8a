"""An average of the parameters, which is evaluated and exported in their place."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rosetta_t5.argument_types import Rate

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
    if params is None:
      raise ValueError("average_parameters needs the parameters: pass them as the third argument")
    new_params = optax.apply_updates(params, updates)
    average = optax.incremental_update(new_params, state.parameter_average, 1.0 - decay)
    return updates, AverageState(average)

  return optax.GradientTransformation(init, update)


def check_average_is_last(optax_state: PyTree) -> None:
  """Raises ValueError if a transformation follows `average_parameters` in a chain."""
  if type(optax_state) is not tuple:
    return
  for state in optax_state:
    check_average_is_last(state)
  if any(isinstance(state, AverageState) for state in optax_state[:-1]):
    raise ValueError(
      "average_parameters must be the last of chain.transformations, because it averages the "
      "parameters after all updates: move it to the end"
    )


def averaged_parameters(params: PyTree, optax_state: PyTree) -> PyTree:
  """Returns the parameters to evaluate: the average that an optax state has, else `params`.

  A schedule-free optimizer has one too, which is computed from its state and the parameters.
  """
  state_classes = (AverageState, optax.contrib.ScheduleFreeState)
  nodes = jax.tree.leaves(optax_state, is_leaf=lambda node: isinstance(node, state_classes))
  for node in reversed(nodes):
    if isinstance(node, AverageState):
      return node.parameter_average
    if isinstance(node, optax.contrib.ScheduleFreeState):
      return optax.contrib.schedule_free_eval_params(node, params)
  return params
