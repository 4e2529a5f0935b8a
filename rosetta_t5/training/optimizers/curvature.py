"""Optimizers that estimate the curvature of the loss: K-FAC and Sophia.

K-FAC (Martens and Grosse 2015, arXiv:1503.05671) preconditions the gradients of dense layers. Sophia-H (Liu et
al. 2023, arXiv:2305.14342) is optax's, with a Hessian that our layers allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.core import unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict

from rosetta_t5.argument_types import NonNegativeNumber, Positive, PositiveNumber, Rate
from rosetta_t5.networks.layers.dense import KFAC_FACTORS
from rosetta_t5.training.optimizers import matrices
from rosetta_t5.training.optimizers.optimizer_def import StepLoss, axes_like, path_name
from rosetta_t5.training.optimizers.transformations import all_except

PyTree = Any


class KfacState(NamedTuple):
  """The state of K-FAC.

  Attributes:
    step: the number of completed steps.
    factors: the averages of A and G, as `Factors`.
    inverses: the inverses of the damped factors.
  """

  step: jax.Array
  factors: PyTree
  inverses: PyTree


def precondition_by_kfac(
  learning_rate: Any,
  param_axes: PyTree = None,
  factor_update_steps: Positive = 5,
  inv_update_steps: Positive = 50,
  factor_decay: Rate = 0.95,
  damping: PositiveNumber = 0.003,
  kl_clip: PositiveNumber | None = 0.001,
  skip_layers: Sequence[str] = (),
  max_factor_dim: Positive = 4096,
) -> optax.GradientTransformationExtraArgs:
  """Returns a transformation that multiplies the gradient of each dense kernel by A⁻¹ and G⁻¹.

  A is the mean of xᵀ·x over the layer's input rows x, and G that of dyᵀ·dy over the gradients of its
  output rows, for the step's own targets (the empirical Fisher) and with padding. Both are measured on
  the first microbatch. To each factor, √damping times its mean eigenvalue times the identity is added.
  Unlike with the paper's damping, the scale of the loss then changes only the length of the result, which
  LAMB ignores. An optimizer follows it in `chain`.

  Args:
    learning_rate: the learning rate, which only `kl_clip` needs.
    param_axes: the logical axes of the parameters, which `OptaxWrapper` passes.
    factor_update_steps: steps between measurements of the factors.
    inv_update_steps: steps between inversions.
    factor_decay: the decay of the averages of the factors.
    damping: see above.
    kl_clip: the limit of the estimated KL divergence of a step, ν² · learning_rate² · Σ direction ·
      gradient; all directions are multiplied by the largest ν ≤ 1 that meets it. None for no limit.
    skip_layers: regular expressions that match whole paths of kernels that keep their gradients, in
      addition to the output layer and experts.
    max_factor_dim: a larger side of a kernel has no factor.
  """

  def init(params: PyTree) -> KfacState:
    dims = _kernel_dims(params, param_axes, skip_layers)
    zeros = matrices.zero_factors(params, dims, max_factor_dim)
    return KfacState(jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.copy, zeros))

  def update(
    grads: PyTree, state: KfacState, params: PyTree = None, *, loss: StepLoss, **_: Any
  ) -> tuple[PyTree, KfacState]:
    dims = _kernel_dims(params, param_axes, skip_layers)

    def measured() -> PyTree:
      def loss_of(zeros: PyTree) -> jax.Array:
        return loss.of_first_microbatch(params, {KFAC_FACTORS: _by_layer(zeros)})

      new = jax.grad(loss_of)(jax.tree.map(jnp.zeros_like, state.factors))
      weight = jnp.where(state.step == 0, 1.0, 1.0 - factor_decay)
      return optax.incremental_update(new, state.factors, weight)

    factors = jax.lax.cond(state.step % factor_update_steps == 0, measured, lambda: state.factors)
    inverses = jax.lax.cond(
      state.step % inv_update_steps == 0,
      lambda: jax.tree.map(lambda factor: _damped_inverse(factor, damping), factors),
      lambda: state.inverses,
    )
    directions = matrices.multiply(inverses, grads, dims)
    if kl_clip is not None:
      directions = _clip(directions, grads, dims, kl_clip / learning_rate**2)
    return directions, KfacState(state.step + 1, factors, inverses)

  return optax.GradientTransformationExtraArgs(init, update)


def _kernel_dims(params: PyTree, param_axes: PyTree | None, skip_layers: Sequence[str]) -> PyTree:
  """Returns a tree with the `MatrixDims` of each dense kernel, and None for other parameters."""

  def dims(path: Any, param: Any, axes: Any, is_wanted: bool) -> matrices.MatrixDims | None:
    is_kernel = path_name(path[-1:]) == "kernel" and "expert" not in (axes or ())
    return matrices.matrix_dims(param.ndim, axes) if is_kernel and is_wanted else None

  axes, is_wanted = axes_like(params, param_axes), all_except(skip_layers)(params)
  return jax.tree_util.tree_map_with_path(dims, params, axes, is_wanted)


def _by_layer(factors: PyTree) -> dict[str, Any]:
  """Returns the factors as a variable collection: those of `…/NAME/kernel` in the module `…/NAME`."""
  flat = flatten_dict(unfreeze(factors))
  variables = {
    (*path[:-1], side): value
    for path, sides in flat.items()
    for side, value in sides._asdict().items()
    if value is not None
  }
  return unflatten_dict(variables)


def _damped_inverse(factor: jax.Array, damping: float) -> jax.Array:
  size = factor.shape[-1]
  mean_eigenvalue = jnp.trace(factor, axis1=-2, axis2=-1)[..., None, None] / size
  identity = jnp.broadcast_to(jnp.eye(size, dtype=factor.dtype), factor.shape)
  # The factor of a layer without inputs or gradients is 0: its gradients stay as they are.
  is_zero = mean_eigenvalue == 0
  added = jnp.where(is_zero, 1.0, damping**0.5 * mean_eigenvalue)
  inverse = jnp.linalg.inv(factor / added + identity) / added
  return jnp.where(is_zero, identity, (inverse + inverse.mT) / 2)


def _clip(directions: PyTree, grads: PyTree, dims: PyTree, limit: jax.Array) -> PyTree:
  """Returns the directions of kernels times a factor at most 1, whose square is limit / Σ d · g."""

  def dot(direction: jax.Array, grad: jax.Array, dim: matrices.MatrixDims | None) -> jax.Array:
    return jnp.zeros(()) if dim is None else jnp.vdot(direction, grad)

  total = optax.tree.sum(jax.tree.map(dot, directions, grads, dims))
  scale = jnp.minimum(1.0, jnp.sqrt(limit / jnp.maximum(total, jnp.finfo(total.dtype).tiny)))
  return jax.tree.map(lambda x, dim: x if dim is None else scale * x, directions, dims)


def sophia(
  learning_rate: Any,
  b1: Rate = 0.96,
  b2: Rate = 0.99,
  gamma: PositiveNumber = 0.01,
  weight_decay: NonNegativeNumber = 0.1,
  update_interval: Positive = 10,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Momentum divided by an average of the Hessian's diagonal, and clipped to 1.

  Args:
    learning_rate: the learning rate, a number or a schedule.
    b1: the decay of the momentum.
    b2: the decay of the Hessian's diagonal.
    gamma: a factor of the Hessian. A larger one clips fewer values.
    weight_decay: the weight decay.
    update_interval: steps between estimates of the Hessian, each of which costs about two gradients
      of the first microbatch.
    seed: seeds the random signs of the estimates.
  """
  return optax.contrib.sophia(
    learning_rate,
    b1=b1,
    b2=b2,
    gamma=gamma,
    weight_decay=weight_decay,
    update_interval=update_interval,
    hessian_diagonal_fn=hessian_diagonal(seed),
  )


