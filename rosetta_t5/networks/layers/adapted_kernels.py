"""A projection's frozen kernel with what an adapter adds to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from rosetta_t5.networks.layers.matmuls import product


class AdaptedKernel(struct.PyTreeNode):
  """A kernel [I, O], and what changes the projection x·kernel. What is None has no effect.

  It takes the kernel's place in a network's parameters. Layers multiply rows by it without computing
  the changed kernel, and where they need a matrix, use `merged()`.

  Attributes:
    kernel: the matrix; of int8 if it has `kernel_scale`.
    kernel_scale: what the columns of an int8 kernel are multiplied by.
    lora_a: LoRA's A; the projection adds factor · x·A·B (Hu et al. 2021, arXiv:2106.09685).
    lora_b: LoRA's B.
    dora_magnitude: the norms that the columns of kernel + factor · A·B are scaled to (DoRA, Liu et al. 2024,
      arXiv:2402.09353).
    input_scale: what the inputs are multiplied by ((IA)³, Liu et al. 2022, arXiv:2205.05638).
    output_scale: what the outputs are multiplied by.
    factor: LoRA's scale.
    dropout: the share of inputs that A does not see in training.
  """

  kernel: Float[Array, "I O"]
  kernel_scale: Float[Array, " O"] | None = None
  lora_a: Float[Array, "I R"] | None = None
  lora_b: Float[Array, "R O"] | None = None
  dora_magnitude: Float[Array, " O"] | None = None
  input_scale: Float[Array, " I"] | None = None
  output_scale: Float[Array, " O"] | None = None
  factor: float = struct.field(pytree_node=False, default=1.0)
  dropout: float = struct.field(pytree_node=False, default=0.0)

  def astype(self, dtype: Any) -> AdaptedKernel:
    """Returns the kernel with floating-point arrays of another dtype."""
    return jax.tree.map(lambda x: x if x.dtype == jnp.int8 else x.astype(dtype), self)

  def __truediv__(self, divisor: Any) -> AdaptedKernel:
    scale = 1.0 if self.output_scale is None else self.output_scale
    return self.replace(output_scale=jnp.broadcast_to(scale / divisor, self.kernel.shape[1:]))

  def merged(self, dtype: Any = jnp.float32) -> Float[Array, "I *layers O"]:
    """Returns the matrix by which the inputs are multiplied, or those of scanned layers, computed in float32."""
    if self.kernel.ndim == 3:
      layers: jax.Array = jax.vmap(lambda x: x.merged(dtype), in_axes=1, out_axes=1)(self)
      return layers
    merged_IO = self._with_low_rank()
    if self.dora_magnitude is not None:
      norms_O = jnp.linalg.norm(merged_IO, axis=0)
      merged_IO = merged_IO * (self.dora_magnitude / norms_O)[None]
    if self.input_scale is not None:
      merged_IO = merged_IO * self.input_scale[:, None]
    if self.output_scale is not None:
      merged_IO = merged_IO * self.output_scale[None]
    return merged_IO.astype(dtype)

  def project(
    self, module: nn.Module, x_NI: Array, matmul: Callable[[Array, Array], Array]
  ) -> Float[Array, "*N O"]:
    """Returns the projection of rows.

    Args:
      module: the layer, which has the random key of dropout in training.
      x_NI: the rows, in the dtype of the kernel (see `astype`).
      matmul: multiplies rows by the frozen kernel.
    """
    if self.input_scale is not None:
      x_NI = _scale(x_NI, self.input_scale)
    if self.kernel_scale is None:
      y_NO = matmul(x_NI, self.kernel)
    else:  # The backward pass keeps the int8 kernel and converts it again.
      y_NO = jax.checkpoint(_product_of_int8)(x_NI, self.kernel, self.kernel_scale)
    if self.lora_a is not None and self.lora_b is not None:
      seen_NI = x_NI
      if self.dropout and module.has_rng("dropout"):
        keep = jax.random.bernoulli(module.make_rng("dropout"), 1.0 - self.dropout, x_NI.shape)
        seen_NI = jnp.where(keep, x_NI / (1.0 - self.dropout), 0)
      y_NO = y_NO + product(product(seen_NI, self.lora_a), self.lora_b) * self.factor
    if self.dora_magnitude is not None:
      # The norm is a constant in the backward pass, as in section 4.3 of the paper.
      norms_O = jnp.linalg.norm(jax.lax.stop_gradient(self)._with_low_rank(), axis=0)
      y_NO = _scale(y_NO, (self.dora_magnitude / norms_O).astype(y_NO.dtype))
    return y_NO if self.output_scale is None else _scale(y_NO, self.output_scale)

  def _with_low_rank(self) -> jax.Array:
    """Returns kernel + factor · A·B in float32."""
    kernel_IO = self.kernel.astype(jnp.float32)
    if self.kernel_scale is not None:
      kernel_IO = _scale(kernel_IO, self.kernel_scale.astype(jnp.float32))
    if self.lora_a is None or self.lora_b is None:
      return kernel_IO
    a_IR, b_RO = self.lora_a.astype(jnp.float32), self.lora_b.astype(jnp.float32)
    return kernel_IO + jnp.matmul(a_IR, b_RO, precision="highest") * self.factor


def _product_of_int8(x_NI: Array, kernel_IO: Array, scale_O: Array) -> Array:
  return product(x_NI, _scale(kernel_IO.astype(x_NI.dtype), scale_O.astype(x_NI.dtype)))


def _scale(x: Array, vector: Array) -> Array:
  """Returns rows times a vector."""
  return x * vector.reshape((1,) * (x.ndim - 1) + vector.shape)
