"""The contract between a training step and an optimizer, as T5X has it (there: legacy flax optimizers)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from flax import serialization, struct
from flax.traverse_util import empty_node, flatten_dict, unflatten_dict

PyTree = Any


class OptimizerState(struct.PyTreeNode):
  """What an optimizer carries from step to step.

  Attributes:
    step: int32 scalar, the number of updates made; None in a tree of axis names.
    param_states: a pytree of the optimizer's own choosing.
  """

  step: Any
  param_states: PyTree


class OptimizerDef:
  """An optimizer's rule and its hyper-parameters; the state lives outside (see `Optimizer`).

  A subclass gives `init_state`, `apply_gradient` and `derive_logical_axes`, and `set_param_axes` where
  its rule depends on the names of the parameters' axes.

  Attributes:
    hyper_params: a flax struct of the rule's numbers; `learning_rate` among them.
    uses_learning_rate: whether the learning rate that the trainer passes has any effect.
  """

  uses_learning_rate = True

  def __init__(self, hyper_params: Any):
    self.hyper_params = hyper_params

  def init_state(self, params: PyTree) -> OptimizerState:
    """Returns the state of step 0 for `params`."""
    raise NotImplementedError

  def apply_gradient(
    self, hyper_params: Any, params: PyTree, state: OptimizerState, grads: PyTree
  ) -> tuple[PyTree, OptimizerState]:
    """Returns the parameters and the state after one update with `grads`, a tree like `params`."""
    raise NotImplementedError

  def update_hyper_params(self, **hyper_param_overrides: Any) -> Any:
    """Returns the hyper-parameters with some replaced, or all of them by `hyper_params=...`."""
    hyper_params = hyper_param_overrides.pop("hyper_params", self.hyper_params)
    return hyper_params.replace(**hyper_param_overrides) if hyper_param_overrides else hyper_params

  def create(self, target: PyTree) -> Optimizer:
    """Returns this optimizer joined with the parameters `target` and their initial state."""
    return Optimizer(optimizer_def=self, state=self.init_state(target), target=target)

  def state_dict(self, target: PyTree, state: OptimizerState) -> dict[str, Any]:
    """Returns parameters and state as the nested dict of a T5X checkpoint.

    Lists and tuples become dicts with the keys "0", "1", ...; what holds no array is left out.
    """
    stored_state = flatten_dict(serialization.to_state_dict(state))
    present = {path: value for path, value in stored_state.items() if value is not None}
    return {"target": serialization.to_state_dict(target), "state": unflatten_dict(present)}

  def restore_state(
    self, opt_target: PyTree, opt_state: OptimizerState, state_dict: Mapping[str, Any]
  ) -> tuple[PyTree, OptimizerState]:
    """Returns `opt_target` and `opt_state` with the values of a `state_dict()`.

    Raises:
      ValueError: `state_dict` is of another optimizer: names are missing or not known here.
    """
    target = serialization.from_state_dict(opt_target, state_dict["target"])
    wanted = flatten_dict(serialization.to_state_dict(opt_state), keep_empty_nodes=True)
    given = flatten_dict(serialization.to_state_dict(state_dict["state"]))
    _check_names(wanted, given)
    filled = {path: given.get(path, default) for path, default in wanted.items()}
    return target, serialization.from_state_dict(opt_state, unflatten_dict(filled))


class Optimizer(struct.PyTreeNode):
  """An optimizer, its state and the parameters it optimises, as one pytree.

  Attributes:
    optimizer_def: the rule; static.
    state: the optimizer's state.
    target: the parameters.
  """

  optimizer_def: OptimizerDef = struct.field(pytree_node=False)
  state: OptimizerState = struct.field(pytree_node=True)
  target: PyTree = struct.field(pytree_node=True)

  def apply_gradient(self, grads: PyTree, **hyper_param_overrides: Any) -> Optimizer:
    """Returns the optimizer after one update; overrides replace hyper-parameters for this step."""
    hyper_params = self.optimizer_def.update_hyper_params(**hyper_param_overrides)
    target, state = self.optimizer_def.apply_gradient(hyper_params, self.target, self.state, grads)
    return self.replace(target=target, state=state)

  def state_dict(self) -> dict[str, Any]:
    """Returns parameters and state as a nested dict (see `OptimizerDef.state_dict`)."""
    return self.optimizer_def.state_dict(self.target, self.state)

  def restore_state(self, state: Mapping[str, Any]) -> Optimizer:
    """Returns the optimizer with the values of a `state_dict()`; raises ValueError on other names."""
    target, restored = self.optimizer_def.restore_state(self.target, self.state, state)
    return self.replace(target=target, state=restored)


OptimizerType = Optimizer
OptimizerStateType = OptimizerState | Mapping[str, Any]
OptimizerDefType = OptimizerDef


def _check_names(wanted: Mapping[tuple, Any], given: Mapping[tuple, Any]) -> None:
  """Raises ValueError unless `given` holds every array of `wanted` and nothing else."""
  may_lack = {path for path, value in wanted.items() if value is empty_node or value is None}
  missing = ["/".join(path) for path in wanted if path not in given and path not in may_lack]
  unknown = ["/".join(path) for path in given if path not in wanted]
  if not missing and not unknown:
    return
  faults = [f"{name!r} is missing{_nearest(name, unknown)}" for name in missing[:3]]
  faults += [f"{name!r} is not known here" for name in unknown[: 3 if not missing else 1]]
  raise ValueError(
    f"the stored optimizer state is of another optimizer or model: {'; '.join(faults)} "
    f"({len(missing)} missing, {len(unknown)} unknown in all). Set OPTIMIZER to the one that wrote "
    "it, or restore the parameters only"
  )


def _nearest(name: str, candidates: list[str]) -> str:
  near = difflib.get_close_matches(name, candidates, n=1)
  return f" (stored: {near[0]!r})" if near else ""