class HessianState(NamedTuple):
  """The number of estimates so far, `step`."""

  step: jax.Array


def hessian_diagonal(seed: int = 0) -> optax.GradientTransformationExtraArgs:
  """Returns Hutchinson's estimate of the diagonal of the Hessian, z ⊙ Hz for random signs z.

  H·z is the gradient of z·∇L, because optax's own estimate needs derivatives in forward mode, which
  functions with a `custom_vjp` do not have.
  """

  def init(params: PyTree) -> HessianState:
    del params
    return HessianState(jnp.zeros((), jnp.int32))

  def update(
    grads: PyTree, state: HessianState, params: PyTree = None, *, loss: StepLoss, **_: Any
  ) -> tuple[PyTree, HessianState]:
    # The numbers of this generator do not depend on the devices or on `jax_default_prng_impl`.
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), state.step)
    signs = optax.tree.random_like(key, params, jax.random.rademacher, dtype=jnp.float32)

    def directional_derivative(at: PyTree) -> jax.Array:
      return optax.tree.vdot(jax.grad(loss.of_first_microbatch)(at), signs)

    product = jax.grad(directional_derivative)(params)
    # The loss is a sum over microbatches.
    diagonal = jax.tree.map(lambda h, z: loss.num_microbatches * h * z, product, signs)
    return diagonal, HessianState(state.step + 1)

  return optax.GradientTransformationExtraArgs(init, update)
