"""T5X's `train_state`: the train state of training and inference."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import jax
from flax import struct
from flax.core import FrozenDict, freeze, unfreeze
from flax.linen.partitioning import get_axis_names

from rosetta_t5.training.optimizers.optax_wrapper import OptaxWrapper
from rosetta_t5.training.optimizers.optimizer_def import OptimizerDef
from rosetta_t5.training.train_state import InferenceState, TrainState, param_axis_names

PyTree = Any

EMPTY_DICT: FrozenDict = freeze({})

_WORK_WITHOUT_AXES = (OptimizerDef.set_param_axes, OptaxWrapper.set_param_axes)


class FlaxOptimTrainState(struct.PyTreeNode, metaclass=abc.ABCMeta):
  """A train state with T5X's constructor and fields; a `TrainState` counts as an instance of it.

  Attributes:
    params_axes: nested dict of flax `AxisMetadata`, the parameters' logical axes.
    flax_mutables: the variable collections of the module that are not parameters.
    flax_mutables_axes: the logical axes of `flax_mutables`.
  """

  _optimizer: Any
  params_axes: PyTree = None
  flax_mutables: PyTree = EMPTY_DICT
  flax_mutables_axes: PyTree = None

  @classmethod
  def create(
    cls, optimizer_def: OptimizerDef, model_variables: Mapping[str, Any]
  ) -> FlaxOptimTrainState:
    """Returns the state of step 0.

    Args:
      optimizer_def: the optimizer.
      model_variables: the variables of a module by collection, as plain or frozen dicts.

    Raises:
      ValueError: the optimizer depends on logical axes and the module has none, or some are missing.
    """
    has_axes = "params_axes" in model_variables
    if not has_axes and type(optimizer_def).set_param_axes not in _WORK_WITHOUT_AXES:
      raise ValueError(
        "The optimizer supports params_axes for model-based partitioning, but the model is not "
        "emitting them."
      )
    state = TrainState.create(optimizer_def, model_variables)
    return cls(
      state._optimizer, state.params_axes, freeze(state.flax_mutables), state.flax_mutables_axes
    )

  @property
  def step(self) -> jax.Array:
    """The number of completed optimizer steps."""
    return self._optimizer.state.step

  @property
  def params(self) -> PyTree:
    """The parameters."""
    return self._optimizer.target

  @property
  def param_states(self) -> PyTree:
    """The optimizer's state."""
    return self._optimizer.state.param_states

  def state_dict(self) -> dict[str, Any]:
    """Returns the nested dict that a checkpoint stores."""
    stored = self._optimizer.state_dict()
    if self.flax_mutables:
      stored["flax_mutables"] = unfreeze(self.flax_mutables)
    return stored

  def restore_state(self, state_dict: Mapping[str, Any]) -> FlaxOptimTrainState:
    """Returns this state with the values of `state_dict`; raises ValueError if names differ."""
    return self.replace(
      _optimizer=self._optimizer.restore_state(state_dict),
      flax_mutables=freeze(state_dict.get("flax_mutables", {})),
    )

  def apply_gradient(
    self, grads: PyTree, learning_rate: Any, flax_mutables: PyTree = EMPTY_DICT
  ) -> FlaxOptimTrainState:
    """Returns the state after one optimizer step with `grads`, a tree like `params`."""
    optimizer = self._optimizer.apply_gradient(grads, learning_rate=learning_rate)
    return self.replace(_optimizer=optimizer, flax_mutables=flax_mutables)

  def replace_params(self, params: PyTree) -> FlaxOptimTrainState:
    """Returns this state with other parameters."""
    return self.replace(_optimizer=self._optimizer.replace(target=params))

  def replace_flax_mutables(self, flax_mutables: PyTree) -> FlaxOptimTrainState:
    """Returns this state with other mutable collections."""
    return self.replace(flax_mutables=flax_mutables)

  def replace_step(self, step: jax.Array) -> FlaxOptimTrainState:
    """Returns this state at another step."""
    state = self._optimizer.state.replace(step=step)
    return self.replace(_optimizer=self._optimizer.replace(state=state))

  def as_logical_axes(self) -> FlaxOptimTrainState:
    """Returns this state with logical axis names (a PartitionSpec, or None) in place of arrays.

    Raises:
      ValueError: the module does not name logical axes, or the optimizer cannot derive its own.
    """
    optimizer = self._optimizer
    return FlaxOptimTrainState(
      optimizer.optimizer_def.derive_logical_axes(optimizer, param_axis_names(self.params_axes)),
      flax_mutables=get_axis_names(self.flax_mutables_axes or EMPTY_DICT),
    )


FlaxOptimTrainState.register(TrainState)
