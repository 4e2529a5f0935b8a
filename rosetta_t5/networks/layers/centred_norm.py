"""The layer norm that GPT has: with a mean and a bias, other than T5's."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.partitioning import param_with_axes
from jaxtyping import Array, Float


class CentredLayerNorm(nn.Module):
  """The norm of GPT (Ba et al., 2016): the mean is taken off, a bias added; statistics in float32.

  Attributes:
    epsilon: added to the variance.
    dtype: what the result is returned in.
  """

  epsilon: float = 1e-5
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Returns the normalised, scaled and shifted input."""
    size = (x.shape[-1],)
    scale_D = param_with_axes("scale", nn.initializers.ones, size, jnp.float32, axes=("embed",))
    bias_D = param_with_axes("bias", nn.initializers.zeros, size, jnp.float32, axes=("embed",))
    x_BTD = x.astype(jnp.float32)
    x_BTD = x_BTD - jnp.mean(x_BTD, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(x_BTD), axis=-1, keepdims=True)
    normed_BTD = x_BTD * jax.lax.rsqrt(variance + self.epsilon)
    return (normed_BTD * scale_D[None, None] + bias_D[None, None]).astype(self.dtype)
