"""The train state: step, parameters, optimizer state and mutable collections of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import serialization, struct
from flax.core import FrozenDict, freeze, unfreeze
from flax.linen import partitioning as flax_partitioning
from flax.traverse_util import flatten_dict

from rosetta_t5.training.optimizers.optimizer_def import Optimizer, OptimizerDef, OptimizerState

PyTree = Any

_AXES_SUFFIX = "_axes"


class InferenceState(struct.PyTreeNode):
  """The part of a train state that evaluation and inference need (T5X: InferenceState).

  Attributes:
    step: int32 scalar, the number of completed optimizer steps.
    params: nested dict of parameters, with T5X's names and shapes. A run has flax's `FrozenDict`, as in
      T5X, whose methods are `unfreeze()` and `copy({...})`.
    params_axes: nested dict of flax `AxisMetadata`, the parameters' logical axes; None if the module
      does not use `param_with_axes`.
    flax_mutables: all other variable collections of the module, by name.
    flax_mutables_axes: the same as `params_axes` for `flax_mutables`.
  """

  step: jax.Array
  params: PyTree
  params_axes: PyTree = None
  flax_mutables: PyTree = struct.field(default_factory=dict)
  flax_mutables_axes: PyTree = None

  @classmethod
  def create(cls, model_variables: Mapping[str, Any]) -> InferenceState:
    """Returns the state of step 0 for the result of `module.init`."""
    return cls(step=jnp.array(0, jnp.int32), **_split_variables(model_variables))

  def state_dict(self) -> dict[str, Any]:
    """Returns the nested dict that a checkpoint stores, in T5X's layout; only the part that this state has."""
    stored = {"target": unfreeze(self.params), "state": {"step": self.step}}
    if self.flax_mutables:
      stored["flax_mutables"] = unfreeze(serialization.to_state_dict(self.flax_mutables))
    return stored

  def restore_state(self, state_dict: Mapping[str, Any]) -> Self:
    """Returns this state with the values of `state_dict`; its optimizer state is ignored."""
    mutables = self.flax_mutables
    if mutables and "flax_mutables" in state_dict:
      mutables = serialization.from_state_dict(mutables, state_dict["flax_mutables"])
    params = serialization.from_state_dict(self.params, state_dict["target"])
    # A state of axis names has no step.
    step = None if self.step is None else state_dict["state"]["step"]
    return self.replace(params=params, step=step, flax_mutables=mutables)

  def apply_gradient(self, *args: Any, **kwargs: Any) -> Self:
    """Raises NotImplementedError, because there is no optimizer."""
    raise NotImplementedError("an InferenceState has no optimizer: train a TrainState")

  def replace_params(self, params: PyTree) -> Self:
    """Returns this state with other parameters."""
    return self.replace(params=params)

  def replace_flax_mutables(self, flax_mutables: PyTree) -> Self:
    """Returns this state with other mutable collections."""
    return self.replace(flax_mutables=flax_mutables)

  def replace_step(self, step: jax.Array) -> Self:
    """Returns this state at another step."""
    return self.replace(step=step)

  def as_logical_axes(self) -> Self:
    """Returns this state with logical axis names (a PartitionSpec, or None) in place of arrays.

    Raises:
      ValueError: the module does not name logical axes.
    """
    return self.replace(
      step=None,
      params=_like(self.params, param_axis_names(self.params_axes)),
      params_axes=None,
      flax_mutables=_mutables_axis_names(self.flax_mutables, self.flax_mutables_axes),
      flax_mutables_axes=None,
    )

  def __hash__(self) -> int:
    """Returns a hash, because programs cache functions by `train_state_axes`."""
    return hash(jax.tree.structure(self))


class TrainState(InferenceState):
  """One pytree of everything that a step reads and writes (T5X: FlaxOptimTrainState).

  `InferenceState` describes the other attributes.

  Attributes:
    param_states: the optimizer's state, a pytree whose structure the optimizer chooses.
    optimizer_def: the `OptimizerDef`, which is not a part of the tree.
  """

  param_states: PyTree = None
  optimizer_def: Any = struct.field(pytree_node=False, default=None)

  __hash__ = InferenceState.__hash__  # A dataclass would otherwise hash its fields, such as dicts.

  @classmethod
  def create(  # type: ignore[override]  # T5X's arguments.
    cls, optimizer_def: OptimizerDef, model_variables: Mapping[str, Any]
  ) -> TrainState:
    """Returns the state of step 0.

    Args:
      optimizer_def: the optimizer, whose `set_param_axes` gets the parameters' logical axes.
      model_variables: the result of `module.init`: `params`, `params_axes` and other collections.

    Raises:
      ValueError: a variable has no logical axes, although its collection has some.
    """
    fields = _split_variables(model_variables)
    if fields["params_axes"] is not None:
      optimizer_def.set_param_axes(flax_partitioning.get_axis_names(fields["params_axes"]))
    state = optimizer_def.init_state(fields["params"])
    fields |= {"step": state.step, "param_states": state.param_states}
    return cls(**fields, optimizer_def=optimizer_def)

  @property
  def _optimizer(self) -> Optimizer:
    """T5X's view of the same state: an optimizer with its target."""
    state = OptimizerState(self.step, self.param_states)
    return Optimizer(optimizer_def=self.optimizer_def, state=state, target=self.params)

  def state_dict(self) -> dict[str, Any]:
    """Returns the nested dict that a checkpoint stores, in T5X's layout."""
    return super().state_dict() | self._optimizer.state_dict()

  def restore_state(self, state_dict: Mapping[str, Any]) -> TrainState:
    """Returns this state with the values of `state_dict` (see `state_dict()`).

    Raises:
      ValueError: the names in `state_dict` differ from those of this state.
    """
    state = super().restore_state(state_dict)
    return state.replace(_optimizer=self._optimizer.restore_state(state_dict))

  def apply_gradient(
    self, grads: PyTree, learning_rate: Any, flax_mutables: PyTree = None, loss: Any = None
  ) -> TrainState:
    """Returns the state after one optimizer step with `grads`, a tree like `params`.

    Args:
      grads: the gradients.
      learning_rate: the learning rate of the step.
      flax_mutables: the new mutable collections; None keeps the old ones.
      loss: the `StepLoss`, for an optimizer that uses it (`OptimizerDef.uses_loss`).
    """
    overrides = {"learning_rate": learning_rate, **({} if loss is None else {"loss": loss})}
    optimizer = self._optimizer.apply_gradient(grads, **overrides)
    mutables = self.flax_mutables if flax_mutables is None else flax_mutables
    return self.replace(_optimizer=optimizer, flax_mutables=mutables)

  def as_logical_axes(self) -> TrainState:
    """Returns this state with logical axis names (a PartitionSpec, or None) in place of arrays.

    Raises:
      ValueError: the module does not name logical axes, or the optimizer cannot derive its own.
    """
    state = super().as_logical_axes()
    axes = self.optimizer_def.derive_logical_axes(self._optimizer, state.params)
    return state.replace(param_states=axes.state.param_states)


