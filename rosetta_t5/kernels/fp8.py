"""Matrix multiplication in fp8: e4m3 in the forward pass, e5m2 for gradients, one scale per array.

The scale of an array, or of each device's part of it, comes from its own maximum ("current scaling"),
so the matmul is a pure function of its operands and works in scans, with microbatches and in resumed
runs. A GPU from Hopper on multiplies fp8 operands twice as fast as bfloat16; other devices emulate
them. The formats are those of Micikevicius et al. (FP8 Formats for Deep Learning, 2022).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

FORWARD = jnp.float8_e4m3fn
GRADIENT = jnp.float8_e5m2

# A lower bound of scales, so that zeros are not divided by 0. Products of smaller numbers underflow anyway.
_SMALLEST_SCALE = np.float32(2.0**-100)
# Rounded to the nearest power of two, this times x is the next one that is not less than x.
_ROUND_UP = 1.5 * (1 - 2.0**-20)
MeshAxes = str | tuple[str, ...] | None
# An array in fp8, and the scales of its parts.
Quantized = tuple[Array, Array]


def quantize(x: Float[Array, "..."], dtype: Any) -> tuple[Float[Array, "..."], Float[Array, ""]]:
  """Returns (x / scale in `dtype`, scale), with the smallest power of two for which all of x fits.

  Dividing by a power of two does not round. Infinities and NaN become NaN.

  Args:
    x: a float32 or bfloat16 array.
    dtype: an fp8 type.
  """
  x = x.astype(jnp.float32)
  # One reduction for each row, then one over rows: on a GPU, XLA fuses the first with the kernel that computed
  # the row, and computes the scale at the end of the second. It joins reductions that start with the same number.
  ratios = jnp.abs(x) * np.float32(_ROUND_UP / float(jnp.finfo(dtype).max))
  rows = jax.lax.reduce(ratios, np.float32(0), jax.lax.max, (x.ndim - 1,))
  highest = jax.lax.reduce(rows, _SMALLEST_SCALE, jax.lax.max, tuple(range(rows.ndim)))
  scale = jax.lax.reduce_precision(highest, exponent_bits=8, mantissa_bits=0)
  return (x / scale).astype(dtype), scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def fp8_matmul(
  x_NI: Float[Array, "*N I"], w_IO: Float[Array, "I ..."], split: tuple[MeshAxes, ...] = ()
) -> Float[Array, "*N ..."]:
  """Returns x·w in the operands' type, computed in fp8, as are both matmuls of the gradient.

  Args:
    x_NI: rows, in one dimension or several.
    w_IO: a kernel, whose outputs may also have several dimensions.
    split: the mesh axes over which each dimension of *N, I and the outputs is split, None where it is
      not; () for none. They must divide the dimensions. Each device's part of an array has its own
      scale, so no device waits for the others' maxima.
  """
  return _forward(x_NI, w_IO, split)[0]


def _forward(x_NI: Array, w_IO: Array, split: tuple[MeshAxes, ...]) -> tuple[Array, tuple]:
  x8_NI = _quantize_parts(x_NI, FORWARD, split[: x_NI.ndim])
  w8_IO = _quantize_parts(w_IO, FORWARD, split[x_NI.ndim - 1 :])
  y_NO = _dot_of_parts(x8_NI, w8_IO, (x_NI.ndim - 1,), (0,), x_NI.dtype)
  return y_NO, (x8_NI, w8_IO)


def _backward(split: tuple[MeshAxes, ...], residuals: tuple, dy_NO: Array) -> tuple[Array, Array]:
  x8_NI, w8_IO = residuals
  rows = tuple(range(x8_NI[0].ndim // 2 - 1))
  outputs = tuple(range(len(rows), dy_NO.ndim))
  dy8_NO = _quantize_parts(dy_NO, GRADIENT, split[: len(rows)] + split[len(rows) + 1 :])
  dx_NI = _dot_of_parts(dy8_NO, w8_IO, outputs, tuple(range(1, len(outputs) + 1)), dy_NO.dtype)
  dw_IO = _dot_of_parts(x8_NI, dy8_NO, rows, rows, dy_NO.dtype)
  return dx_NI, dw_IO


fp8_matmul.defvjp(_forward, _backward)


def _quantize_parts(x: Array, dtype: Any, split: tuple[MeshAxes, ...]) -> tuple[Array, Array]:
  """Returns x in fp8 and its scales; each dimension becomes two, the parts and what is in one."""

  def quantize_part(part: Array) -> tuple[Array, Array]:
    numbers, scale = quantize(part, dtype)
    return numbers, scale.reshape((1,) * part.ndim)

  quantize_all = quantize_part
  if any(split):
    spec = PartitionSpec(*split)
    quantize_all = jax.shard_map(quantize_part, in_specs=spec, out_specs=(spec, spec))
  numbers, scales = quantize_all(x)
  parts = [(count, size // count) for count, size in zip(scales.shape, x.shape, strict=True)]
  return (
    numbers.reshape([size for pair in parts for size in pair]),
    scales.reshape([size for count in scales.shape for size in (count, 1)]),
  )


def _dot_of_parts(
  a: Quantized, b: Quantized, a_axes: tuple[int, ...], b_axes: tuple[int, ...], dtype: Any
) -> Array:
  """Returns the matmul, over `a_axes` and `b_axes`, of two arrays from `_quantize_parts`.

  The products of the contracted dimensions' parts are summed last.
  """
  of_parts = [2 * axis for axis in a_axes], [2 * axis for axis in b_axes]
  in_parts = [2 * axis + 1 for axis in a_axes], [2 * axis + 1 for axis in b_axes]
  # XLA passes the numbers and the scales of such products to cuBLASLt.
  a_NI, b_IO = (numbers.astype(dtype) * scales.astype(dtype) for numbers, scales in (a, b))
  y = jax.lax.dot_general(a_NI, b_IO, (in_parts, of_parts), preferred_element_type=dtype)
  # In `dtype`, so that devices exchange numbers of that size.
  y = jax.lax.reduce(y, np.zeros((), dtype), jax.lax.add, tuple(range(len(a_axes))))
  sizes = y.shape
  return y.reshape([p * s for p, s in zip(sizes[::2], sizes[1::2], strict=True)])
