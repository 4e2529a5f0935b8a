"""The interface of an optimizer, as in T5X (there: the legacy flax optimizers)."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import serialization, struct
from flax.core import FrozenDict, freeze, unfreeze
from flax.traverse_util import empty_node, flatten_dict, unflatten_dict

PyTree = Any


def path_name(path: Sequence[Any]) -> str:
  """Formats a jax key path as 'encoder/mlp/wi/kernel'."""
  return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def axes_by_path(param_logical_axes: PyTree) -> dict[str, Any]:
  """Returns the axis names (a PartitionSpec, a tuple, or None) of each parameter by path."""
  leaves = jax.tree_util.tree_leaves_with_path(
    param_logical_axes, is_leaf=lambda node: node is None or isinstance(node, tuple)
  )
  return {path_name(path): names for path, names in leaves}


def axes_like(params: PyTree, param_logical_axes: PyTree) -> PyTree:
  """Returns a tree like `params` with the axis names of each leaf; None for a leaf without names."""
  by_path = axes_by_path(param_logical_axes)
  return jax.tree_util.tree_map_with_path(lambda path, _: by_path.get(path_name(path)), params)


def replace_part(tree: PyTree, part: PyTree) -> PyTree:
  """Returns a nested dict with other values for a part of it, frozen if it is."""
  merged = unflatten_dict({**flatten_dict(unfreeze(tree)), **flatten_dict(unfreeze(part))})
  return freeze(merged) if isinstance(tree, FrozenDict) else merged


class HyperParams(types.SimpleNamespace):
  """The hyperparameters of an optimizer by name."""

  def replace(self, **changes: Any) -> HyperParams:
    """Returns the hyperparameters with other values for some of them."""
    return HyperParams(**{**vars(self), **changes})


class OptimizerState(struct.PyTreeNode):
  """The state of an optimizer.

  Attributes:
    step: int32 scalar, the number of completed steps; None in a tree of axis names.
    param_states: a pytree whose structure the optimizer chooses.
  """

  step: Any
  param_states: PyTree


class StepLoss(NamedTuple):
  """The loss of a step, for optimizers that read more of it than its gradient.

  Attributes:
    value: the loss of the batch.
    of_first_microbatch: (parameters, further variable collections = None) → the loss of the first
      microbatch. Its dropout is that of the step if there are no others.
    num_microbatches: the number of microbatches, over which the loss is summed.
  """

  value: jax.Array
  of_first_microbatch: Callable[..., jax.Array]
  num_microbatches: int


class OptimizerDef:
  """The rule of an optimizer and its hyperparameters; the state is separate (see `Optimizer`).

  A subclass implements `init_state`, `apply_gradient` and `derive_logical_axes`. It overrides
  `set_param_axes` if its rule depends on the parameters' logical axes, and implements
  `init_param_state` if `MultiOptimizer` can use it.

  Attributes:
    hyper_params: the hyperparameters, which include `learning_rate`: `HyperParams` or a flax struct.
    uses_learning_rate: whether the learning rate that the trainer passes has an effect.
    uses_loss: whether the trainer also sets the hyperparameter `loss`, a `StepLoss`.
    max_skipped_steps: the number of skipped steps in a row (`telemetry.run_metrics.skips_in_a_row`)
      after which the run restores the last checkpoint before them; None for no limit.
    max_restorations: how often the run restores the same checkpoint before it ends with an error.
  """

  uses_learning_rate = True
  uses_loss = False
  max_skipped_steps: int | None = None
  max_restorations: int = 3

  def __init__(self, hyper_params: Any):
    self.hyper_params = hyper_params

  def init_state(self, params: PyTree) -> OptimizerState:
    """Returns the state of step 0 for `params`."""
    raise NotImplementedError

  def init_param_state(self, param: Any, path: str) -> Any:
    """Returns the state of one parameter at step 0, if the state is one state per parameter."""
    raise NotImplementedError

  def set_param_axes(self, param_logical_axes: PyTree) -> None:
    """Gets the names of the parameters' logical axes before `init_state`; ignores them here."""

  def apply_gradient(
    self, hyper_params: Any, params: PyTree, state: OptimizerState, grads: PyTree
  ) -> tuple[PyTree, OptimizerState]:
    """Returns the parameters and the state after one step with `grads`, a tree like `trained(params)`."""
    raise NotImplementedError

  def trained(self, params: PyTree) -> PyTree:
    """Returns the part of a nested dict of parameters that has gradients; all of it here."""
    return params

  def added_values(self, params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns initial values of trained parameters that checkpoints of the network lack; none here.

    Args:
      params: the parameters by name, such as encoder/layers_0/attention/query/kernel.
    """
    return {}

  def params_to_evaluate(self, params: PyTree, param_states: PyTree) -> PyTree:
    """Returns the parameters of evaluations and predictions, such as an average; `params` here."""
    return params

  def derive_logical_axes(self, optimizer: Optimizer, param_logical_axes: PyTree) -> Optimizer:
    """Returns `optimizer` with axis names, or None, in place of arrays."""
    raise ValueError(
      f"optimizer {type(self).__name__} has no method derive_logical_axes, so its state cannot be "
      "partitioned"
    )

  def update_hyper_params(self, **hyper_param_overrides: Any) -> Any:
    """Returns the hyperparameters with some replaced, or all of them by `hyper_params=...`."""
    hyper_params = hyper_param_overrides.pop("hyper_params", self.hyper_params)
    if not self.uses_loss:
      hyper_param_overrides.pop("loss", None)
    return hyper_params.replace(**hyper_param_overrides) if hyper_param_overrides else hyper_params

  def create(self, target: PyTree) -> Optimizer:
    """Returns this optimizer with the parameters `target` and their initial state."""
    return Optimizer(optimizer_def=self, state=self.init_state(target), target=target)

  def state_dict(self, target: PyTree, state: OptimizerState) -> dict[str, Any]:
    """Returns parameters and state as the nested dict of a T5X checkpoint.

    Lists and tuples become dicts with the keys "0", "1", ...; parts without arrays are omitted.
    """
    stored_state = flatten_dict(serialization.to_state_dict(state))
    present = {path: value for path, value in stored_state.items() if value is not None}
    return {"target": serialization.to_state_dict(target), "state": unflatten_dict(present)}

  def restore_state(
    self, opt_target: PyTree, opt_state: OptimizerState, state_dict: Mapping[str, Any]
  ) -> tuple[PyTree, OptimizerState]:
    """Returns `opt_target` and `opt_state` with the values of a `state_dict()`.

    Raises:
      ValueError: `state_dict` belongs to another optimizer: names are missing or unknown.
    """
    names = flatten_dict(serialization.to_state_dict(opt_state), keep_empty_nodes=True)
    filled = {path: value for path, value in names.items() if value is empty_node or value is None}
    filled |= flatten_dict(serialization.to_state_dict(state_dict["state"]))
    target = serialization.from_state_dict(opt_target, state_dict["target"])
    return target, serialization.from_state_dict(opt_state, unflatten_dict(filled))


class Optimizer(struct.PyTreeNode):
  """An optimizer, its state and the parameters that it optimizes, as one pytree.

  Attributes:
    optimizer_def: the rule; static.
    state: the optimizer's state.
    target: the parameters.
  """

  optimizer_def: OptimizerDef = struct.field(pytree_node=False)
  state: OptimizerState
  target: PyTree

  def apply_gradient(self, grads: PyTree, **hyper_param_overrides: Any) -> Optimizer:
    """Returns the optimizer after one step; overrides replace hyperparameters for this step."""
    hyper_params = self.optimizer_def.update_hyper_params(**hyper_param_overrides)
    target, state = self.optimizer_def.apply_gradient(hyper_params, self.target, self.state, grads)
    return self.replace(target=target, state=state)

  def state_dict(self) -> dict[str, Any]:
    """Returns parameters and state as a nested dict (see `OptimizerDef.state_dict`)."""
    return self.optimizer_def.state_dict(self.target, self.state)

  def restore_state(self, state: Mapping[str, Any]) -> Optimizer:
    """Returns the optimizer with the values of a `state_dict()`; raises ValueError for other names."""
    target, restored = self.optimizer_def.restore_state(self.target, self.state, state)
    return self.replace(target=target, state=restored)
