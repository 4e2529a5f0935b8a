"""Dense projections, and T5's feed-forward block."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.partitioning import param_with_axes
from jaxtyping import Array, Float

from rosetta_t5.networks.gpu_fusion import computes_on_gpu, separate_from_matmul
from rosetta_t5.networks.layers.decoding_cache import PRECOMPUTED
from rosetta_t5.networks.layers.dropout import BatchRows, feature_dropout
from rosetta_t5.parallel.axis_rules import (
  constrain,
  context_shards,
  target_device,
)

Initializer = Callable[..., Array]
# y_NO = matmul(x_NI, w_IO); N and O may each be several dimensions.
Matmul = Callable[[jax.Array, jax.Array], jax.Array]
# Called with the logical axes of the dimensions (*N, I, *O), once for each projection.
MakeMatmul = Callable[[tuple[str | None, ...]], Matmul]

# The collection of zeros whose gradients are K-FAC's factors (see `matmul_with_factors`).
KFAC_FACTORS = "kfac_factors"

fan_in_truncated_normal = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


def nd_dense_init(scale: float, mode: str, distribution: str) -> Initializer:
  """Returns a variance-scaling initializer that is called with its input and output dimensions.

  It is called as init(key, shape, dtype, in_axis, out_axis), as `nd_kernel=True` requires. Reshaped
  to a matrix, its values are those of `nn.initializers.variance_scaling` for that matrix.

  Args:
    scale: a factor on the variance.
    mode: `fan_in`, `fan_out` or `fan_avg`.
    distribution: `normal`, `truncated_normal` or `uniform`.
  """

  def initialize(
    key: Array, shape: Sequence[int], dtype: Any, in_axis: Sequence[int], out_axis: Sequence[int]
  ) -> Array:
    scaling: Any = nn.initializers.variance_scaling
    return scaling(scale, mode, distribution, in_axis, out_axis)(key, shape, dtype)

  return initialize


def _as_tuple(value: int | Sequence[int]) -> tuple[int, ...]:
  return (value,) if isinstance(value, int) else tuple(value)


class DenseGeneral(nn.Module):
  """A projection of the dimensions `axis` to the dimensions `features`.

  The kernel is stored and initialized as a matrix [inputs, outputs], as in T5X's T5. With `nd_kernel`
  it keeps its separate dimensions, as in T5X's scalable T5.

  Attributes:
    features: the size of the output's last dimension, or the sizes of its last dimensions.
    axis: the input dimensions that are contracted; they must be the last ones.
    dtype: the type of the matmul; the kernel is stored in float32.
    kernel_init: called as init(key, [inputs, outputs], float32), or with `nd_kernel` as
      init(key, [*inputs, *outputs], float32, in_axis, out_axis).
    kernel_axes: the logical axes of the kernel's dimensions.
    nd_kernel: whether the kernel is stored as [*inputs, *outputs].
    make_matmul: called once per projection, with the logical axes of the matmul's dimensions, it
      returns the function that multiplies rows by the kernel; None for `matmul`. It may return a
      linen module, whose state is then stored in this module.
    transpose_batch_sequence: whether inputs are [length, batch, ...].
    use_bias: whether a bias [outputs], initially zero, is added. T5 has none.
    kernel_divisor: what the kernel is divided by after the cast to `dtype`; None for 1.
    batch_axis: the logical axis of the input's rows.
  """

  features: int | Sequence[int]
  axis: int | Sequence[int] = -1
  dtype: Any = jnp.float32
  kernel_init: Initializer = fan_in_truncated_normal
  kernel_axes: tuple[str, ...] = ()
  nd_kernel: bool = False
  make_matmul: MakeMatmul | None = None
  transpose_batch_sequence: bool = False
  use_bias: bool = False
  kernel_divisor: jax.Array | None = None
  batch_axis: str = "batch"

  @nn.compact
  def __call__(self, inputs: Float[Array, "..."], parameters_only: bool = False) -> Any:
    """Returns the projection, [..., *features], in `dtype`.

    Args:
      inputs: the input.
      parameters_only: whether to return (kernel [inputs, outputs], bias [*features] or None) in
        `dtype` instead, for a caller that stacks several kernels into one matmul.

    Raises:
      ValueError: `axis` is not the input's last dimensions, or K-FAC cannot measure this layer.
    """
    features, leading = _as_tuple(self.features), self._leading_shape(inputs)
    contracted = inputs.shape[len(leading) :]
    kernel = jnp.asarray(self._kernel(contracted, features), self.dtype)
    if self.kernel_divisor is not None:
      kernel = kernel / self.kernel_divisor
    bias = self._bias(features) if self.use_bias else None
    measures_factors = any(self.has_variable(KFAC_FACTORS, side) for side in ("rows", "columns"))
    if measures_factors and (parameters_only or self.make_matmul):
      raise ValueError(
        f"K-FAC cannot measure {self.path[-1]}: set fuse_qkv_params = False and no fp8, or skip the "
        "layer with precondition_by_kfac.skip_layers"
      )
    if parameters_only:
      return kernel, bias
    rows_axes = row_axes(self.transpose_batch_sequence, self.batch_axis)
    row_shape = leading if len(rows_axes) > 1 else (-1,)
    rows = inputs.astype(self.dtype).reshape(*row_shape, kernel.shape[0])
    multiply: Matmul = self._matmul_with_factors if measures_factors else self._matmul
    if self.make_matmul:
      kernel_axes = self.kernel_axes or (None,) * (len(contracted) + 1)
      output_axis = kernel_axes[len(contracted) if self.nd_kernel else 1]
      multiply = self.make_matmul((*rows_axes, kernel_axes[0], output_axis))
    outputs = multiply(rows, kernel).reshape(*leading, *features)
    return outputs if bias is None else outputs + bias.reshape((1,) * len(leading) + features)

  def _leading_shape(self, inputs: jax.Array) -> tuple[int, ...]:
    """Returns the sizes of the dimensions that are not contracted."""
    axes = tuple(axis % inputs.ndim for axis in _as_tuple(self.axis))
    if axes != tuple(range(inputs.ndim - len(axes), inputs.ndim)):
      raise ValueError(
        f"DenseGeneral.axis must name the last dimensions of the input, got axis = {self.axis} for "
        f"an input of shape {inputs.shape}"
      )
    return inputs.shape[: inputs.ndim - len(axes)]

  def _matmul(self, x_NI: jax.Array, w_IO: jax.Array) -> jax.Array:
    """Returns x·w; writes or reads the kernel that decoding steps use: cast, and on a CPU transposed."""
    is_cpu = target_device().platform == "cpu"
    if self.has_variable(PRECOMPUTED, "kernel"):
      kernel: jax.Array = self.get_variable(PRECOMPUTED, "kernel")
      return matmul_few_rows(x_NI, kernel) if is_cpu else matmul(x_NI, kernel)
    is_writable = self.is_mutable_collection(PRECOMPUTED) and not self.is_initializing()
    if is_writable and (is_cpu or w_IO.dtype != jnp.float32):
      self.put_variable(PRECOMPUTED, "kernel", w_IO.T if is_cpu else w_IO)
    return matmul(x_NI, w_IO)

  def _matmul_with_factors(self, x_NI: jax.Array, w_IO: jax.Array) -> jax.Array:
    """Returns x·w; the factors of K-FAC, which belong to the stored kernel, are gradients."""
    rows: jax.Array | None = self.get_variable(KFAC_FACTORS, "rows")
    columns: jax.Array | None = self.get_variable(KFAC_FACTORS, "columns")
    if columns is not None and self.kernel_divisor is not None:
      columns = columns / jnp.square(self.kernel_divisor).astype(columns.dtype)
    return matmul_with_factors(x_NI, w_IO, rows, columns)

  def _bias(self, features: tuple[int, ...]) -> jax.Array:
    """Returns the bias, which is stored as a vector, in the shape of the features."""
    size, axes = math.prod(features), tuple(self.kernel_axes)[-1:]
    bias_O = param_with_axes("bias", nn.initializers.zeros, (size,), jnp.float32, axes=axes)
    return bias_O.astype(self.dtype).reshape(features)

  def _kernel(self, inputs: tuple[int, ...], features: tuple[int, ...]) -> jax.Array:
    """Returns the kernel as a matrix, whichever way it is stored."""
    matrix, axes = (math.prod(inputs), math.prod(features)), tuple(self.kernel_axes)
    if not self.nd_kernel:
      return param_with_axes("kernel", self.kernel_init, matrix, jnp.float32, axes=axes)
    shape = (*inputs, *features)
    in_axis, out_axis = tuple(range(len(inputs))), tuple(range(len(inputs), len(shape)))
    kernel = param_with_axes(
      "kernel", self.kernel_init, shape, jnp.float32, in_axis, out_axis, axes=axes
    )
    return kernel.reshape(matrix)


@jax.custom_vjp
def matmul(x_NI: Float[Array, "*N I"], w_IO: Float[Array, "I ..."]) -> Float[Array, "*N ..."]:
  """Returns x·w, with the gradient for w written as xᵀ·dy.

  JAX would write that gradient as (dyᵀ·x)ᵀ. XLA on a CPU then computes dy, often a long chain of
  operations of a gated activation, directly into a transposed array, which is slower than the matmul.
  """
  return jnp.tensordot(x_NI, w_IO, axes=1)


def _matmul_forward(x_NI: Array, w_IO: Array) -> tuple[Array, tuple[Array, Array]]:
  return jnp.tensordot(x_NI, w_IO, axes=1), (x_NI, w_IO)


def _matmul_backward(operands: tuple[Array, Array], dy_NO: Array) -> tuple[Array, Array]:
  x_NI, w_IO = operands
  w_OI, x_IN = jnp.moveaxis(w_IO, 0, -1), jnp.moveaxis(x_NI, -1, 0)
  dx_NI = jnp.tensordot(dy_NO, w_OI, axes=w_OI.ndim - 1)
  return dx_NI, jnp.tensordot(x_IN, dy_NO, axes=x_IN.ndim - 1)


matmul.defvjp(_matmul_forward, _matmul_backward)


@jax.custom_vjp
def matmul_with_factors(
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


def _matmul_with_factors_forward(
  x_NI: Array, w_IO: Array, rows_II: Array | None, columns_OO: Array | None
) -> tuple[Array, Any]:
  return jnp.tensordot(x_NI, w_IO, axes=1), (x_NI, w_IO, rows_II is None, columns_OO is None)


def _matmul_with_factors_backward(operands: Any, dy_NO: Array) -> tuple[Array | None, ...]:
  x_NI, w_IO, no_rows, no_columns = operands

  def mean_of_squares(x_NI: Array) -> Array:
    flat_NI = x_NI.reshape(-1, x_NI.shape[-1]).astype(jnp.float32)
    mean_II = flat_NI.T @ flat_NI / len(flat_NI)
    # XLA (jax 0.10) computes a wrong xᵀ·x if both dimensions of the result are split over devices.
    return constrain(mean_II, (None, None))

  return (
    *_matmul_backward((x_NI, w_IO), dy_NO),
    None if no_rows else mean_of_squares(x_NI),
    None if no_columns else mean_of_squares(dy_NO),
  )


matmul_with_factors.defvjp(_matmul_with_factors_forward, _matmul_with_factors_backward)


def matmul_few_rows(x_NI: Float[Array, "*N I"], w_OI: Float[Array, "O I"]) -> Float[Array, "*N O"]:
  """Returns x·wᵀ, computed as w·xᵀ: XLA on a CPU rearranges the second operand of a matmul.

  With few rows, w·xᵀ takes three quarters of the time of x·w. Without the barrier XLA would swap the
  operands back.
  """
  y_ON = jnp.tensordot(w_OI, x_NI, axes=((-1,), (-1,)))
  return jnp.moveaxis(jax.lax.optimization_barrier(y_ON), 0, -1)


def row_axes(transpose_batch_sequence: bool, batch: str = "batch") -> tuple[str, ...]:
  """Returns the logical axes of the rows that a projection multiplies by its kernel.

  Rows keep two dimensions if flattening them would gather the second, which is split over devices.
  """
  if transpose_batch_sequence:
    return ("length", batch)
  return (batch, "length") if context_shards() > 1 else (batch,)


def activation_axes(
  last: str, transpose_batch_sequence: bool, batch: str = "batch"
) -> tuple[str, str, str]:
  """Returns the logical axes of activations whose last dimension is `last`."""
  return ("length", batch, last) if transpose_batch_sequence else (batch, "length", last)


def activation_function(name: str | Callable[[Array], Array]) -> Callable[[Array], Array]:
  """Returns the activation called `name` in flax.linen; `linear` is the identity.

  flax's `gelu` is the approximation by tanh; `exact_gelu` is computed without it.

  Raises:
    ValueError: flax.linen has no activation of that name.
  """
  if callable(name):
    return name
  if name == "linear":
    return lambda x: x
  if name == "exact_gelu":
    return functools.partial(nn.gelu, approximate=False)
  function = getattr(nn, name, None)
  if function is None:
    raise ValueError(
      f"T5Config.mlp_activations names {name!r}, which flax.linen does not have: "
      "use 'linear', 'gelu', 'relu', 'silu' or another activation of flax.linen"
    )
  return function


def _multiply_activations(
  names: Sequence[str | Callable[[Array], Array]], *branches_BTF: jax.Array
) -> jax.Array:
  """Returns the product of the activations of the branches."""
  factors = [
    activation_function(name)(x_BTF) for name, x_BTF in zip(names, branches_BTF, strict=True)
  ]
  return functools.reduce(jnp.multiply, factors)


class MlpBlock(nn.Module):
  """T5's feed-forward block; with two activations it is the gated one of T5 1.1 (Shazeer, 2020).

  Attributes:
    intermediate_dim: the hidden size.
    activations: one name for each projection to the hidden layer; their results are multiplied.
    kernel_init: initializer of all kernels.
    intermediate_dropout_rate: dropout of the hidden layer, shared by all positions.
    dtype: the type of the matmuls.
    nd_kernel: how `kernel_init` is called; see `DenseGeneral`.
    make_matmul: see `DenseGeneral`.
    transpose_batch_sequence: whether inputs are [length, batch, features].
    use_bias: whether the projections have biases.
    batch_axis: the logical axis of the rows.
    mlp_axis: the logical axis of the hidden layer's features.
  """

  intermediate_dim: int = 2048
  activations: Sequence[str | Callable[[Array], Array]] = ("relu",)
  kernel_init: Initializer = fan_in_truncated_normal
  intermediate_dropout_rate: float = 0.1
  dtype: Any = jnp.float32
  nd_kernel: bool = False
  make_matmul: MakeMatmul | None = None
  transpose_batch_sequence: bool = False
  use_bias: bool = False
  batch_axis: str = "batch"
  mlp_axis: str = "mlp"

  @nn.compact
  def __call__(
    self,
    inputs: Float[Array, "B T D"],
    decode: bool = False,
    deterministic: bool = False,
    rows: BatchRows | None = None,
  ) -> Float[Array, "B T D"]:
    """Returns the block's output; `decode` has no effect and exists because T5X has it."""
    del decode
    dense = functools.partial(
      DenseGeneral,
      dtype=self.dtype,
      kernel_init=self.kernel_init,
      nd_kernel=self.nd_kernel,
      make_matmul=self.make_matmul,
      transpose_batch_sequence=self.transpose_batch_sequence,
      use_bias=self.use_bias,
      batch_axis=self.batch_axis,
    )
    branches = []
    for index in range(len(self.activations)):
      name = "wi" if len(self.activations) == 1 else f"wi_{index}"
      projection = dense(self.intermediate_dim, kernel_axes=("embed", self.mlp_axis), name=name)
      branches.append(separate_from_matmul(self, projection(inputs)))
    gate: Callable[..., jax.Array] = functools.partial(_multiply_activations, self.activations)
    if computes_on_gpu(self):
      # Recomputing the activations takes a GPU less time than writing and reading them.
      gate = jax.checkpoint(gate)
    hidden_BTF = gate(*branches)
    dropout = feature_dropout(self.intermediate_dropout_rate, self.transpose_batch_sequence)
    hidden_BTF = dropout(hidden_BTF, deterministic, rows)
    axes = activation_axes(self.mlp_axis, self.transpose_batch_sequence, self.batch_axis)
    hidden_BTF = constrain(hidden_BTF, axes)
    output = dense(inputs.shape[-1], kernel_axes=(self.mlp_axis, "embed"), name="wo")
    return output(hidden_BTF)
