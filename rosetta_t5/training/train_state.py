"""What a training run carries from step to step: parameters, optimizer state, mutable collections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import serialization, struct
from flax.core import unfreeze
from flax.linen import partitioning as flax_partitioning

from rosetta_t5.training.optimizers.base import Optimizer, OptimizerDef, OptimizerState

PyTree = Any

_AXES_SUFFIX = "_axes"


class TrainState(struct.PyTreeNode):
  """One pytree of everything a step reads and writes (T5X: FlaxOptimTrainState).

  Attributes:
    step: int32 scalar, the number of updates made.
    params: nested dict of parameters, with T5X's names and shapes.
    param_states: the optimizer's state, of a structure that the optimizer chooses.
    flax_mutables: every other variable collection of the module, by name.
    params_axes: nested dict of flax `AxisMetadata`, the parameters' logical axes, if the module has
      named them with `param_with_axes`.
    flax_mutables_axes: the same for `flax_mutables`.
    optimizer_def: the optimizer; not part of the tree.
  """

  step: jax.Array
  params: PyTree
  param_states: PyTree
  flax_mutables: PyTree = struct.field(default_factory=dict)
  params_axes: PyTree = None
  flax_mutables_axes: PyTree = None
  optimizer_def: OptimizerDef | None = struct.field(pytree_node=False, default=None)

  @classmethod
  def create(cls, optimizer_def: OptimizerDef, model_variables: Mapping[str, Any]) -> TrainState:
    """Returns the state of step 0 for freshly initialised variables.

    Args:
      optimizer_def: the optimizer; told the parameters' logical axes where there are any.
      model_variables: what `module.init` returned: `params`, `params_axes` and other collections.
    """
    params, params_axes, mutables, mutables_axes = _split(model_variables)
    if params_axes is not None and hasattr(optimizer_def, "set_param_axes"):
      optimizer_def.set_param_axes(flax_partitioning.get_axis_names(params_axes))
    optimizer_state = optimizer_def.init_state(params)
    return cls(
      step=optimizer_state.step,
      params=params,
      param_states=optimizer_state.param_states,
      flax_mutables=mutables,
      params_axes=params_axes,
      flax_mutables_axes=mutables_axes,
      optimizer_def=optimizer_def,
    )

  @property
  def _optimizer(self) -> Optimizer:
    """T5X's view of the same state: an optimizer that holds its target."""
    assert self.optimizer_def is not None, "a train state is made by TrainState.create"
    return Optimizer(
      optimizer_def=self.optimizer_def,
      state=OptimizerState(self.step, self.param_states),
      target=self.params,
    )

  def state_dict(self) -> dict[str, Any]:
    """Returns the nested dict that checkpoints store, in T5X's layout."""
    stored = self._optimizer.state_dict()
    if self.flax_mutables:
      stored["flax_mutables"] = unfreeze(serialization.to_state_dict(self.flax_mutables))
    return stored

  def restore_state(self, state_dict: Mapping[str, Any]) -> TrainState:
    """Returns this state with the values of `state_dict` (see `state_dict()`).

    Raises:
      ValueError: the names in `state_dict` are not those of this state.
    """
    optimizer = self._optimizer.restore_state(state_dict)
    mutables = self.flax_mutables
    if mutables and "flax_mutables" in state_dict:
      mutables = serialization.from_state_dict(mutables, state_dict["flax_mutables"])
    return self.replace(
      step=optimizer.state.step,
      params=optimizer.target,
      param_states=optimizer.state.param_states,
      flax_mutables=mutables,
    )

  def apply_gradient(
    self, grads: PyTree, learning_rate: Any, flax_mutables: PyTree | None = None
  ) -> TrainState:
    """Returns the state after one optimizer update with `grads`, a tree like `params`."""
    updated = self._optimizer.apply_gradient(grads, learning_rate=learning_rate)
    return self.replace(
      step=updated.state.step,
      params=updated.target,
      param_states=updated.state.param_states,
      flax_mutables=self.flax_mutables if flax_mutables is None else flax_mutables,
    )

  def replace_params(self, params: PyTree) -> TrainState:
    """Returns this state with other parameters."""
    return self.replace(params=params)

  def replace_flax_mutables(self, flax_mutables: PyTree) -> TrainState:
    """Returns this state with other mutable collections."""
    return self.replace(flax_mutables=flax_mutables)

  def replace_step(self, step: jax.Array) -> TrainState:
    """Returns this state at another step."""
    return self.replace(step=step)

  def as_logical_axes(self) -> TrainState:
    """Returns this state with logical axis names (a PartitionSpec, or None) in place of arrays.

    Raises:
      ValueError: the module named no logical axes, or the optimizer cannot derive its own.
    """
    param_names = _param_axis_names(self.params_axes)
    derive = getattr(self.optimizer_def, "derive_logical_axes", None)
    if derive is None:
      raise ValueError(
        f"optimizer {type(self.optimizer_def).__name__} has no method derive_logical_axes, so its "
        "state cannot be partitioned"
      )
    optimizer_names = derive(self._optimizer, param_names)
    return self.replace(
      step=None,
      params=unfreeze(param_names),
      param_states=optimizer_names.state.param_states,
      flax_mutables=_mutables_axis_names(self.flax_mutables, self.flax_mutables_axes),
    )


