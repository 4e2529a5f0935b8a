"""Matrix products in eight bits: e4m3 forward, e5m2 gradients, each array scaled by its own maximum.

Nothing is remembered between steps ("current scaling"): the product is a function of its operands,
so it is at home in scans, microbatches and resumed runs. A GPU from Hopper on multiplies such operands
twice as fast as bfloat16; other devices emulate them (Micikevicius et al., FP8 formats, 2022).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

FORWARD = jnp.float8_e4m3fn
GRADIENT = jnp.float8_e5m2

# The exponent bits of a float32: what remains of a number under them is the power of two below it.
_EXPONENT = np.int32(0x7F800000)
# Keeps the inverse of a scale, too, among the normal numbers of bfloat16.
_LARGEST_SCALE = 2.0**100


def quantise(x: Float[Array, "..."], dtype: Any) -> tuple[Float[Array, "..."], Float[Array, ""]]:
  """Returns (x · scale in `dtype`, scale), scale the largest power of two that lets all of x fit.

  With a power of two the scaling itself rounds nothing, and an eight-bit float loses no digit to it.
  Infinities and NaN come out as NaN.

  Args:
    x: of float32 or bfloat16.
    dtype: an eight-bit float type.
  """
  highest = jnp.max(jnp.abs(x)).astype(jnp.float32)
  ratio = jnp.where(highest > 0, float(jnp.finfo(dtype).max) / highest, 1.0)
  bits = jax.lax.bitcast_convert_type(jnp.minimum(ratio, _LARGEST_SCALE), jnp.int32)
  scale = jax.lax.bitcast_convert_type(bits & _EXPONENT, jnp.float32)
  return (x * scale.astype(x.dtype)).astype(dtype), scale


@jax.custom_vjp
def fp8_product(x_NI: Float[Array, "*N I"], w_IO: Float[Array, "I ..."]) -> Float[Array, "*N ..."]:
  """Returns x·w, in their type, of operands rounded to eight bits; so are both products backward.

  Args:
    x_NI: rows, in one dimension or several.
    w_IO: a kernel, whose outputs may have several dimensions, too.
  """
  return _forward(x_NI, w_IO)[0]


def _forward(x_NI: Array, w_IO: Array) -> tuple[Array, tuple[Array, ...]]:
  x8_NI, x_scale = quantise(x_NI, FORWARD)
  w8_IO, w_scale = quantise(w_IO, FORWARD)
  last = (x_NI.ndim - 1,)
  y_NO = _scaled_dot(x8_NI, w8_IO, (last, (0,)), x_scale, w_scale, x_NI.dtype)
  return y_NO, (x8_NI, x_scale, w8_IO, w_scale)


def _backward(residuals: tuple[Array, ...], dy_NO: Array) -> tuple[Array, Array]:
  x8_NI, x_scale, w8_IO, w_scale = residuals
  dy8_NO, dy_scale = quantise(dy_NO, GRADIENT)
  rows = tuple(range(x8_NI.ndim - 1))
  outputs = tuple(range(len(rows), dy_NO.ndim)), tuple(range(1, w8_IO.ndim))
  dx_NI = _scaled_dot(dy8_NO, w8_IO, outputs, dy_scale, w_scale, dy_NO.dtype)
  dw_IO = _scaled_dot(x8_NI, dy8_NO, (rows, rows), x_scale, dy_scale, dy_NO.dtype)
  return dx_NI, dw_IO


fp8_product.defvjp(_forward, _backward)


def _scaled_dot(
  a: Array,
  b: Array,
  sums: tuple[tuple[int, ...], tuple[int, ...]],
  a_scale: Array,
  b_scale: Array,
  dtype: Any,
) -> Array:
  """Returns the product of two quantised arrays over the dimensions `sums`, their scales undone."""
  # The operands go in as they are: a product of numbers converted back could be simplified into one
  # of the numbers before they were rounded.
  product = jax.lax.dot_general(a, b, (sums, ((), ())), preferred_element_type=dtype)
  return product * (1.0 / a_scale).astype(dtype) * (1.0 / b_scale).astype(dtype)