_replace_fields: Any = TrainState.replace


def _replace(state: TrainState, **changes: Any) -> TrainState:
  """Returns the state with other fields; `_optimizer` is T5X's field for all but mutables and axes."""
  if "_optimizer" in changes:
    optimizer = changes.pop("_optimizer")
    changes |= {
      "step": optimizer.state.step,
      "params": optimizer.target,
      "param_states": optimizer.state.param_states,
      "optimizer_def": optimizer.optimizer_def,
    }
  for name in ("params", "flax_mutables"):
    # A user, or a user's optimizer, may give a plain dict.
    if isinstance(changes.get(name), dict) and isinstance(getattr(state, name), FrozenDict):
      changes[name] = freeze(changes[name])
  return _replace_fields(state, **changes)


setattr(TrainState, "replace", _replace)  # noqa: B010  flax replaces the method of a class's body.


def uses_loss(train_state: Any) -> bool:
  """Returns whether `apply_gradient` of a state takes the loss; False for a user's own state."""
  return isinstance(train_state, TrainState) and train_state.optimizer_def.uses_loss


def trained_params(train_state: Any) -> PyTree:
  """Returns the parameters that have gradients, a part of the nested dict; all of a user's own state."""
  if not isinstance(train_state, TrainState):
    return train_state.params
  return train_state.optimizer_def.trained(train_state.params)


def params_to_evaluate(train_state: Any) -> PyTree:
  """Returns the parameters of evaluations and predictions: an average, if the optimizer has one.

  Args:
    train_state: a state with or without an optimizer, or a user's own state.
  """
  if not isinstance(train_state, TrainState) or train_state.optimizer_def is None:
    return train_state.params
  return train_state.optimizer_def.params_to_evaluate(train_state.params, train_state.param_states)


def _split_variables(model_variables: Mapping[str, Any]) -> dict[str, PyTree]:
  """Returns the parameters, the other collections, and the axes of both, by the states' fields."""
  variables, all_axes = unfreeze(dict(model_variables)), {}
  for name in [name for name in variables if name.endswith(_AXES_SUFFIX)]:
    axes = all_axes[name.removesuffix(_AXES_SUFFIX)] = variables.pop(name)
    named = flatten_dict(unfreeze(flax_partitioning.get_axis_names(axes)), sep="/")
    of_collection = variables.get(name.removesuffix(_AXES_SUFFIX), {})
    if missing := flatten_dict(of_collection, sep="/").keys() - named.keys():
      raise ValueError(f"Missing axis names for parameters: {missing}")  # T5X's message.
  fields = {
    "params": variables.pop("params"),
    "params_axes": all_axes.pop("params", None),
    "flax_mutables": variables,
    "flax_mutables_axes": all_axes or None,
  }
  return {n: x if x is None else _like(model_variables, x) for n, x in fields.items()}


def _like(model_variables: PyTree, tree: PyTree) -> PyTree:
  """Returns a nested dict that is frozen if `model_variables` is."""
  return freeze(tree) if isinstance(model_variables, FrozenDict) else unfreeze(tree)


def param_axis_names(params_axes: PyTree) -> PyTree:
  """Returns the logical axis names of each parameter; raises ValueError if the module has none."""
  if params_axes is None:
    raise ValueError(
      "the model's parameters have no logical axes, so they cannot be partitioned. Create them "
      "with flax.linen.partitioning.param_with_axes(name, init, shape, dtype, axes=(...))"
    )
  return flax_partitioning.get_axis_names(params_axes)


def _mutables_axis_names(mutables: PyTree, mutables_axes: PyTree) -> PyTree:
  names = jax.tree.map(lambda _: None, unfreeze(mutables))
  for name, axes in (mutables_axes or {}).items():
    names[name] = flax_partitioning.get_axis_names(axes)
  return _like(mutables, names)
