"""Optax transformations as optimizers with T5X's interface, and T5X's names for them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
import optax
from flax import struct

from rosetta_t5.argument_types import Rate
from rosetta_t5.training.optimizers.optimizer_def import (
  Optimizer,
  OptimizerDef,
  OptimizerState,
  StepLoss,
)
from rosetta_t5.training.optimizers.param_paths import axes_like
from rosetta_t5.training.optimizers.second_order.matrices import Factors, matrix_dims

PyTree = Any
Args = ParamSpec("Args")
# Called with a learning rate and the parameters' logical axes, or None for no axes.
MakeTransformation = Callable[[Any, PyTree], optax.GradientTransformation]


class OptaxWrapperHyperParams(struct.PyTreeNode):
  """What the trainer sets. A transformation with a learning rate of its own ignores `learning_rate`."""

  learning_rate: Any = None
  loss: StepLoss | None = struct.field(pytree_node=False, default=None)


class OptaxStatePartitionRules:
  """Derives the logical axes of optax states from their structure rather than their type."""

  # Rules of users, as in T5X: the type of a state → f(state, logical axes of the parameters).
  _RULES: ClassVar[dict[type, Callable[[Any, PyTree], Any]]] = {}

  @classmethod
  def derive_optax_logical_axes(
    cls, optax_state: PyTree, params_axes: PyTree, params: PyTree = None
  ) -> PyTree:
    """Returns `optax_state` with axis names, or None, in place of arrays.

    A part of the state with the structure of the parameters (moments, accumulated gradients) gets the
    parameters' axes for leaves with the shape of their parameter, and `MatrixDims.factor_axes` for
    `Factors`. Everything else gets None. Masked leaves do not change. `_RULES` come first.

    Args:
      optax_state: the state of any optax transformation.
      params_axes: a tree like the parameters' with a PartitionSpec of axis names at each leaf.
      params: the parameters, for their shapes; None assumes that every leaf has its parameter's shape.
    """
    template = params_axes if params is None else params
    structure: Any = jax.tree.structure(template)

    def is_like_params(node: PyTree) -> bool:
      return structure == jax.tree.structure(node, is_leaf=_is_of_one_parameter)

    def axes_of(node: PyTree) -> PyTree:
      if type(node) in cls._RULES:
        return cls._RULES[type(node)](node, params_axes)
      return cls.derive_params_axes(node, params_axes, params) if is_like_params(node) else None

    return jax.tree.map(
      axes_of, optax_state, is_leaf=lambda node: type(node) in cls._RULES or is_like_params(node)
    )

  @classmethod
  def derive_params_axes(
    cls, optax_params: PyTree, params_axes: PyTree, params: PyTree = None
  ) -> PyTree:
    """Returns `optax_params`, a tree like the parameters, with axis names in place of arrays.

    An array of another shape than its parameter's has None, `Factors` have those of their matrix, and
    masked leaves do not change.
    """
    template = params_axes if params is None else params
    structure: Any = jax.tree.structure(template)

    def axes_of(value: Any, param: Any, names: Any) -> Any:
      if isinstance(value, optax.MaskedNode):
        return value
      if isinstance(value, Factors):
        dims = names and matrix_dims(len(names), names)
        return dims.factor_axes(value, names) if dims else Factors(None, None)
      return names if params is None or value.shape == param.shape else None

    leaves = (structure.flatten_up_to(tree) for tree in (optax_params, template))
    return structure.unflatten(map(axes_of, *leaves, axes_like(template, params_axes)))


class OptaxWrapper(OptimizerDef):
  """An optax transformation as an optimizer.

  A transformation has its own learning rate, a constant or a schedule: as in T5X,
  `trainer.learning_rate_fn` has no effect. A function that makes a transformation gets the trainer's.

  Args:
    optax_optimizer: the transformation, or a function (learning rate, logical axes of the
      parameters) → transformation. The structure of its state must not depend on the learning rate.
  """

  uses_loss = True

  def __init__(self, optax_optimizer: optax.GradientTransformation | MakeTransformation):
    self.optax_optimizer = optax_optimizer
    self.uses_learning_rate = not isinstance(optax_optimizer, optax.GradientTransformation)
    self._param_axes: PyTree = None
    super().__init__(hyper_params=OptaxWrapperHyperParams())

  def set_param_axes(self, param_logical_axes: PyTree) -> None:
    """Keeps the parameters' logical axes for transformations that treat matrices differently."""
    self._param_axes = param_logical_axes

  def init_state(self, params: PyTree) -> OptimizerState:
    """Returns the transformation's initial state at step 0.

    Raises:
      ValueError: `average_parameters` is not the last transformation of a chain.
    """
    optax_state = self._transformation(0.0).init(params)
    check_average_is_last(optax_state)
    return OptimizerState(jnp.zeros((), jnp.int32), _with_raw_keys(optax_state))

  def apply_gradient(
    self, hyper_params: Any, params: PyTree, state: OptimizerState, grads: PyTree
  ) -> tuple[PyTree, OptimizerState]:
    """Returns the parameters and the state after one step.

    Raises:
      ValueError: the transformation needs the trainer's learning rate, but there is none.
    """
    if self.uses_learning_rate and hyper_params.learning_rate is None:
      raise ValueError("the optimizer has no learning rate: set trainer.Trainer.learning_rate_fn")
    transformation = self._transformation(hyper_params.learning_rate)
    optax_types = jax.eval_shape(transformation.init, params)
    optax_state = _with_typed_keys(state.param_states, optax_types)
    loss = hyper_params.loss
    of_step = {} if loss is None else {"loss": loss, "value": loss.value}
    updates, new_state = optax.with_extra_args_support(transformation).update(
      grads, optax_state, params, **of_step
    )
    new_params = optax.apply_updates(params, updates)
    return new_params, OptimizerState(state.step + 1, _with_raw_keys(new_state))

  def params_to_evaluate(self, params: PyTree, param_states: PyTree) -> PyTree:
    """Returns the average of the parameters if the transformation has one, else `params`."""
    return averaged_parameters(params, param_states)

  def _transformation(self, learning_rate: Any) -> optax.GradientTransformation:
    make = self.optax_optimizer
    if isinstance(make, optax.GradientTransformation):
      return make
    return make(learning_rate, self._param_axes)

  def derive_logical_axes(self, optimizer: Optimizer, param_logical_axes: PyTree) -> Optimizer:
    """Returns `optimizer` with axis names, or None, in place of arrays."""
    axes = OptaxStatePartitionRules.derive_optax_logical_axes(
      optimizer.state.param_states, param_logical_axes, optimizer.target
    )
    return optimizer.replace(state=OptimizerState(None, axes), target=param_logical_axes)


