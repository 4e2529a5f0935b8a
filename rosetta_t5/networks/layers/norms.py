"""Layer norms: T5's, which divides by the root mean square, and the one with mean and bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.partitioning import param_with_axes
from jaxtyping import Array, Float

from rosetta_t5.networks.gpu_fusion import computes_on_gpu
from rosetta_t5.networks.layers.dense import Initializer
from rosetta_t5.parallel.axis_rules import constrain


class LayerNorm(nn.Module):
  """T5's norm: division by the root mean square, no mean, no bias; statistics in float32.

  Attributes:
    epsilon: added to the mean square.
    dtype: the type of the result.
    scale_init: initializer of the scale.
  """

  epsilon: float = 1e-6
  dtype: Any = jnp.float32
  scale_init: Initializer = nn.initializers.ones

  @nn.compact
  def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Returns the normalized, scaled input."""
    size = (x.shape[-1],)
    scale_D = param_with_axes("scale", self.scale_init, size, jnp.float32, axes=("embed",))
    normalize: Callable[..., jax.Array] = self._normalize
    if computes_on_gpu(self):
      # Without a saved statistic, XLA normalizes in one kernel, which reads its input once. The scale
      # is gathered before, not again in the backward pass.
      scale_D = constrain(scale_D, (None,))
      normalize = jax.checkpoint(normalize)
    return normalize(x, scale_D)

  def _normalize(self, x: jax.Array, scale_D: jax.Array) -> jax.Array:
    x_BTD = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x_BTD), axis=-1, keepdims=True)
    normed_BTD = (x_BTD * jax.lax.rsqrt(mean_square + self.epsilon)).astype(self.dtype)
    scale_11D = scale_D.astype(self.dtype).reshape((1,) * (x_BTD.ndim - 1) + (-1,))
    return normed_BTD * scale_11D


class StandardLayerNorm(nn.Module):
  """GPT's norm (Ba et al., 2016): it subtracts the mean and adds a bias; statistics in float32.

  Attributes:
    epsilon: added to the variance.
    dtype: the type of the result.
  """

  epsilon: float = 1e-5
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Returns the normalized, scaled and shifted input."""
    size = (x.shape[-1],)
    scale_D = param_with_axes("scale", nn.initializers.ones, size, jnp.float32, axes=("embed",))
    bias_D = param_with_axes("bias", nn.initializers.zeros, size, jnp.float32, axes=("embed",))
    x_BTD = x.astype(jnp.float32)
    x_BTD = x_BTD - jnp.mean(x_BTD, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(x_BTD), axis=-1, keepdims=True)
    normed_BTD = x_BTD * jax.lax.rsqrt(variance + self.epsilon)
    return (normed_BTD * scale_D[None, None] + bias_D[None, None]).astype(self.dtype)


def make_norm(config: Any, name: str) -> nn.Module:
  """Returns a norm of the kind `config.norm`, with the epsilon `config.norm_epsilon`."""
  norm_cls: Any = {"rms": LayerNorm, "layer": StandardLayerNorm}[config.norm]
  return norm_cls(epsilon=config.norm_epsilon, dtype=config.dtype, name=name)
