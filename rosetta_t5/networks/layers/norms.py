"""Layer norms: T5's, which divides by the root mean square, and the one with mean and bias."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.partitioning import param_with_axes
from jaxtyping import Array, Float

from rosetta_t5.networks.gpu_fusion import computes_on_gpu
from rosetta_t5.networks.layers.dense import Initializer
from rosetta_t5.parallel.placement import constrain


class LayerNorm(nn.Module):
  """T5's norm: division by the root mean square, no mean, no bias; statistics in float32.

  Attributes:
    epsilon: added to the mean square.
    dtype: the type of the result.
    scale_init: initializer of the scale.
    plus_one: whether 1 is added to the scale, which is applied in float32 (Gemma).
    axis: the logical axis of the scale.
  """

  epsilon: float = 1e-6
  dtype: Any = jnp.float32
  scale_init: Initializer = nn.initializers.ones
  plus_one: bool = False
  axis: str = "embed"

  @nn.compact
  def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Returns the normalized, scaled input."""
    size = (x.shape[-1],)
    scale_D = param_with_axes("scale", self.scale_init, size, jnp.float32, axes=(self.axis,))
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
    normed_BTD = x_BTD * jax.lax.rsqrt(mean_square + self.epsilon)
    scale_11D = scale_D.reshape((1,) * (x_BTD.ndim - 1) + (-1,))
    if self.plus_one:
      return (normed_BTD * (1.0 + scale_11D)).astype(self.dtype)
    return normed_BTD.astype(self.dtype) * scale_11D.astype(self.dtype)


class StandardLayerNorm(nn.Module):
  """GPT's norm (Ba et al., 2016): it subtracts the mean and adds a bias; statistics in float32.

  Attributes:
    epsilon: added to the variance.
    dtype: the type of the result.
    use_bias: whether there is a bias.
    axis: the logical axis of scale and bias.
  """

  epsilon: float = 1e-5
  dtype: Any = jnp.float32
  use_bias: bool = True
  axis: str = "embed"

  @nn.compact
  def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Returns the normalized, scaled and shifted input."""
    leading = (1,) * (x.ndim - 1)

    def parameter(name: str, init: Initializer) -> jax.Array:
      value_D = param_with_axes(name, init, x.shape[-1:], jnp.float32, axes=(self.axis,))
      return value_D.reshape(*leading, -1)

    scale = parameter("scale", nn.initializers.ones)
    bias = parameter("bias", nn.initializers.zeros) if self.use_bias else None
    x_BTD = x.astype(jnp.float32)
    x_BTD = x_BTD - jnp.mean(x_BTD, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(x_BTD), axis=-1, keepdims=True)
    scaled_BTD = x_BTD * jax.lax.rsqrt(variance + self.epsilon) * scale
    return (scaled_BTD if bias is None else scaled_BTD + bias).astype(self.dtype)


NORMS: dict[str, Callable[..., nn.Module]] = {
  "rms": LayerNorm,
  "rms_plus_one": functools.partial(LayerNorm, scale_init=nn.initializers.zeros, plus_one=True),
  "layer": StandardLayerNorm,
  "layer_without_bias": functools.partial(StandardLayerNorm, use_bias=False),
}


def make_norm(config: Any, name: str, axis: str = "embed") -> nn.Module:
  """Returns a norm of the kind `config.norm`, with the epsilon `config.norm_epsilon`."""
  return NORMS[config.norm](epsilon=config.norm_epsilon, dtype=config.dtype, axis=axis, name=name)
