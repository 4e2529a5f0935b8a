"""Adafactor (Shazeer and Stern 2018, arXiv:1804.04235) with T5X's factor rules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec

from rosetta_t5.argument_types import NonNegativeNumber, Positive, PositiveNumber, Probability, Rate
from rosetta_t5.networks.gpu_fusion import global_norm, sums_of_squares, with_common_factor
from rosetta_t5.parallel.placement import target_device
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
    self._axes: dict[str, Any] = {}  # the logical axes of each parameter, where they are known

  def set_param_axes(self, param_logical_axes: PyTree) -> None:
    """Derives the factor rules from the parameters' logical axes, if `logical_factor_rules` is set.

    Raises:
      ValueError: an axis has no rule (see `rules_from_axes`).
    """
    self._axes = optimizer_def.axes_by_path(param_logical_axes)
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

    structure: Any = jax.tree.structure(params)
    names = [optimizer_def.path_name(path) for path, _ in jax.tree.leaves_with_path(params)]
    trees = (structure.flatten_up_to(tree) for tree in (params, state.param_states, grads))
    values = list(zip(*trees, strict=True))
    groups: dict[Any, list[int]] = {}
    for number, (path, (param, *_)) in enumerate(zip(names, values, strict=True)):
      groups.setdefault(self._group_key(hyper_params, path, param), []).append(number)
    updated: dict[int, Any] = {}
    for first, *others in groups.values():
      if others:
        group = [values[number] for number in (first, *others)]
        results = self._apply_gradients(state.step, hyper_params, group, names[first])
        updated |= zip((first, *others), results, strict=True)
      else:
        param, moments, grad = values[first]
        updated[first] = self.apply_param_gradient(
          state.step, hyper_params, param, moments, grad, names[first]
        )
    new_params, new_states = zip(*(updated[number] for number in range(len(names))), strict=True)
    new_state = OptimizerState(state.step + 1, structure.unflatten(new_states))
    return structure.unflatten(new_params), new_state

  def _group_key(self, hyper_params: Any, path: str, param: jax.Array) -> Any:
    """Returns a key; parameters with equal keys are updated together.

    On a GPU they are those with the same shape, axes and rules, which few kernels then update. On a CPU each parameter
    has a key of its own, because joining them gains nothing; so it has where a user overrides `apply_param_gradient`.
    """
    rule = getattr(self.apply_param_gradient, "__func__", None)
    if rule is not Adafactor.apply_param_gradient or target_device().platform != "gpu":
      return path
    dims, is_relative = self._dims(param.shape, path), self._is_relative(hyper_params, path)
    return param.shape, str(self._axes.get(path)), dims, is_relative

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
    return self._apply_gradients(step, hyper_params, [(param, state, grad)], path)[0]

  def _apply_gradients(
    self, step: jax.Array, hyper_params: Any, group: Sequence[Any], path: str
  ) -> list[tuple[jax.Array, AdafactorParamState]]:
    """Returns the new (parameter, state) for each (parameter, state, gradient) of a group; `path` is that of one."""
    params, states, raw_grads = zip(*group, strict=True)
    grads = [grad.astype(jnp.float32) for grad in raw_grads]
    dims = self._dims(params[0].shape, path)
    age = jnp.asarray(step - hyper_params.step_offset, jnp.float32) + 1.0
    decay = 1.0 - age ** (-hyper_params.decay_rate)
    new_states = _second_moments(grads, states, decay, dims, hyper_params.epsilon1)
    # The order of multiplications is T5X's: the reference run amplifies rounding errors 2000-fold.
    scales = self._step_sizes(hyper_params, params, dims, path)
    if hyper_params.clipping_threshold is not None:
      grad_copies, state_copies = _read_again((grads, new_states))
      rms = _rms(_precondition(grad_copies, state_copies, dims), dims.averaged)
      scales = scales / jnp.maximum(1.0, rms / hyper_params.clipping_threshold)
    weight_decay = hyper_params.weight_decay_rate
    if exponent := hyper_params.weight_decay_rate_lr_exponent:
      weight_decay = (weight_decay or 1.0) * hyper_params.learning_rate**exponent
    results = []
    directions = _precondition(grads, new_states, dims)
    values = zip(params, states, new_states, directions, scales, strict=True)
    for param, state, new_state, direction, scale in values:
      update = direction * scale
      if hyper_params.beta1 is not None:
        update = hyper_params.beta1 * state.m + (1.0 - hyper_params.beta1) * update
        new_state = new_state.replace(m=update.astype(self.dtype_momentum))
      new_param = (param if weight_decay is None else (1.0 - weight_decay) * param) - update
      if hyper_params.skip_nan_updates:
        new_param, new_state = jax.tree.map(
          lambda new, old: jnp.where(jnp.isnan(new), old, new),
          (new_param, new_state),
          (param, state),
        )
      results.append((new_param.astype(param.dtype), new_state))
    return results

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

  def _is_relative(self, hyper_params: Any, path: str) -> bool:
    """Returns whether the learning rate of a parameter is relative to its scale."""
    relative = hyper_params.multiply_by_parameter_scale
    return bool(relative[path] if isinstance(relative, HParamMap) else relative)

  def _step_sizes(
    self, hyper_params: Any, params: Sequence[jax.Array], dims: FactorDims, path: str
  ) -> jax.Array:
    """Returns the learning rate of each parameter, [N, ...]; averaged dimensions have the size 1."""
    learning_rate = jnp.asarray(hyper_params.learning_rate, jnp.float32)
    if not self._is_relative(hyper_params, path):
      return jnp.full((len(params), *[1] * params[0].ndim), learning_rate)
    values = with_common_factor([param.astype(jnp.float32) for param in params])
    scales = jnp.maximum(_rms(values, dims.averaged), hyper_params.epsilon2)
    if hyper_params.max_parameter_scale is not None:
      scales = jnp.minimum(scales, hyper_params.max_parameter_scale)
    return learning_rate * scales


def _second_moments(
  grads: Sequence[jax.Array],
  states: Sequence[AdafactorParamState],
  decay: jax.Array,
  dims: FactorDims,
  epsilon: float,
) -> list[AdafactorParamState]:
  """Returns the states with the squared gradients added to their moving averages."""

  def average(old: jax.Array, new: jax.Array) -> jax.Array:
    return decay * old + (1.0 - decay) * (new + epsilon)

  if not dims.factored:
    pairs = zip(states, grads, strict=True)
    return [state.replace(v=average(state.v, grad * grad)) for state, grad in pairs]
  old = with_common_factor([(state.v_row, state.v_col) for state in states])
  rows = _mean_squares(grads, dims.col).squeeze([dim + 1 for dim in dims.col])
  cols = _mean_squares(_read_again(grads), dims.row).squeeze([dim + 1 for dim in dims.row])
  return [
    state.replace(v_row=average(v_row, row), v_col=average(v_col, col))
    for state, (v_row, v_col), row, col in zip(states, old, rows, cols, strict=True)
  ]


def _precondition(
  grads: Sequence[jax.Array], states: Sequence[AdafactorParamState], dims: FactorDims
) -> list[jax.Array]:
  """Returns each gradient divided by the square root of its second moment."""
  if not dims.factored:
    return [grad * jax.lax.rsqrt(state.v) for grad, state in zip(grads, states, strict=True)]
  rows = jnp.stack([jnp.expand_dims(state.v_row, dims.col) for state in states])
  cols = jnp.stack([jnp.expand_dims(state.v_col, dims.row) for state in states])
  means = jnp.mean(rows, axis=[dim + 1 for dim in dims.row], keepdims=True)
  factors = jax.lax.rsqrt(rows / means), jax.lax.rsqrt(cols)
  if target_device().platform == "gpu":
    factors = jax.lax.optimization_barrier(factors)
  return [grad * row * col for grad, row, col in zip(grads, *factors, strict=True)]


def _read_again(tree: PyTree) -> PyTree:
  """Returns the arrays such that XLA for CPUs computes anew what it has already computed from them.

  XLA for CPU would write a product that two reductions and an update share to memory, which takes longer than to
  compute it again.
  """
  return tree if target_device().platform == "gpu" else jax.lax.optimization_barrier(tree)


def _rms(arrays: Sequence[jax.Array], axis: tuple[int, ...]) -> jax.Array:
  """Returns the root mean square of each array over `axis`, whose dimensions become 1: [N, ...]."""
  return jnp.sqrt(_mean_squares(arrays, axis))


def _mean_squares(arrays: Sequence[jax.Array], axis: tuple[int, ...]) -> jax.Array:
  """Returns the mean square of each array over `axis`, whose dimensions become 1: [N, ...]."""
  return sums_of_squares(arrays, axis) / math.prod(arrays[0].shape[dim] for dim in axis)


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
