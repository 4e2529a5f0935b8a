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

from rosetta_t5.networks.gpu_fusion import cast_parameter, computes_on_gpu
from rosetta_t5.networks.layers.dense import Initializer
from rosetta_t5.parallel.placement import constrain


class LayerNorm(nn.Module):
  """T5's norm: division by the root mean square, no mean, no bias; statistics in float32.

  With `subtract_mean` it is GPT's (Ba et al., 2016).

  Attributes:
    epsilon: added to the mean square, which is the variance if the mean is subtracted.
    dtype: the type of the result.
    scale_init: initializer of the scale.
    plus_one: whether 1 is added to the scale, which is applied in float32 (Gemma).
    axis: the logical axis of scale and bias.
    subtract_mean: whether the mean is subtracted first, and scale and bias are applied in float32.
    use_bias: whether there is a bias, initially zero.
  """

  epsilon: float = 1e-6
  dtype: Any = jnp.float32
  scale_init: Initializer = nn.initializers.ones
  plus_one: bool = False
  axis: str = "embed"
  subtract_mean: bool = False
  use_bias: bool = False

  @nn.compact
  def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Returns the normalized, scaled and, if there is a bias, shifted input."""
    size, axes, bias_D = (x.shape[-1],), (self.axis,), None
    scale_D = param_with_axes("scale", self.scale_init, size, jnp.float32, axes=axes)
    if self.use_bias:
      bias_D = param_with_axes("bias", nn.initializers.zeros, size, jnp.float32, axes=axes)
    normalize: Callable[..., jax.Array] = self._normalize
    if computes_on_gpu(self) and not self.subtract_mean:
      # Without a saved statistic, XLA normalizes in one kernel, which reads its input once. The scale
      # is gathered and cast before, not again in the backward pass.
      scale_D = constrain(scale_D, (None,))
      scale_D = scale_D if self.plus_one else cast_parameter(scale_D, self.dtype)
      normalize = jax.checkpoint(normalize)
    return normalize(x, scale_D, bias_D)

  def _normalize(self, x: jax.Array, scale_D: jax.Array, bias_D: jax.Array | None) -> jax.Array:
    x_BTD, leading = x.astype(jnp.float32), (1,) * (x.ndim - 1)
    if self.subtract_mean:
      x_BTD = x_BTD - jnp.mean(x_BTD, axis=-1, keepdims=True)
    mean_square = jnp.mean(jnp.square(x_BTD), axis=-1, keepdims=True)
    normed_BTD = x_BTD * jax.lax.rsqrt(mean_square + self.epsilon)
    scale_11D = scale_D.reshape(*leading, -1)
    if not (self.plus_one or self.subtract_mean):
      return normed_BTD.astype(self.dtype) * scale_11D.astype(self.dtype)
    scaled_BTD = normed_BTD * (1.0 + scale_11D if self.plus_one else scale_11D)
    if bias_D is not None:
      scaled_BTD += bias_D.reshape(*leading, -1)
    return scaled_BTD.astype(self.dtype)


NORMS: dict[str, Callable[..., nn.Module]] = {
  "rms": LayerNorm,
  "rms_plus_one": functools.partial(LayerNorm, scale_init=nn.initializers.zeros, plus_one=True),
  "layer": functools.partial(LayerNorm, subtract_mean=True, use_bias=True),
  "layer_without_bias": functools.partial(LayerNorm, subtract_mean=True),
}


def make_norm(config: Any, name: str, axis: str = "embed") -> nn.Module:
  """Returns a norm of the kind `config.norm`, with the epsilon `config.norm_epsilon`."""
  return NORMS[config.norm](epsilon=config.norm_epsilon, dtype=config.dtype, axis=axis, name=name)
