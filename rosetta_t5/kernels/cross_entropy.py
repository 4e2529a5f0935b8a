"""Cross-entropy from integer targets with z-loss and label smoothing, and its gradient.

The forward pass allocates nothing of the logits' size, and the backward pass only the gradient: there
are no one-hot targets and no log-softmax. The residuals are the logits and two numbers per token.

`chunked_cross_entropy` computes the output layer too, for one chunk of positions at a time. The logits
of T5-base at batch 128 take 2.1 GB, those of mT5 16.4 GB, and their gradient as much again; here only
the logits of one chunk exist at a time. Its backward pass recomputes logits and softmax from two numbers
per token, a third more work for the output layer.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rosetta_t5.kernels.xla_attention import soft_cap
from rosetta_t5.parallel.placement import constrain, context_shards, count_shards

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


# A logit that gives probability 0, and still has a finite gradient.
_EXCLUDED = -1e10


class LogitFactors(NamedTuple):
  """The two factors whose matmul gives the logits.

  Attributes:
    hidden_BTD: the decoder's last activations.
    kernel_DV: the output layer's kernel; the logits are computed in its type.
    excluded_V: the tokens whose probability is 0 whatever their logits; None for no such tokens.
    softcap: c of the soft limit of the logits, c·tanh(hidden·kernel/c); None for no limit.
  """

  hidden_BTD: Float[Array, "B T D"]
  kernel_DV: Float[Array, "D V"]
  excluded_V: Bool[Array, " V"] | None = None
  softcap: float | Float[Array, ""] | None = None


class ChunkedLoss(NamedTuple):
  """Each token's loss, its z-loss part, and whether the target has the highest logit."""

  loss_BT: Float[Array, "B T"]
  z_loss_BT: Float[Array, "B T"]
  correct_BT: Bool[Array, "B T"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def chunked_cross_entropy(
  factors: LogitFactors,
  targets_BT: Int[Array, "B T"],
  z_loss: float | int | Float[Array, ""],
  label_smoothing: float,
  chunk: int,
) -> ChunkedLoss:
  """Returns `cross_entropy` of the logits hidden·kernel without storing all of them.

  Args:
    factors: the two factors of the logits.
    targets_BT: the index of each token in the vocabulary.
    z_loss: the weight of the squared log of the softmax denominator.
    label_smoothing: ε, a Python number.
    chunk: the number of positions whose logits exist at a time, [B, chunk, V]. The length is split
      and not the batch, which may be split over devices. If the positions are split over devices
      too, a chunk has as many of each device.
  """
  return _forward(factors, targets_BT, z_loss, label_smoothing, chunk)[0]


def _forward(
  factors: LogitFactors, targets_BT: Array, z_loss: float | Array, smoothing: float, chunk: int
) -> tuple[ChunkedLoss, tuple]:
  # A split kernel is gathered here, or else every chunk would gather it.
  factors = factors._replace(kernel_DV=constrain(factors.kernel_DV, (None, "vocab")))

  def one_chunk(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
    hidden_BCD, targets_BC = part
    logits_BCV = _logits(hidden_BCD, factors)
    loss, residuals = loss_and_residuals(logits_BCV, targets_BC, z_loss, smoothing)
    *_, highest, total = residuals
    return (*loss, correct_predictions(logits_BCV, targets_BC), highest, total)

  parts = _split(factors.hidden_BTD, chunk), _split(targets_BT, chunk)
  length = targets_BT.shape[1]
  *outputs, highest, total = (_join(array, length) for array in jax.lax.map(one_chunk, parts))
  z_loss = jnp.asarray(z_loss, jnp.float32)
  return ChunkedLoss(*outputs), (factors, targets_BT, z_loss, highest, total)


def _backward(label_smoothing: float, chunk: int, residuals: tuple, grads: ChunkedLoss) -> tuple:
  factors, targets_BT, z_loss, highest, total = residuals
  hidden_BTD, kernel_DV, excluded_V, softcap = factors
  per_token = (targets_BT, highest, total, grads.loss_BT, grads.z_loss_BT)
  # Each device adds up the kernel's gradient of its own examples. The devices' sums are added once, at the end.
  devices = math.gcd(count_shards("batch"), hidden_BTD.shape[0])

  def one_chunk(carry: tuple[jax.Array, jax.Array], part: tuple) -> tuple[tuple, jax.Array]:
    grad_kernel_NDV, grad_z_loss = carry
    hidden_BCD, targets, highest, total, grad_loss, grad_z = part
    logits_BCV = _logits(hidden_BCD, factors)
    grad_BCV, _, grad_z_part = logits_gradient(
      label_smoothing, (logits_BCV, targets, z_loss, highest, total), (grad_loss, grad_z)
    )
    if softcap is not None:
      grad_BCV *= 1.0 - jnp.square(logits_BCV / softcap)
    grad_BCV = set_logits(grad_BCV, excluded_V, 0.0)
    hidden_BCD = hidden_BCD.astype(kernel_DV.dtype)
    pair = (x.reshape(devices, -1, *x.shape[1:]) for x in (hidden_BCD, grad_BCV))
    grad_kernel_NDV += jnp.einsum("nbcd,nbcv->ndv", *pair)
    grad_BCD = jnp.einsum("bcv,dv->bcd", grad_BCV, kernel_DV)
    return (grad_kernel_NDV, grad_z_loss + grad_z_part), grad_BCD

  # The last chunk is padded with positions that have a denominator of 1 and no gradient.
  parts = [_split(hidden_BTD, chunk)]
  parts += [_split(array, chunk, padding=int(array is total)) for array in per_token]
  zeros_NDV = jnp.zeros((devices, *kernel_DV.shape), kernel_DV.dtype)
  carry = (constrain(zeros_NDV, ("batch", None, "vocab")), jnp.zeros((), jnp.float32))
  (grad_kernel_NDV, grad_z_loss), grad_hidden = jax.lax.scan(one_chunk, carry, tuple(parts))
  grad_hidden_BTD = _join(grad_hidden, targets_BT.shape[1]).astype(hidden_BTD.dtype)
  return LogitFactors(grad_hidden_BTD, grad_kernel_NDV.sum(0)), None, grad_z_loss


chunked_cross_entropy.defvjp(_forward, _backward)


def set_logits(
  logits_BTV: Float[Array, "B T V"], chosen_V: Bool[Array, " V"] | None, value: float = _EXCLUDED
) -> Float[Array, "B T V"]:
  """Returns the logits with those of the chosen tokens set to `value`; unchanged if these are None."""
  if chosen_V is None:
    return logits_BTV
  return jnp.where(chosen_V[None, None], jnp.asarray(value, logits_BTV.dtype), logits_BTV)


def _logits(hidden_BCD: jax.Array, factors: LogitFactors) -> jax.Array:
  hidden_BCD = hidden_BCD.astype(factors.kernel_DV.dtype)
  logits_BCV = jnp.einsum("bcd,dv->bcv", hidden_BCD, factors.kernel_DV)
  return set_logits(soft_cap(logits_BCV, factors.softcap), factors.excluded_V)


def _split(array_BT: jax.Array, chunk: int, padding: int = 0) -> jax.Array:
  """Returns [chunks, B, chunk, ...], with each device's last chunk padded."""
  batch, length, *rest = array_BT.shape
  devices = context_shards(length)
  each = max(chunk // devices, 1)
  array_BPT = array_BT.reshape(batch, devices, length // devices, *rest)
  widths = ((0, 0), (0, 0), (0, -array_BPT.shape[2] % each), *((0, 0) for _ in rest))
  padded = jnp.pad(array_BPT, widths, constant_values=padding)
  chunks = jnp.moveaxis(padded.reshape(batch, devices, -1, each, *rest), 2, 0)
  return chunks.reshape(-1, batch, devices * each, *rest)


def _join(chunks: jax.Array, length: int) -> jax.Array:
  """Returns [B, T, ...] from what `_split` returned."""
  number, batch, chunk, *rest = chunks.shape
  devices = context_shards(length)
  parts = chunks.reshape(number, batch, devices, chunk // devices, *rest)
  joined = jnp.moveaxis(parts, 0, 2).reshape(batch, devices, -1, *rest)
  return joined[:, :, : length // devices].reshape(batch, length, *rest)
