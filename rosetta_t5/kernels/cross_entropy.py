"""Cross-entropy from integer targets with z-loss and label smoothing, and its gradient.

The forward pass allocates nothing of the logits' size, and the backward pass only the gradient: there
are no one-hot targets and no log-softmax. The residuals are the logits and two numbers per token.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Loss = tuple[Float[Array, "*tokens"], Float[Array, "*tokens"]]
Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def cross_entropy(
  logits: Float[Array, "*tokens vocab"],
  targets: Int[Array, "*tokens"],
  z_loss: float | int | Float[Array, ""] = 0.0,
  label_smoothing: float = 0.0,
) -> Loss:
  """Returns each token's loss and its z-loss part, in float32.

  Let lse be the log of the softmax denominator, and p the smoothed target distribution: 1 − ε at the
  target and ε/(V − 1) elsewhere. The loss is −Σ p·log_softmax(logits) + z_loss·lse² minus the entropy
  of p, so its minimum without z-loss is zero. Both results are differentiable with respect to the
  logits and `z_loss`.

  Args:
    logits: logits of any float type; the loss is computed in float32.
    targets: the index of each token in the vocabulary.
    z_loss: the weight of lse², which keeps the logits from drifting (Mesh TensorFlow).
    label_smoothing: ε, a Python number; 0 costs nothing.
  """
  return loss_and_residuals(logits, targets, z_loss, label_smoothing)[0]


def loss_and_residuals(
  logits: jax.Array, targets: jax.Array, z_loss: float | jax.Array, label_smoothing: float
) -> tuple[Loss, Residuals]:
  """Returns the results of `cross_entropy` and the residuals for `logits_gradient`."""
  logits32 = logits.astype(jnp.float32)
  highest = jnp.max(logits32, axis=-1)
  total = jnp.sum(jnp.exp(logits32 - highest[..., None]), axis=-1)
  log_total = jnp.log(total)
  on, off = _smoothed(label_smoothing, logits.shape[-1])
  picked = jnp.take_along_axis(logits32, targets[..., None], axis=-1)[..., 0]
  # The order of operations, here and in the gradient, gives T5X's numbers to the last bit.
  loss = -(on - off) * (picked - highest - log_total)
  if off:
    rest = jnp.sum(logits32, axis=-1) - logits.shape[-1] * (highest + log_total)
    loss = loss - off * rest - _entropy(on, off, logits.shape[-1])
  z_term = z_loss * jnp.square(log_total + highest)
  residuals = (logits, targets, jnp.asarray(z_loss, jnp.float32), highest, total)
  return (loss + z_term, z_term), residuals


def logits_gradient(label_smoothing: float, residuals: Residuals, grads: Loss) -> tuple:
  """Returns the gradients of `cross_entropy` for logits, targets (None) and z_loss."""
  logits, targets, z_loss, highest, total = residuals
  grad_loss, grad_z = grads
  on, off = _smoothed(label_smoothing, logits.shape[-1])
  lse = jnp.log(total) + highest
  exps = jnp.exp(logits.astype(jnp.float32) - highest[..., None])
  vocab = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
  wanted = jnp.where(vocab == targets[..., None], on, off)
  softmax_factor = 1.0 + 2.0 * z_loss * lse
  grad_logits = softmax_factor[..., None] * exps / total[..., None] - wanted
  grad_logits = grad_loss[..., None] * grad_logits
  grad_z_factor = grad_z * 2.0 * z_loss * lse / total
  grad_logits = grad_logits + grad_z_factor[..., None] * exps
  grad_z_loss = jnp.sum((grad_loss + grad_z) * jnp.square(lse))
  return grad_logits.astype(logits.dtype), None, grad_z_loss


cross_entropy.defvjp(loss_and_residuals, logits_gradient)


def _smoothed(label_smoothing: float, vocab: int) -> tuple[float, float]:
  """Returns the probability of the target and of every other token."""
  return 1.0 - label_smoothing, label_smoothing / (vocab - 1) if label_smoothing else 0.0


def _entropy(on: float, off: float, vocab: int) -> float:
  """Returns the entropy of the smoothed targets, the minimum of their cross-entropy."""
  return -(on * math.log(on) + (vocab - 1) * off * math.log(off)) if on else math.log(vocab - 1)


def correct_predictions(
  logits_BTV: Float[Array, "*tokens vocab"], targets_BT: Int[Array, "*tokens"]
) -> Bool[Array, "*tokens"]:
  """Returns whether each target is the argmax of the logits (the first one of equal logits)."""
  # jnp.argmax over a vocabulary is slow on a CPU; a maximum followed by a minimum is fast.
  highest_BT1 = jnp.max(logits_BTV, axis=-1, keepdims=True)
  ids = jax.lax.broadcasted_iota(jnp.int32, logits_BTV.shape, logits_BTV.ndim - 1)
  vocabulary = jnp.int32(logits_BTV.shape[-1])
  return targets_BT == jnp.min(jnp.where(logits_BTV == highest_BT1, ids, vocabulary), axis=-1)
