"""Sophia-H (Liu et al. 2023, arXiv:2305.14342): optax's, with a Hessian that our layers allow."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rosetta_t5.argument_types import NonNegativeNumber, Positive, PositiveNumber, Rate
from rosetta_t5.training.optimizers.optimizer_def import StepLoss

PyTree = Any


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
