"""Matrix multiplication in fp8: e4m3 in the forward pass, e5m2 for gradients, one scale per array.

The scale of an array comes from its own maximum ("current scaling"), so the matmul is a pure function
of its operands and works in scans, with microbatches and in resumed runs. A GPU from Hopper on
multiplies fp8 operands twice as fast as bfloat16; other devices emulate them. The formats are those of
Micikevicius et al. (FP8 Formats for Deep Learning, 2022).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

FORWARD = jnp.float8_e4m3fn
GRADIENT = jnp.float8_e5m2

# The exponent bits of a float32. A positive number with all other bits cleared is the largest power of
# two that is not greater.
_EXPONENT = np.int32(0x7F800000)
# With this limit the inverse of a scale, too, is a normal number in bfloat16.
_LARGEST_SCALE = 2.0**100


def quantize(x: Float[Array, "..."], dtype: Any) -> tuple[Float[Array, "..."], Float[Array, ""]]:
  """Returns (x · scale in `dtype`, scale), with the largest power of two for which all of x fits.

  Scaling by a power of two does not round. Infinities and NaN become NaN.

  Args:
    x: a float32 or bfloat16 array.
    dtype: an fp8 type.
  """
  highest = jnp.max(jnp.abs(x)).astype(jnp.float32)
  ratio = jnp.where(highest > 0, float(jnp.finfo(dtype).max) / highest, 1.0)
  bits = jax.lax.bitcast_convert_type(jnp.minimum(ratio, _LARGEST_SCALE), jnp.int32)
  scale = jax.lax.bitcast_convert_type(bits & _EXPONENT, jnp.float32)
  return (x * scale.astype(x.dtype)).astype(dtype), scale


@jax.custom_vjp
def fp8_matmul(x_NI: Float[Array, "*N I"], w_IO: Float[Array, "I ..."]) -> Float[Array, "*N ..."]:
  """Returns x·w in the operands' type, computed in fp8, as are both matmuls of the gradient.

  Args:
    x_NI: rows, in one dimension or several.
    w_IO: a kernel, whose outputs may also have several dimensions.
  """
  return _forward(x_NI, w_IO)[0]


def _forward(x_NI: Array, w_IO: Array) -> tuple[Array, tuple[Array, ...]]:
  x8_NI, x_scale = quantize(x_NI, FORWARD)
  w8_IO, w_scale = quantize(w_IO, FORWARD)
  last = (x_NI.ndim - 1,)
  y_NO = _scaled_dot(x8_NI, w8_IO, (last, (0,)), x_scale, w_scale, x_NI.dtype)
  return y_NO, (x8_NI, x_scale, w8_IO, w_scale)


def _backward(residuals: tuple[Array, ...], dy_NO: Array) -> tuple[Array, Array]:
  x8_NI, x_scale, w8_IO, w_scale = residuals
  dy8_NO, dy_scale = quantize(dy_NO, GRADIENT)
  rows = tuple(range(x8_NI.ndim - 1))
  outputs = tuple(range(len(rows), dy_NO.ndim)), tuple(range(1, w8_IO.ndim))
  dx_NI = _scaled_dot(dy8_NO, w8_IO, outputs, dy_scale, w_scale, dy_NO.dtype)
  dw_IO = _scaled_dot(x8_NI, dy8_NO, (rows, rows), x_scale, dy_scale, dy_NO.dtype)
  return dx_NI, dw_IO


fp8_matmul.defvjp(_forward, _backward)


def _scaled_dot(
  a: Array,
  b: Array,
  contracting: tuple[tuple[int, ...], tuple[int, ...]],
  a_scale: Array,
  b_scale: Array,
  dtype: Any,
) -> Array:
  """Returns the matmul of two quantized arrays over the dimensions `contracting`, unscaled."""
  # The operands are not converted back to a wider type first: XLA could then simplify the conversions
  # away and multiply the numbers before rounding.
  y = jax.lax.dot_general(a, b, (contracting, ((), ())), preferred_element_type=dtype)
  return y * (1.0 / a_scale).astype(dtype) * (1.0 / b_scale).astype(dtype)
