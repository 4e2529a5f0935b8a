"""Optax transformations as optimizers with T5X's interface, and T5X's names for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import optax
from flax import struct

from rosetta_t5.training.optimizers.optimizer_def import Optimizer, OptimizerDef, OptimizerState
from rosetta_t5.training.optimizers.param_paths import axes_like

PyTree = Any
Args = ParamSpec("Args")


class OptaxWrapperHyperParams(struct.PyTreeNode):
  """The trainer sets `learning_rate`, which optax transformations ignore: they have their own."""

  learning_rate: Any = None


class OptaxStatePartitionRules:
  """Derives the logical axes of optax states from their structure rather than their type."""

  @classmethod
  def derive_optax_logical_axes(
    cls, optax_state: PyTree, params_axes: PyTree, params: PyTree = None
  ) -> PyTree:
    """Returns `optax_state` with axis names, or None, in place of arrays.

    A part of the state with the structure of the parameters (moments, accumulated gradients) gets the
    parameters' axes for leaves with the shape of their parameter. Everything else gets None. Masked
    leaves do not change.

    Args:
      optax_state: the state of any optax transformation.
      params_axes: a tree like the parameters' with a PartitionSpec of axis names at each leaf.
      params: the parameters, for their shapes; None assumes that every leaf has its parameter's shape.
    """
    template = params_axes if params is None else params
    structure: Any = jax.tree.structure(template)

    def is_like_params(node: PyTree) -> bool:
      return structure == jax.tree.structure(node, is_leaf=_is_masked)

    def axes_of(node: PyTree) -> PyTree:
      return cls.derive_params_axes(node, params_axes, template) if is_like_params(node) else None

    return jax.tree.map(axes_of, optax_state, is_leaf=is_like_params)

  @classmethod
  def derive_params_axes(
    cls, optax_params: PyTree, params_axes: PyTree, params: PyTree = None
  ) -> PyTree:
    """Returns `optax_params`, a tree like the parameters, with axis names in place of arrays."""
    template = params_axes if params is None else params
    structure: Any = jax.tree.structure(template)

    def axes_of(value: Any, param: Any, names: Any) -> Any:
      if _is_masked(value):
        return value
      return names if params is None or value.shape == param.shape else None

    leaves = (structure.flatten_up_to(tree) for tree in (optax_params, template))
    return structure.unflatten(map(axes_of, *leaves, axes_like(template, params_axes)))


class OptaxWrapper(OptimizerDef):
  """An optax transformation as an optimizer.

  The transformation has its own learning rate, a constant or a schedule. As in T5X,
  `trainer.learning_rate_fn` has no effect.

  Args:
    optax_optimizer: the transformation.
  """

  uses_learning_rate = False

  def __init__(self, optax_optimizer: optax.GradientTransformation):
    self.optax_optimizer = optax_optimizer
    super().__init__(hyper_params=OptaxWrapperHyperParams())

  def init_state(self, params: PyTree) -> OptimizerState:
    """Returns the transformation's initial state at step 0."""
    param_states = _with_raw_keys(self.optax_optimizer.init(params))
    return OptimizerState(jnp.zeros((), jnp.int32), param_states)

  def apply_gradient(
    self, hyper_params: Any, params: PyTree, state: OptimizerState, grads: PyTree
  ) -> tuple[PyTree, OptimizerState]:
    """Returns the parameters and the state after one step; `hyper_params` is ignored."""
    optax_types = jax.eval_shape(self.optax_optimizer.init, params)
    optax_state = _with_typed_keys(state.param_states, optax_types)
    updates, new_state = self.optax_optimizer.update(grads, optax_state, params)
    new_params = optax.apply_updates(params, updates)
    return new_params, OptimizerState(state.step + 1, _with_raw_keys(new_state))

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


@wrap_optax_optimizer
def chain(transformations: Sequence[optax.GradientTransformation]) -> optax.GradientTransformation:
  """Applies optax transformations in order, the first to the gradient."""
  return optax.chain(*transformations)


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


def _is_masked(node: Any) -> bool:
  return isinstance(node, optax.MaskedNode)


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
