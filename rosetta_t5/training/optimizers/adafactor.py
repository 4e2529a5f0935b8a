"""Adafactor (Shazeer and Stern 2018, arXiv:1804.04235) with T5X's factor rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec

from rosetta_t5.argument_types import NonNegativeNumber, Positive, PositiveNumber, Probability, Rate
from rosetta_t5.networks.gpu_fusion import global_norm
from rosetta_t5.training.optimizers import factor_rules, optimizer_def
from rosetta_t5.training.optimizers.factor_rules import FactorDim, FactorDims, HParamMap
from rosetta_t5.training.optimizers.optimizer_def import Optimizer, OptimizerDef, OptimizerState

PyTree = Any


class AdafactorParamState(struct.PyTreeNode):
  """The moments of one parameter in float32. Unused moments are zeros of shape (1,).

  In a tree of axis names, the moments are PartitionSpecs or None.

  Attributes:
    v_row: for factored parameters, the second moment averaged over the column dimensions.
    v_col: for factored parameters, the second moment averaged over the row dimensions.
    v: for other parameters, the second moment.
    m: with `beta1`, the momentum.
  """

  v_row: Any
  v_col: Any
  v: Any
  m: Any


class Adafactor(OptimizerDef):
  """Adafactor, the optimizer of T5.

  Args:
    learning_rate: the learning rate; the trainer's schedule overrides it.
    factored: whether the second moment of large matrices is stored as rows and columns.
    multiply_by_parameter_scale: whether the learning rate is relative to the RMS of the parameter,
      as a bool or a map from parameter paths to bools.
    beta1: the decay of the momentum; None for no momentum, which saves a copy of the parameters.
    decay_rate: the decay of the second moment at step t is 1 − t^(−decay_rate).
    step_offset: the step at which t starts, so that finetuning can restart its averages.
    clipping_threshold: the maximum RMS of an update before scaling; None for no limit.
    weight_decay_rate: the fraction of a parameter that each step subtracts; None for no decay.
    min_dim_size_to_factor: a matrix is factored if both dimensions are at least this large.
    epsilon1: a constant added to the squared gradient.
    epsilon2: the minimum scale of a parameter.
    dtype_momentum: the dtype in which momentum is stored.
    factor_map: factor rules by parameter path; `set_param_axes` replaces them.
    logical_factor_rules: the role of each logical axis (see `standard_logical_factor_rules`).
    weight_decay_rate_lr_exponent: multiplies the weight decay by learning_rate ** exponent.
    global_norm_clip_threshold: the maximum global norm of the gradients; None for no limit.
    max_parameter_scale: the maximum scale of a parameter; None for no limit.
    skip_nan_updates: whether values stay unchanged where the new ones would be NaN.

  Raises:
    ValueError: `factor_map` is set although `factored` is False.
  """

  def __init__(
    self,
    learning_rate: NonNegativeNumber | None = None,
    factored: bool = True,
    multiply_by_parameter_scale: bool | HParamMap = True,
    beta1: Rate | None = None,
    decay_rate: Probability = 0.8,
    step_offset: int = 0,
    clipping_threshold: PositiveNumber | None = 1.0,
    weight_decay_rate: NonNegativeNumber | None = None,
    min_dim_size_to_factor: Positive = 128,
    epsilon1: NonNegativeNumber = 1e-30,
    epsilon2: NonNegativeNumber = 1e-3,
    dtype_momentum: Any = jnp.float32,
    factor_map: HParamMap | None = None,
    logical_factor_rules: Mapping[str, FactorDim | str] | None = None,
    weight_decay_rate_lr_exponent: float | None = None,
    global_norm_clip_threshold: PositiveNumber | None = None,
    max_parameter_scale: PositiveNumber | None = None,
    skip_nan_updates: bool = False,
  ):
    given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
    if not factored and factor_map is not None:
      raise ValueError(
        "Adafactor.factor_map has no effect with factored = False: remove one of the two"
      )
    self.dtype_momentum = jnp.dtype(given.pop("dtype_momentum"))
    super().__init__(optimizer_def.HyperParams(**given))

  def set_param_axes(self, param_logical_axes: PyTree) -> None:
    """Derives the factor rules from the parameters' logical axes, if `logical_factor_rules` is set.

    Raises:
      ValueError: an axis has no rule (see `rules_from_axes`).
    """
    roles = self.hyper_params.logical_factor_rules
    if roles is not None:
      rules = factor_rules.rules_from_axes(param_logical_axes, roles)
      self.hyper_params = self.hyper_params.replace(factor_map=rules)

  def init_state(self, params: PyTree) -> OptimizerState:
    """Returns zero moments for each parameter; raises ValueError if a rule does not fit."""
    states = jax.tree_util.tree_map_with_path(
      lambda path, param: self.init_param_state(param, optimizer_def.path_name(path)), params
    )
    return OptimizerState(jnp.zeros((), jnp.int32), states)

  def init_param_state(self, param: jax.Array, path: str) -> AdafactorParamState:
    """Returns the zero moments of one parameter."""
    dims = self._dims(param.shape, path)
    unused = (1,)
    v_row = tuple(np.delete(param.shape, dims.col)) if dims.factored else unused
    v_col = tuple(np.delete(param.shape, dims.row)) if dims.factored else unused
    has_momentum = self.hyper_params.beta1 is not None
    return AdafactorParamState(
      v_row=jnp.zeros(v_row, jnp.float32),
      v_col=jnp.zeros(v_col, jnp.float32),
      v=jnp.zeros(unused if dims.factored else param.shape, jnp.float32),
      m=jnp.zeros(param.shape, self.dtype_momentum) if has_momentum else jnp.zeros(unused),
    )

  def apply_gradient(
    self, hyper_params: Any, params: PyTree, state: OptimizerState, grads: PyTree
  ) -> tuple[PyTree, OptimizerState]:
    """Returns the parameters and the state after one step with `grads`, a tree like `params`."""
    if threshold := hyper_params.global_norm_clip_threshold:
      norm = global_norm(grads)
      grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, threshold / norm), grads)

    def update(path: Any, param: jax.Array, moments: Any, grad: jax.Array) -> tuple:
      return self.apply_param_gradient(
        state.step, hyper_params, param, moments, grad, optimizer_def.path_name(path)
      )

    updated = jax.tree_util.tree_map_with_path(update, params, state.param_states, grads)
    structure: Any = jax.tree.structure(params)
    new_params, new_states = zip(*structure.flatten_up_to(updated), strict=True)
    new_state = OptimizerState(state.step + 1, structure.unflatten(new_states))
    return structure.unflatten(new_params), new_state

  def apply_param_gradient(
    self,
    step: jax.Array,
    hyper_params: Any,
    param: jax.Array,
    state: AdafactorParamState,
    grad: jax.Array,
    path: str,
  ) -> tuple[jax.Array, AdafactorParamState]:
    """Returns one parameter and its moments after the step that follows `step` completed steps."""
    dims = self._dims(param.shape, path)
    grad = grad.astype(jnp.float32)
    age = jnp.asarray(step - hyper_params.step_offset, jnp.float32) + 1.0
    decay = 1.0 - age ** (-hyper_params.decay_rate)
    new_state = _second_moment(grad, state, decay, dims, hyper_params.epsilon1)
    # The order of multiplications is T5X's: the reference run amplifies rounding errors 2000-fold.
    scale = self._step_size(hyper_params, param, dims, path)
    if hyper_params.clipping_threshold is not None:
      # XLA for CPU would write a product that two reductions and an update share to memory, which takes
      # longer than to compute it again.
      grad_copy, state_copy = jax.lax.optimization_barrier((grad, new_state))
      rms = _rms(_precondition(grad_copy, state_copy, dims), dims.averaged)
      scale = scale / jnp.maximum(1.0, rms / hyper_params.clipping_threshold)
    update = _precondition(grad, new_state, dims) * scale
    if hyper_params.beta1 is not None:
      update = hyper_params.beta1 * state.m + (1.0 - hyper_params.beta1) * update
      new_state = new_state.replace(m=update.astype(self.dtype_momentum))
    weight_decay = hyper_params.weight_decay_rate
    if exponent := hyper_params.weight_decay_rate_lr_exponent:
      weight_decay = (weight_decay or 1.0) * hyper_params.learning_rate**exponent
    new_param = (param if weight_decay is None else (1.0 - weight_decay) * param) - update
    if hyper_params.skip_nan_updates:
      new_param, new_state = jax.tree.map(
        lambda new, old: jnp.where(jnp.isnan(new), old, new), (new_param, new_state), (param, state)
      )
    return new_param.astype(param.dtype), new_state

  def derive_logical_axes(self, optimizer: Optimizer, param_logical_axes: PyTree) -> Optimizer:
    """Returns `optimizer` with axis names: the parameter's for `v` and `m`.

    Of factored moments, which are small, only those of experts are split.
    """

    def axes_of(path: Any, param: Any, names: Any, moments: Any) -> AdafactorParamState:
      # Optimizers written for T5X give the axis names as the target, which have no shape.
      has_shape = hasattr(param, "shape")
      dims = self._dims(param.shape, optimizer_def.path_name(path)) if has_shape else FactorDims(())
      return AdafactorParamState(
        v_row=_expert_axes(names, dims.col),
        v_col=_expert_axes(names, dims.row),
        v=None if moments.v.shape == (1,) else names,
        m=None if self.hyper_params.beta1 is None else names,
      )

    target, moments = optimizer.target, optimizer.state.param_states
    names = optimizer_def.axes_like(target, param_logical_axes)
    axes = jax.tree_util.tree_map_with_path(axes_of, target, names, moments)
    return optimizer.replace(state=OptimizerState(None, axes), target=param_logical_axes)

  def _dims(self, shape: tuple[int, ...], path: str) -> FactorDims:
    """Returns the roles of the dimensions of one parameter."""
    hyper_params, rule = self.hyper_params, None
    if hyper_params.factored:
      rules = hyper_params.factor_map
      rule = rules[path] if rules else factor_rules.HEURISTIC_RULE
    return factor_rules.resolve(rule, shape, path, hyper_params.min_dim_size_to_factor)

  def _step_size(
    self, hyper_params: Any, param: jax.Array, dims: FactorDims, path: str
  ) -> jax.Array:
    """Returns the learning rate, multiplied by the parameter's scale if it is relative."""
    relative = hyper_params.multiply_by_parameter_scale
    if isinstance(relative, HParamMap):
      relative = relative[path]
    learning_rate = jnp.asarray(hyper_params.learning_rate, jnp.float32)
    if not relative:
      return learning_rate
    scale = jnp.maximum(_rms(param.astype(jnp.float32), dims.averaged), hyper_params.epsilon2)
    if hyper_params.max_parameter_scale is not None:
      scale = jnp.minimum(scale, hyper_params.max_parameter_scale)
    return learning_rate * scale


