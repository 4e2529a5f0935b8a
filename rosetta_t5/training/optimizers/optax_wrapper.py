"""Optax transformations as optimizers with T5X's interface, and T5X's names for them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from rosetta_t5.networks.gpu_fusion import global_norm
from rosetta_t5.parallel.placement import target_device
from rosetta_t5.training.optimizers import optimizer_def
from rosetta_t5.training.optimizers.matrices import Factors, matrix_dims
from rosetta_t5.training.optimizers.optimizer_def import Optimizer, OptimizerDef, OptimizerState
from rosetta_t5.training.optimizers.transformations import AverageState, averaged_parameters

PyTree = Any
# Called with a learning rate and the parameters' logical axes, or None for no axes.
MakeTransformation = Callable[[Any, PyTree], optax.GradientTransformation]


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
      whole = (optax.MaskedNode, Factors)  # Each is the whole state of one parameter.
      return structure == jax.tree.structure(node, is_leaf=lambda part: isinstance(part, whole))

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

    def axes_of(param: Any, value: Any, names: Any) -> Any:
      if isinstance(value, optax.MaskedNode):
        return value
      if isinstance(value, Factors):
        dims = names and matrix_dims(len(names), names)
        return dims.factor_axes(value, names) if dims else Factors(None, None)
      return names if params is None or value.shape == param.shape else None

    names = optimizer_def.axes_like(template, params_axes)
    return jax.tree.map(axes_of, template, optax_params, names)


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
    self._make: Any = optax_optimizer if self.uses_learning_rate else lambda *_: optax_optimizer
    self._param_axes: PyTree = None
    super().__init__(optimizer_def.HyperParams(learning_rate=None, loss=None))

  def set_param_axes(self, param_logical_axes: PyTree) -> None:
    """Keeps the parameters' logical axes for transformations that treat matrices differently."""
    self._param_axes = param_logical_axes

  def init_state(self, params: PyTree) -> OptimizerState:
    """Returns the transformation's initial state at step 0.

    Raises:
      ValueError: `average_parameters` is not the last transformation of a chain.
    """
    optax_state = self._make(0.0, self._param_axes).init(params)
    is_chain = type(optax_state) is tuple
    if is_chain and any(isinstance(state, AverageState) for state in optax_state[:-1]):
      raise ValueError(
        "average_parameters must be the last of chain.transformations, because it averages the "
        "parameters after all updates: move it to the end"
      )
    return OptimizerState(jnp.zeros((), jnp.int32), jax.tree.map(_as_stored, optax_state))

  def apply_gradient(
    self, hyper_params: Any, params: PyTree, state: OptimizerState, grads: PyTree
  ) -> tuple[PyTree, OptimizerState]:
    """Returns the parameters and the state after one step."""
    transformation = self._make(hyper_params.learning_rate, self._param_axes)
    types = jax.eval_shape(transformation.init, params)
    optax_state = jax.tree.map(_as_used, state.param_states, types)
    loss = hyper_params.loss
    of_step = {} if loss is None else {"loss": loss, "value": loss.value}
    updates, new_state = optax.with_extra_args_support(transformation).update(
      grads, optax_state, params, **of_step
    )
    new_params = optax.apply_updates(params, updates)
    return new_params, OptimizerState(state.step + 1, jax.tree.map(_as_stored, new_state))

  def params_to_evaluate(self, params: PyTree, param_states: PyTree) -> PyTree:
    """Returns the average of the parameters if the transformation has one, else `params`."""
    return averaged_parameters(params, param_states)

  def derive_logical_axes(self, optimizer: Optimizer, param_logical_axes: PyTree) -> Optimizer:
    """Returns `optimizer` with axis names, or None, in place of arrays."""
    axes = OptaxStatePartitionRules.derive_optax_logical_axes(
      optimizer.state.param_states, param_logical_axes, optimizer.target
    )
    return optimizer.replace(state=OptimizerState(None, axes), target=param_logical_axes)


def _is_key(leaf: Any) -> bool:
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _as_stored(leaf: Any) -> Any:
  """Returns a typed random key as a uint32 array, which checkpoints can store."""
  return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _as_used(leaf: Any, like: Any) -> Any:
  """Reverses `_as_stored`."""
  return jax.random.wrap_key_data(leaf) if _is_key(like) else leaf


def wrap_optax_optimizer(
  optax_optimizer: Callable[..., optax.GradientTransformation],
) -> Callable[..., OptaxWrapper]:
  """Returns a function with the arguments of `optax_optimizer` that returns an `OptaxWrapper`."""

  @functools.wraps(optax_optimizer)
  def wrapped_optimizer(*args: Any, **kwargs: Any) -> OptaxWrapper:
    return OptaxWrapper(optax_optimizer(*args, **kwargs))

  return wrapped_optimizer


def chain(
  transformations: Sequence[optax.GradientTransformation | Callable[..., Any]],
) -> OptaxWrapper:
  """Returns an optimizer that applies optax transformations in order, the first to the gradient.

  A function that makes a transformation, such as `optax.lion` (in gin `@optax.lion` without
  parentheses), is called in each step with the trainer's `learning_rate`, and with `param_axes`, the
  parameters' logical axes, if it has an argument of that name.

  Raises:
    ValueError: such a function has no argument `learning_rate`, or there is an `OptimizerDef`.
  """

  def make(learning_rate: Any, param_axes: PyTree) -> optax.GradientTransformation:
    return optax.chain(*(_make_entry(one, learning_rate, param_axes) for one in transformations))

  made = make(0.0, None)
  is_made = all(isinstance(one, optax.GradientTransformation) for one in transformations)
  return OptaxWrapper(made if is_made else make)


def _make_entry(one: Any, learning_rate: Any, param_axes: PyTree) -> optax.GradientTransformation:
  """Returns an entry of `chain.transformations`, which is called first if it is a function."""
  if not isinstance(one, (optax.GradientTransformation, OptimizerDef)):
    arguments = {"learning_rate": learning_rate, "param_axes": param_axes}
    accepted = inspect.signature(one).parameters
    if "learning_rate" not in accepted:
      name = getattr(one, "__name__", one)
      raise ValueError(
        f"chain.transformations contains the function {name}, which has no argument learning_rate: "
        f"write @{name}() with parentheses"
      )
    one = one(**{name: value for name, value in arguments.items() if name in accepted})
  if isinstance(one, OptimizerDef):
    raise ValueError(
      f"chain.transformations contains a whole optimizer, {type(one).__name__}: write a function of "
      "optax, such as @optax.adamw instead of @optimizers.adamw"
    )
  is_clip = getattr(one.update, "__qualname__", "").startswith("clip_by_global_norm.")
  return _clip_on_gpu(one) if is_clip else one


def _clip_on_gpu(clip: optax.GradientTransformation) -> optax.GradientTransformation:
  """Returns `optax.clip_by_global_norm`; a GPU computes the norm in few kernels."""

  def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
    if target_device().platform != "gpu":
      return clip.update(updates, state, params)
    norm = global_norm(updates)
    # optax squares its input. The square of 1e19 is finite in float32, and a larger norm is clipped to the same.
    clipped, state = clip.update(jnp.minimum(norm, 1e19), state)
    is_small = clipped >= norm  # False for NaN

    def clip_one(x: jax.Array) -> jax.Array:
      return jnp.where(is_small, x, (x / norm * clipped).astype(x.dtype))

    return jax.tree.map(clip_one, updates), state

  return optax.GradientTransformation(clip.init, update)


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