class InferenceState(struct.PyTreeNode):
  """What evaluation and inference need of a train state: everything but the optimizer (T5X's class).

  Attributes:
    step: int32 scalar, the number of updates made.
    params: nested dict of parameters.
    params_axes: nested dict of flax `AxisMetadata`, the parameters' logical axes.
    flax_mutables: every other variable collection of the module, by name.
    flax_mutables_axes: the same for `flax_mutables`.
  """

  step: jax.Array
  params: PyTree
  params_axes: PyTree = None
  flax_mutables: PyTree = struct.field(default_factory=dict)
  flax_mutables_axes: PyTree = None

  @classmethod
  def create(cls, model_variables: Mapping[str, Any]) -> InferenceState:
    """Returns the state of step 0 for what `module.init` returned."""
    params, params_axes, mutables, mutables_axes = _split(model_variables)
    return cls(jnp.array(0, jnp.int32), params, params_axes, mutables, mutables_axes)

  @property
  def param_states(self) -> PyTree:
    """There are none, as there is no optimizer."""
    raise NotImplementedError("an InferenceState has no optimizer, and so no param_states")

  def apply_gradient(self, *args: Any, **kwargs: Any) -> InferenceState:
    """An inference state cannot be trained."""
    raise NotImplementedError("an InferenceState has no optimizer: train a TrainState")

  def state_dict(self) -> dict[str, Any]:
    """Returns what a checkpoint stores, as far as this state has it, in T5X's layout."""
    stored = {"target": unfreeze(self.params), "state": {"step": self.step}}
    if self.flax_mutables:
      stored["flax_mutables"] = unfreeze(serialization.to_state_dict(self.flax_mutables))
    return stored

  def restore_state(self, state_dict: Mapping[str, Any]) -> InferenceState:
    """Returns this state with the values of `state_dict`, whose optimizer state is not read."""
    mutables = self.flax_mutables
    if mutables and "flax_mutables" in state_dict:
      mutables = serialization.from_state_dict(mutables, state_dict["flax_mutables"])
    return self.replace(
      params=serialization.from_state_dict(unfreeze(self.params), state_dict["target"]),
      step=state_dict["state"]["step"],
      flax_mutables=mutables,
    )

  def replace_params(self, params: PyTree) -> InferenceState:
    """Returns this state with other parameters."""
    return self.replace(params=params)

  def replace_flax_mutables(self, flax_mutables: PyTree) -> InferenceState:
    """Returns this state with other mutable collections."""
    return self.replace(flax_mutables=flax_mutables)

  def replace_step(self, step: jax.Array) -> InferenceState:
    """Returns this state at another step."""
    return self.replace(step=step)

  def as_logical_axes(self) -> InferenceState:
    """Returns this state with logical axis names (a PartitionSpec, or None) in place of arrays.

    Raises:
      ValueError: the module named no logical axes.
    """
    return self.replace(
      step=None,
      params=unfreeze(_param_axis_names(self.params_axes)),
      flax_mutables=_mutables_axis_names(self.flax_mutables, self.flax_mutables_axes),
    )


def _split(model_variables: Mapping[str, Any]) -> tuple[PyTree, PyTree, PyTree, PyTree]:
  """Returns parameters, their axes, the other collections, and the axes of those."""
  variables = unfreeze(dict(model_variables))
  params = variables.pop("params")
  params_axes = variables.pop("params_axes", None)
  mutables_axes = {
    name.removesuffix(_AXES_SUFFIX): variables.pop(name)
    for name in list(variables)
    if name.endswith(_AXES_SUFFIX)
  }
  return params, params_axes, variables, mutables_axes or None


def _param_axis_names(params_axes: PyTree) -> PyTree:
  if params_axes is None:
    raise ValueError(
      "the model's parameters have no logical axes, so they cannot be partitioned: create them "
      "with flax.linen.partitioning.param_with_axes(name, init, shape, dtype, axes=(...))"
    )
  return flax_partitioning.get_axis_names(params_axes)


def _mutables_axis_names(mutables: PyTree, mutables_axes: PyTree) -> PyTree:
  names = jax.tree.map(lambda _: None, mutables)
  for name, axes in (mutables_axes or {}).items():
    names[name] = flax_partitioning.get_axis_names(axes)
  return names
