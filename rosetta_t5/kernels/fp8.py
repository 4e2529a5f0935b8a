"""Matrix multiplication in fp8: e4m3 in the forward pass, e5m2 for gradients, one scale per array.

The scale of an array, or of each device's part of it, comes from its own maximum ("current scaling"),
so the matmul is a pure function
of its operands and works in scans, with microbatches and in resumed runs. A GPU from Hopper on
multiplies fp8 operands twice as fast as bfloat16; other devices emulate them. The formats are those of
Micikevicius et al. (FP8 Formats for Deep Learning, 2022).
"""

from __future__ import annotations

import functools
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
# A result is multiplied by the inverse of its operands' two scales. If both are this large, the inverse
# is 0 in float32, and so would the result be.
_LARGEST_SCALE = 2.0**100


def quantize(
  x: Float[Array, "..."], dtype: Any, axes: tuple[int, ...] | None = None
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
  """Returns (x · scale in `dtype`, scale), with the largest power of two for which all of x fits.

  Scaling by a power of two does not round. Infinities and NaN become NaN.

  Args:
    x: a float32 or bfloat16 array.
    dtype: an fp8 type.
    axes: the dimensions whose numbers share a scale; the scale has size 1 there. None for all of
      them, and a scalar scale.
  """
  highest = jnp.max(jnp.abs(x), axis=axes, keepdims=axes is not None).astype(jnp.float32)
  ratio = jnp.where(highest > 0, float(jnp.finfo(dtype).max) / highest, 1.0)
  bits = jax.lax.bitcast_convert_type(jnp.minimum(ratio, _LARGEST_SCALE), jnp.int32)
  scale = jax.lax.bitcast_convert_type(bits & _EXPONENT, jnp.float32)
  return (x * scale.astype(x.dtype)).astype(dtype), scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def fp8_matmul(
  x_NI: Float[Array, "*N I"], w_IO: Float[Array, "I ..."], parts: tuple[int, ...] = ()
) -> Float[Array, "*N ..."]:
  """Returns x·w in the operands' type, computed in fp8, as are both matmuls of the gradient.

  Args:
    x_NI: rows, in one dimension or several.
    w_IO: a kernel, whose outputs may also have several dimensions.
    parts: the number of parts into which devices split each dimension of *N, I and the outputs; ()
      for one. They must divide the dimensions. Each part of an array has its own scale, so no device waits for the others' maxima.
  """
  return _forward(x_NI, w_IO, parts)[0]


def _forward(x_NI: Array, w_IO: Array, parts: tuple[int, ...]) -> tuple[Array, tuple]:
  parts = parts or (1,) * (x_NI.ndim + w_IO.ndim - 1)
  x8_NI = _quantize_parts(x_NI, FORWARD, parts[: x_NI.ndim])
  w8_IO = _quantize_parts(w_IO, FORWARD, parts[x_NI.ndim - 1 :])
  y_NO = _unscaled_dot(x8_NI, w8_IO, (x_NI.ndim - 1,), (0,), x_NI.dtype)
  return y_NO, (x8_NI, w8_IO)


def _backward(parts: tuple[int, ...], residuals: tuple, dy_NO: Array) -> tuple[Array, Array]:
  x8_NI, w8_IO = residuals
  parts = parts or (1,) * (dy_NO.ndim + 1)
  rows = tuple(range(x8_NI[0].ndim // 2 - 1))
  outputs = tuple(range(len(rows), dy_NO.ndim))
  dy8_NO = _quantize_parts(dy_NO, GRADIENT, parts[: len(rows)] + parts[len(rows) + 1 :])
  dx_NI = _unscaled_dot(dy8_NO, w8_IO, outputs, tuple(range(1, len(outputs) + 1)), dy_NO.dtype)
  dw_IO = _unscaled_dot(x8_NI, dy8_NO, rows, rows, dy_NO.dtype)
  return dx_NI, dw_IO


fp8_matmul.defvjp(_forward, _backward)


def _quantize_parts(x: Array, dtype: Any, parts: tuple[int, ...]) -> tuple[Array, Array]:
  """Returns x in fp8 and its scales; each dimension becomes two, the parts and what is in one."""
  pairs = [(count, size // count) for count, size in zip(parts, x.shape, strict=True)]
  split = x.reshape([size for pair in pairs for size in pair])
  return quantize(split, dtype, axes=tuple(range(1, split.ndim, 2)))


def _unscaled_dot(
  a: tuple[Array, Array],
  b: tuple[Array, Array],
  a_axes: tuple[int, ...],
  b_axes: tuple[int, ...],
  dtype: Any,
) -> Array:
  """Returns the matmul, over `a_axes` and `b_axes`, of two arrays from `_quantize_parts`.

  The products of the contracted dimensions' parts are unscaled before they are summed.
  """
  (a8, a_scale), (b8, b_scale) = a, b
  of_parts = [2 * axis for axis in a_axes], [2 * axis for axis in b_axes]
  in_parts = [2 * axis + 1 for axis in a_axes], [2 * axis + 1 for axis in b_axes]
  # The operands are not converted back to a wider type first: XLA could then simplify the conversions
  # away and multiply the numbers before rounding.
  y = jax.lax.dot_general(a8, b8, (in_parts, of_parts), preferred_element_type=dtype)
  ones = (1,) * (y.ndim - len(a_axes))
  inverse = jnp.float32(1)
  for scale, axes, is_first in ((a_scale, a_axes, True), (b_scale, b_axes, False)):
    summed = tuple(scale.shape[2 * axis] for axis in axes)
    kept = tuple(size for axis, size in enumerate(scale.shape) if axis // 2 not in axes)
    others = ones[len(kept) :]
    scale = jnp.moveaxis(scale, [2 * axis for axis in axes], range(len(axes)))
    inverse /= scale.reshape(summed + (kept + others if is_first else others + kept))
  # One multiplication, which XLA makes a part of the matmul.
  y = y * inverse.astype(dtype)
  # In `dtype`, so that devices exchange numbers of that size.
  y = jax.lax.reduce(y, np.zeros((), dtype), jax.lax.add, tuple(range(len(a_axes))))
  sizes = y.shape
  return y.reshape([p * s for p, s in zip(sizes[::2], sizes[1::2], strict=True)])