def wrap_optax_optimizer(
  optax_optimizer: Callable[Args, optax.GradientTransformation],
) -> Callable[Args, OptaxWrapper]:
  """Returns a function with the arguments of `optax_optimizer` that returns an `OptaxWrapper`."""

  @functools.wraps(optax_optimizer)
  def wrapped_optimizer(*args: Args.args, **kwargs: Args.kwargs) -> OptaxWrapper:
    return OptaxWrapper(optax_optimizer(*args, **kwargs))

  return wrapped_optimizer


def chain(
  transformations: Sequence[
    optax.GradientTransformation | Callable[..., optax.GradientTransformation]
  ],
) -> OptaxWrapper:
  """Returns an optimizer that applies optax transformations in order, the first to the gradient.

  A function that makes a transformation, such as `optax.lion` (in gin `@optax.lion` without
  parentheses), is called in each step with the trainer's `learning_rate`, and with `param_axes`, the
  parameters' logical axes, if it has an argument of that name.

  Raises:
    ValueError: such a function has no argument `learning_rate`, or there is an `OptimizerDef`.
  """

  def accepted_by(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    accepted = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in accepted}

  is_made = [isinstance(one, optax.GradientTransformation) for one in transformations]
  if all(is_made):
    return OptaxWrapper(optax.chain(*transformations))
  for one, made in zip(transformations, is_made, strict=True):
    _check_is_not_optimizer(one)
    if not made and not accepted_by(one, learning_rate=None):
      name = getattr(one, "__name__", one)
      raise ValueError(
        f"chain.transformations contains the function {name}, which has no argument learning_rate: "
        f"write @{name}() with parentheses"
      )

  def make(learning_rate: Any, param_axes: PyTree) -> optax.GradientTransformation:
    given = {"learning_rate": learning_rate, "param_axes": param_axes}
    chained = [
      one if made else one(**accepted_by(one, **given))
      for one, made in zip(transformations, is_made, strict=True)
    ]
    for one in chained:
      _check_is_not_optimizer(one)
    return optax.chain(*chained)

  return OptaxWrapper(make)


def _check_is_not_optimizer(transformation: Any) -> None:
  """Raises ValueError for a whole optimizer, which is not a part of a chain."""
  if isinstance(transformation, OptimizerDef):
    raise ValueError(
      f"chain.transformations contains a whole optimizer, {type(transformation).__name__}: write a "
      "function of optax, such as @optax.adamw instead of @optimizers.adamw"
    )


@wrap_optax_optimizer
def amos(*args: Any, **kwargs: Any) -> optax.GradientTransformation:
  """Amos (arXiv:2210.11693), from the package jestimator, which is on no package index."""
  try:
    from jestimator import amos as jestimator_amos
  except ImportError as error:
    raise ValueError(
      "optimizers.amos needs the package jestimator: install it with pip from "
      "git+https://github.com/google-research/jestimator, or choose another optimizer"
    ) from error
  return jestimator_amos.amos(*args, **kwargs)


adabelief = wrap_optax_optimizer(optax.adabelief)
adagrad = wrap_optax_optimizer(optax.adagrad)
adam = wrap_optax_optimizer(optax.adam)
adamw = wrap_optax_optimizer(optax.adamw)
dpsgd = wrap_optax_optimizer(optax.contrib.dpsgd)
fromage = wrap_optax_optimizer(optax.fromage)
lamb = wrap_optax_optimizer(optax.lamb)
lars = wrap_optax_optimizer(optax.lars)
lion = wrap_optax_optimizer(optax.lion)
noisy_sgd = wrap_optax_optimizer(optax.noisy_sgd)
radam = wrap_optax_optimizer(optax.radam)
rmsprop = wrap_optax_optimizer(optax.rmsprop)
sgd = wrap_optax_optimizer(optax.sgd)
yogi = wrap_optax_optimizer(optax.yogi)


def _is_of_one_parameter(node: Any) -> bool:
  """Returns whether a node of a tree like the parameters' is the whole state of one parameter."""
  return isinstance(node, (optax.MaskedNode, Factors))


def _is_key(leaf: Any) -> bool:
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _with_raw_keys(optax_state: PyTree) -> PyTree:
  """Returns the state with typed random keys as uint32 arrays, which checkpoints can store."""
  return jax.tree.map(
    lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, optax_state
  )


def _with_typed_keys(optax_state: PyTree, optax_types: PyTree) -> PyTree:
  """Reverses `_with_raw_keys`."""
  return jax.tree.map(
    lambda leaf, like: jax.random.wrap_key_data(leaf) if _is_key(like) else leaf,
    optax_state,
    optax_types,
  )


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
