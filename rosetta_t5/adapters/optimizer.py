"""The optimizer of a model with an adapter, which updates the trained parameters only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax.core import unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict

from rosetta_t5.adapters.adapter import Adapter, PyTree
from rosetta_t5.training.optimizers.optimizer_def import (
  Optimizer,
  OptimizerDef,
  OptimizerState,
  replace_part,
)


class AdapterOptimizer(OptimizerDef):
  """An optimizer of the parameters that an adapter trains; its state is that of a smaller network.

  Args:
    optimizer: the optimizer of these parameters.
    adapter: the adapter.
  """

  def __init__(self, optimizer: OptimizerDef, adapter: Adapter):
    self.optimizer, self.adapter = optimizer, adapter
    self.uses_learning_rate, self.uses_loss = optimizer.uses_learning_rate, optimizer.uses_loss
    self.max_skipped_steps = optimizer.max_skipped_steps
    self.max_restorations = optimizer.max_restorations
    super().__init__(optimizer.hyper_params)

  def trained(self, params: PyTree) -> PyTree:
    """Returns the parameters that the adapter trains."""
    paths = flatten_dict(unfreeze(params))
    return unflatten_dict({p: x for p, x in paths.items() if self.adapter.is_trained("/".join(p))})

  def added_values(self, params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the initial values of the parameters that the adapter adds."""
    return self.adapter.added_values(dict(params))

  def init_state(self, params: PyTree) -> OptimizerState:
    """Returns the state of step 0 of the trained parameters."""
    return self.optimizer.init_state(self.trained(params))

  def apply_gradient(
    self, hyper_params: Any, params: PyTree, state: OptimizerState, grads: PyTree
  ) -> tuple[PyTree, OptimizerState]:
    """Returns the parameters, of which the trained ones changed, and the state after one step."""
    part, state = self.optimizer.apply_gradient(hyper_params, self.trained(params), state, grads)
    return replace_part(params, part), state

  def params_to_evaluate(self, params: PyTree, param_states: PyTree) -> PyTree:
    """Returns the parameters that the optimizer evaluates, and the frozen ones."""
    part = self.optimizer.params_to_evaluate(self.trained(params), param_states)
    return replace_part(params, part)

  def update_hyper_params(self, **hyper_param_overrides: Any) -> Any:
    """Returns the optimizer's hyperparameters with some replaced."""
    return self.optimizer.update_hyper_params(**hyper_param_overrides)

  def set_param_axes(self, param_logical_axes: PyTree) -> None:
    """Passes the names of the trained parameters' logical axes on."""
    self.optimizer.set_param_axes(self.trained(param_logical_axes))

  def derive_logical_axes(self, optimizer: Optimizer, param_logical_axes: PyTree) -> Optimizer:
    """Returns `optimizer` with axis names, or None, in place of arrays."""
    part = Optimizer(self.optimizer, optimizer.state, self.trained(optimizer.target))
    axes = self.optimizer.derive_logical_axes(part, self.trained(param_logical_axes))
    return optimizer.replace(state=axes.state, target=param_logical_axes)
