"""Optax transformations: averages of the parameters, masks and learning rates by name, Muon, Sophia and K-FAC.

Sophia-H (Liu et al. 2023, arXiv:2305.14342) is optax's, with a Hessian that our layers allow. K-FAC (Martens and
Grosse 2015, arXiv:1503.05671) preconditions the gradients of dense layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.core import unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict

from rosetta_t5.argument_types import NonNegativeNumber, Positive, PositiveNumber, Rate, near_hint
from rosetta_t5.networks.layers.matmuls import KFAC_FACTORS
from rosetta_t5.training.optimizers import matrices
from rosetta_t5.training.optimizers.matrices import MatrixDims
from rosetta_t5.training.optimizers.optimizer_def import StepLoss, axes_like, path_name

PyTree = Any


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
    new_params = optax.apply_updates(params, updates)
    average = optax.incremental_update(new_params, state.parameter_average, 1.0 - decay)
    return updates, AverageState(average)

  return optax.GradientTransformation(init, update)


def averaged_parameters(params: PyTree, optax_state: PyTree) -> PyTree:
  """Returns the parameters to evaluate: the average that an optax state has, else `params`.

  A schedule-free optimizer has one too, which is computed from its state and the parameters.
  """
  has_average = (AverageState, optax.contrib.ScheduleFreeState)
  nodes = jax.tree.leaves(optax_state, is_leaf=lambda node: isinstance(node, has_average))
  last = next((node for node in reversed(nodes) if isinstance(node, has_average)), None)
  if isinstance(last, AverageState):
    return last.parameter_average
  return params if last is None else optax.contrib.schedule_free_eval_params(last, params)


def all_except(patterns: Sequence[str]) -> Callable[[PyTree], PyTree]:
  """Returns a mask for optax, such as `optax.adamw.mask`: True for parameters that no pattern matches.

  Args:
    patterns: regular expressions that match whole paths, such as `.*/(scale|bias)`.
  """

  def mask(params: PyTree) -> PyTree:
    return jax.tree.map(lambda index: index == len(patterns), _first_matches(params, patterns))

  return mask


def scale_by_name(factors: Mapping[str, NonNegativeNumber]) -> optax.GradientTransformation:
  """Returns a transformation that multiplies the updates of parameters by a factor.

  After an optimizer in `chain`, the factors are those of learning rates; 0 freezes a parameter.

  Args:
    factors: factors by regular expressions that match whole paths, such as
      {'encoder/layers_[0-5]/.*': 0.1}. The first match counts. Other parameters have the factor 1.
  """
  numbers = [*factors.values(), 1.0]

  def update(updates: PyTree, params: PyTree | None = None) -> PyTree:
    indices = _first_matches(updates, list(factors))
    return jax.tree.map(lambda value, index: value * numbers[index], updates, indices)

  return optax.stateless(update)


def _first_matches(params: PyTree, patterns: Sequence[str]) -> PyTree:
  """Returns a tree like `params` with the index of the first pattern that matches each whole path.

  The index is the number of patterns where none matches.

  Raises:
    ValueError: a pattern is not a regular expression, or matches no parameter.
  """
  names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
  for pattern in patterns:
    try:
      is_used = any(re.fullmatch(pattern, name) for name in names)
    except re.error as error:
      raise ValueError(
        f"{pattern!r} is not a regular expression ({error}): any characters are '.*', not '*'"
      ) from error
    if not is_used:
      raise ValueError(
        f"the regular expression {pattern!r} matches no parameter{near_hint(pattern, names)}: it must "
        f"match the whole path, such as {names[0]!r}"
      )

  def index_of(path: Any, _: Any) -> int:
    name = path_name(path)
    return next((i for i, one in enumerate(patterns) if re.fullmatch(one, name)), len(patterns))

  return jax.tree_util.tree_map_with_path(index_of, params)


def muon(
  learning_rate: Any,
  param_axes: PyTree = None,
  beta: Rate = 0.95,
  ns_steps: Positive = 5,
  consistent_rms: PositiveNumber | None = 0.2,
  weight_decay: NonNegativeNumber = 0.1,
  adam_b1: Rate = 0.9,
  adam_b2: Rate = 0.95,
  adam_weight_decay: NonNegativeNumber = 0.0,
) -> optax.GradientTransformation:
  """Muon for matrices; AdamW for embeddings, the output layer, relative biases, norms and biases.

  Scanned layers and experts are stacks of matrices; a projection to several heads is one matrix.

  Args:
    learning_rate: the learning rate of both, a number or a schedule.
    param_axes: the logical axes of the parameters, which `OptaxWrapper` passes.
    beta: the decay of the momentum.
    ns_steps: the number of Newton-Schulz iterations.
    consistent_rms: the RMS of an update of a matrix before the learning rate. 0.2, about that of AdamW's
      updates, lets both share a learning rate (Liu et al. 2025). None scales by √(max(1, columns / rows)).
    weight_decay: the weight decay of matrices.
    adam_b1: the decay of AdamW's first moment.
    adam_b2: the decay of AdamW's second moment.
    adam_weight_decay: the weight decay of the other parameters.
  """

  def dimension_numbers(params: PyTree) -> PyTree:
    def numbers(_: Any, dims: MatrixDims | None) -> Any:
      return dims and optax.contrib.MuonDimensionNumbers(dims.rows, dims.columns)

    return jax.tree.map(numbers, params, matrices.tree_matrix_dims(params, param_axes))

  return optax.contrib.muon(
    learning_rate,
    beta=beta,
    ns_steps=ns_steps,
    consistent_rms=consistent_rms,
    weight_decay=weight_decay,
    adam_b1=adam_b1,
    adam_b2=adam_b2,
    adam_weight_decay=adam_weight_decay,
    muon_weight_dimension_numbers=dimension_numbers,
  )


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


def hessian_diagonal(seed: int = 0) -> optax.GradientTransformationExtraArgs:
  """Returns Hutchinson's estimate of the diagonal of the Hessian, z ⊙ Hz for random signs z.

  H·z is the gradient of z·∇L, because optax's own estimate needs derivatives in forward mode, which
  functions with a `custom_vjp` do not have. The state is the number of estimates so far.
  """

  def init(params: PyTree) -> jax.Array:
    return jnp.zeros((), jnp.int32)

  def update(
    grads: PyTree, step: jax.Array, params: PyTree = None, *, loss: StepLoss, **_: Any
  ) -> tuple[PyTree, jax.Array]:
    # The numbers of this generator do not depend on the devices or on `jax_default_prng_impl`.
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)
    signs = optax.tree.random_like(key, params, jax.random.rademacher, dtype=jnp.float32)

    def directional_derivative(at: PyTree) -> jax.Array:
      return optax.tree.vdot(jax.grad(loss.of_first_microbatch)(at), signs)

    product = jax.grad(directional_derivative)(params)
    # The loss is a sum over microbatches.
    diagonal = jax.tree.map(lambda h, z: loss.num_microbatches * h * z, product, signs)
    return diagonal, step + 1

  return optax.GradientTransformationExtraArgs(init, update)


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

  Raises:
    ValueError: on initialization, if no dense kernel is trained, as with an adapter.
  """

  def init(params: PyTree) -> KfacState:
    dims = _kernel_dims(params, param_axes, skip_layers)
    if not jax.tree.leaves(dims):
      trained = ", ".join(sorted({path[-1] for path in flatten_dict(unfreeze(params))}))
      raise ValueError(
        f"precondition_by_kfac needs dense kernels, but only {trained} are trained: set another OPTIMIZER"
      )
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

  def dims(path: Any, param: Any, axes: Any, is_wanted: bool) -> MatrixDims | None:
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

  def dot(direction: jax.Array, grad: jax.Array, dim: MatrixDims | None) -> jax.Array:
    return jnp.zeros(()) if dim is None else jnp.vdot(direction, grad)

  total = optax.tree.sum(jax.tree.map(dot, directions, grads, dims))
  scale = jnp.minimum(1.0, jnp.sqrt(limit / jnp.maximum(total, jnp.finfo(total.dtype).tiny)))
  return jax.tree.map(lambda x, dim: x if dim is None else scale * x, directions, dims)
