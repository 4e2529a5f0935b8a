"""The ways in which a layer multiplies rows by its kernel.

A `Matmul` is called with the layer, whose variables it may read or write, with rows x_NI and kernel w_IO, and
with the logical axes of the dimensions (*N, I, *O). N and O may each be several dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rosetta_t5.networks.layers.decoding_cache import PRECOMPUTED
from rosetta_t5.parallel.placement import constrain, context_shards, target_device

Axes = tuple[str | None, ...]
Matmul = Callable[[nn.Module, jax.Array, jax.Array, Axes], jax.Array]

# The collection of zeros whose gradients are K-FAC's factors (see `product_with_factors`).
KFAC_FACTORS = "kfac_factors"


def flat_row_axes(row_axes: tuple[str, str]) -> tuple[str, ...]:
  """Returns the logical axes of the rows that a projection multiplies by its kernel.

  Rows keep two dimensions if flattening them would gather the second, which is split over devices.

  Args:
    row_axes: the logical axes of the first two dimensions of a layer's input.
  """
  return row_axes if row_axes[0] == "length" or context_shards() > 1 else row_axes[:1]


def plain_matmul(module: nn.Module, x_NI: jax.Array, w_IO: jax.Array, axes: Axes) -> jax.Array:
  """Returns x·w."""
  del module, axes
  return product(x_NI, w_IO)


def exact_matmul(module: nn.Module, x_NI: jax.Array, w_IO: jax.Array, axes: Axes) -> jax.Array:
  """Returns x·w in full float32; by default, GPUs round the operands to fewer bits."""
  del module, axes
  return jnp.matmul(x_NI, w_IO, precision=jax.lax.Precision.HIGHEST)


def matmul_of_variables(
  module: nn.Module, x_NI: jax.Array, w_IO: jax.Array, axes: Axes
) -> jax.Array:
  """Returns x·w; also measures K-FAC's factors, or caches the decoding kernel, if the layer has such variables."""
  if is_measured(module):
    return _measured_matmul(module, x_NI, w_IO)
  if is_decoding(module):
    return _decoding_matmul(module, x_NI, w_IO)
  return plain_matmul(module, x_NI, w_IO, axes)


def is_decoding(module: nn.Module) -> bool:
  """Returns whether the layer computes decoding steps, whose kernels are cached."""
  has_kernel = module.has_variable(PRECOMPUTED, "kernel")
  return has_kernel or module.is_mutable_collection(PRECOMPUTED)


def is_measured(module: nn.Module) -> bool:
  """Returns whether K-FAC measures the factors of the layer's kernel."""
  return any(module.has_variable(KFAC_FACTORS, side) for side in ("rows", "columns"))


def _measured_matmul(module: Any, x_NI: jax.Array, w_IO: jax.Array) -> jax.Array:
  """Returns x·w, with K-FAC's factors of the stored kernel as gradients; see `product_with_factors`."""
  rows, columns = (module.get_variable(KFAC_FACTORS, side) for side in ("rows", "columns"))
  if columns is not None and module.kernel_divisor is not None:
    columns = columns / jnp.square(module.kernel_divisor).astype(columns.dtype)
  return product_with_factors(x_NI, w_IO, rows, columns)


def _decoding_matmul(module: nn.Module, x_NI: jax.Array, w_IO: jax.Array) -> jax.Array:
  """Returns x·w; writes or reads the kernel of decoding steps, which is cast, and on a CPU transposed."""
  is_cpu = target_device().platform == "cpu"
  if module.has_variable(PRECOMPUTED, "kernel"):
    kernel: jax.Array = module.get_variable(PRECOMPUTED, "kernel")
    return product_of_few_rows(x_NI, kernel) if is_cpu else product(x_NI, kernel)
  if not module.is_initializing() and (is_cpu or w_IO.dtype != jnp.float32):
    module.put_variable(PRECOMPUTED, "kernel", w_IO.T if is_cpu else w_IO)
  return product(x_NI, w_IO)


@jax.custom_vjp
def product(x_NI: Float[Array, "*N I"], w_IO: Float[Array, "I ..."]) -> Float[Array, "*N ..."]:
  """Returns x·w, with the gradient for w written as xᵀ·dy.

  JAX would write that gradient as (dyᵀ·x)ᵀ. XLA on a CPU then computes dy, often a long chain of
  operations of a gated activation, directly into a transposed array, which is slower than the matmul.
  """
  return jnp.tensordot(x_NI, w_IO, axes=1)


def _product_backward(operands: tuple[Array, Array], dy_NO: Array) -> tuple[Array, Array]:
  x_NI, w_IO = operands
  w_OI, x_IN = jnp.moveaxis(w_IO, 0, -1), jnp.moveaxis(x_NI, -1, 0)
  dx_NI = jnp.tensordot(dy_NO, w_OI, axes=w_OI.ndim - 1)
  return dx_NI, jnp.tensordot(x_IN, dy_NO, axes=x_IN.ndim - 1)


product.defvjp(lambda x, w: (jnp.tensordot(x, w, axes=1), (x, w)), _product_backward)


@jax.custom_vjp
def product_with_factors(
  x_NI: Float[Array, "*N I"],
  w_IO: Float[Array, "I O"],
  rows_II: Float[Array, "I I"] | None,
  columns_OO: Float[Array, "O O"] | None,
) -> Float[Array, "*N O"]:
  """Returns x·w, with the factors of K-FAC as the gradients for the last two arguments.

  They are the means of xᵀ·x and dyᵀ·dy over the rows N, in float32. As gradients, they pass through
  scans and rematerialization, and they are summed over the devices that share the rows.
  """
  return jnp.tensordot(x_NI, w_IO, axes=1)


def _product_with_factors_forward(
  x_NI: Array, w_IO: Array, rows_II: Array | None, columns_OO: Array | None
) -> tuple[Array, Any]:
  return jnp.tensordot(x_NI, w_IO, axes=1), (x_NI, w_IO, rows_II is None, columns_OO is None)


def _product_with_factors_backward(operands: Any, dy_NO: Array) -> tuple[Array | None, ...]:
  x_NI, w_IO, no_rows, no_columns = operands

  def mean_of_squares(x_NI: Array) -> Array:
    flat_NI = x_NI.reshape(-1, x_NI.shape[-1]).astype(jnp.float32)
    mean_II = flat_NI.T @ flat_NI / len(flat_NI)
    # XLA (jax 0.10) computes a wrong xᵀ·x if both dimensions of the result are split over devices.
    return constrain(mean_II, (None, None))

  rows_II = None if no_rows else mean_of_squares(x_NI)
  columns_OO = None if no_columns else mean_of_squares(dy_NO)
  return *_product_backward((x_NI, w_IO), dy_NO), rows_II, columns_OO


product_with_factors.defvjp(_product_with_factors_forward, _product_with_factors_backward)


def product_of_few_rows(
  x_NI: Float[Array, "*N I"], w_OI: Float[Array, "O I"]
) -> Float[Array, "*N O"]:
  """Returns x·wᵀ, computed as w·xᵀ: XLA on a CPU rearranges the second operand of a matmul.

  With few rows, w·xᵀ takes three quarters of the time of x·w. Without the barrier XLA would swap the
  operands back.
  """
  y_ON = jnp.tensordot(w_OI, x_NI, axes=((-1,), (-1,)))
  return jnp.moveaxis(jax.lax.optimization_barrier(y_ON), 0, -1)