def _second_moment(
  grad: jax.Array, state: AdafactorParamState, decay: jax.Array, dims: FactorDims, epsilon: float
) -> AdafactorParamState:
  """Returns the state with the squared gradient added to its moving averages."""

  def average(old: jax.Array, new: jax.Array) -> jax.Array:
    return decay * old + (1.0 - decay) * (new + epsilon)

  if not dims.factored:
    return state.replace(v=average(state.v, grad * grad))
  copy = jax.lax.optimization_barrier(grad)  # See `apply_param_gradient`.
  return state.replace(
    v_row=average(state.v_row, jnp.mean(grad * grad, axis=dims.col)),
    v_col=average(state.v_col, jnp.mean(copy * copy, axis=dims.row)),
  )


def _precondition(grad: jax.Array, state: AdafactorParamState, dims: FactorDims) -> jax.Array:
  """Returns `grad` divided by the square root of its second moment."""
  if not dims.factored:
    return grad * jax.lax.rsqrt(state.v)
  row = jnp.expand_dims(state.v_row, dims.col)
  row_factor = jax.lax.rsqrt(row / jnp.mean(row, axis=dims.row, keepdims=True))
  return grad * row_factor * jax.lax.rsqrt(jnp.expand_dims(state.v_col, dims.row))


def _expert_axes(names: Any, averaged: tuple[int, ...]) -> PartitionSpec | None:
  """Returns the axes of a factored moment of stacked experts: `expert`, and None for other dimensions.

  Args:
    names: the axes of the parameter.
    averaged: the dimensions that the moment does not have; empty if it is not factored.
  """
  if not averaged or "expert" not in (names or ()):
    return None
  kept = (name for dim, name in enumerate(names) if dim not in averaged)
  return PartitionSpec(*(name if name == "expert" else None for name in kept))


def _rms(x: jax.Array, axis: tuple[int, ...]) -> jax.Array:
  """Returns the root mean square over `axis`, whose dimensions become 1."""
  return jnp.sqrt(jnp.mean(x * x, axis=axis, keepdims=True))
