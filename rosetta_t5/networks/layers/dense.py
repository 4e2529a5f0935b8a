"""Projections: one dense layer, and T5's feed-forward block."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.partitioning import param_with_axes
from jaxtyping import Array, Float

from rosetta_t5.networks.layers.decoding_cache import KEPT
from rosetta_t5.parallel.sharding_constraints import with_sharding_constraint

Initializer = Callable[..., Array]
# y_NO = product(x_NI, w_IO); rows and outputs may have several dimensions each.
Product = Callable[[jax.Array, jax.Array], jax.Array]

fan_in_truncated_normal = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


def nd_dense_init(scale: float, mode: str, distribution: str) -> Initializer:
  """Returns a variance-scaling initialiser whose input and output dimensions are told with the call.

  It is called as init(key, shape, dtype, in_axis, out_axis), what `nd_kernel=True` asks of one. Joined
  to a matrix its values are those of `nn.initializers.variance_scaling` for that matrix.

  Args:
    scale: a factor on the variance.
    mode: `fan_in`, `fan_out` or `fan_avg`.
    distribution: `normal`, `truncated_normal` or `uniform`.
  """

  def initialise(
    key: Array, shape: Sequence[int], dtype: Any, in_axis: Sequence[int], out_axis: Sequence[int]
  ) -> Array:
    scaling: Any = nn.initializers.variance_scaling
    return scaling(scale, mode, distribution, in_axis, out_axis)(key, shape, dtype)

  return initialise


def _as_tuple(value: int | Sequence[int]) -> tuple[int, ...]:
  return (value,) if isinstance(value, int) else tuple(value)


class DenseGeneral(nn.Module):
  """A projection over `axis` onto `features`, both of which may span several dimensions.

  The kernel is stored, and drawn, as a matrix [inputs, outputs] whose sides join those dimensions, as
  T5X's T5 has it; with `nd_kernel` it keeps them apart, as T5X's scalable T5 has it.

  Attributes:
    features: the size, or sizes, of the output's last dimensions.
    axis: the input dimension(s) that are summed over; they must be the last ones.
    dtype: what the product is computed in; the kernel is kept in float32.
    kernel_init: called as init(key, [inputs, outputs], float32), with `nd_kernel` as
      init(key, [*inputs, *outputs], float32, in_axis, out_axis).
    kernel_axes: logical names of the kernel's dimensions.
    nd_kernel: whether the kernel is stored as [*inputs, *outputs].
    make_product: called once a projection for the function that multiplies rows by kernel; None for
      `matrix_product`. What it makes may be a linen module, which then keeps its state in this one.
    transpose_batch_sequence: whether inputs are [length, batch, ...]. Their rows then keep the two
      dimensions: joining them would gather a batch that is split over devices.
    use_bias: whether a bias [outputs] is added, which starts as zeros. T5 has none.
  """

  features: int | Sequence[int]
  axis: int | Sequence[int] = -1
  dtype: Any = jnp.float32
  kernel_init: Initializer = fan_in_truncated_normal
  kernel_axes: tuple[str, ...] = ()
  nd_kernel: bool = False
  make_product: Callable[[], Product] | None = None
  transpose_batch_sequence: bool = False
  use_bias: bool = False

  @nn.compact
  def __call__(self, inputs: Float[Array, "..."], parameters_only: bool = False) -> Any:
    """Returns the projection, [..., *features], in `dtype`.

    Args:
      inputs: what is projected.
      parameters_only: whether to return (kernel [inputs, outputs], bias [*features] or None) in
        `dtype` instead, for a caller that multiplies by several kernels at once.

    Raises:
      ValueError: `axis` is not the input's last dimension(s).
    """
    features = _as_tuple(self.features)
    axes = tuple(axis % inputs.ndim for axis in _as_tuple(self.axis))
    if axes != tuple(range(inputs.ndim - len(axes), inputs.ndim)):
      raise ValueError(
        f"DenseGeneral sums over the last dimensions of its input, but axis = {self.axis} of an "
        f"input of shape {inputs.shape} names others"
      )
    kept = inputs.shape[: inputs.ndim - len(axes)]
    kernel = self._kernel(inputs.shape[len(kept) :], features)
    kernel = jnp.asarray(kernel, self.dtype)
    bias = self._bias(features) if self.use_bias else None
    if parameters_only:
      return kernel, bias
    row_shape = kept if self.transpose_batch_sequence else (-1,)
    rows = inputs.astype(self.dtype).reshape(*row_shape, kernel.shape[0])
    product = self.make_product() if self.make_product else self._product
    outputs = product(rows, kernel).reshape(*kept, *features)
    return outputs if bias is None else outputs + bias.reshape((1,) * len(kept) + features)

  def _product(self, x_NI: jax.Array, w_IO: jax.Array) -> jax.Array:
    """Returns x·w; the kernel is kept for the steps of a decode, or taken as it was kept."""
    if self.has_variable(KEPT, "kernel"):
      return product_of_few_rows(x_NI, self.get_variable(KEPT, "kernel"))
    keeps = self.is_mutable_collection(KEPT) and not self.is_initializing()
    if keeps and jax.default_backend() == "cpu":
      self.put_variable(KEPT, "kernel", w_IO.T)
    return matrix_product(x_NI, w_IO)

  def _bias(self, features: tuple[int, ...]) -> jax.Array:
    """Returns the bias, which is stored as a vector, for each output."""
    size, axes = math.prod(features), tuple(self.kernel_axes)[-1:]
    bias_O = param_with_axes("bias", nn.initializers.zeros, (size,), jnp.float32, axes=axes)
    return bias_O.astype(self.dtype).reshape(features)

  def _kernel(self, summed: tuple[int, ...], features: tuple[int, ...]) -> jax.Array:
    """Returns the kernel as a matrix, however it is stored."""
    matrix, axes = (math.prod(summed), math.prod(features)), tuple(self.kernel_axes)
    if not self.nd_kernel:
      return param_with_axes("kernel", self.kernel_init, matrix, jnp.float32, axes=axes)
    shape = (*summed, *features)
    in_axis, out_axis = tuple(range(len(summed))), tuple(range(len(summed), len(shape)))
    kernel = param_with_axes(
      "kernel", self.kernel_init, shape, jnp.float32, in_axis, out_axis, axes=axes
    )
    return kernel.reshape(matrix)


@jax.custom_vjp
def matrix_product(
  x_NI: Float[Array, "*N I"], w_IO: Float[Array, "I ..."]
) -> Float[Array, "*N ..."]:
  """Returns x·w. Its gradient for w is written as xᵀ·dy.

  Differentiated by jax it would be (dyᵀ·x)ᵀ, for which XLA on a CPU computes dy, often a long chain
  of a gated activation, straight into a transposed array: slower than the product itself.
  """
  return jnp.tensordot(x_NI, w_IO, axes=1)


def _product_forward(x_NI: Array, w_IO: Array) -> tuple[Array, tuple[Array, Array]]:
  return jnp.tensordot(x_NI, w_IO, axes=1), (x_NI, w_IO)


def _product_backward(operands: tuple[Array, Array], dy_NO: Array) -> tuple[Array, Array]:
  x_NI, w_IO = operands
  w_OI, x_IN = jnp.moveaxis(w_IO, 0, -1), jnp.moveaxis(x_NI, -1, 0)
  dx_NI = jnp.tensordot(dy_NO, w_OI, axes=w_OI.ndim - 1)
  return dx_NI, jnp.tensordot(x_IN, dy_NO, axes=x_IN.ndim - 1)


matrix_product.defvjp(_product_forward, _product_backward)


def product_of_few_rows(
  x_NI: Float[Array, "*N I"], w_OI: Float[Array, "O I"]
) -> Float[Array, "*N O"]:
  """Returns x·wᵀ, computed as w·xᵀ: XLA on a CPU rearranges the second of two factors.

  Where rows are few, w·xᵀ takes three quarters of the time of x·w. Without the barrier XLA would turn
  it round again.
  """
  y_ON = jnp.tensordot(w_OI, x_NI, axes=((-1,), (-1,)))
  return jnp.moveaxis(jax.lax.optimization_barrier(y_ON), 0, -1)


def activation_axes(last: str, transpose_batch_sequence: bool) -> tuple[str, str, str]:
  """Returns the logical axes of activations whose last dimension is `last`."""
  return ("length", "batch", last) if transpose_batch_sequence else ("batch", "length", last)


def activation_function(name: str | Callable[[Array], Array]) -> Callable[[Array], Array]:
  """Returns the activation called `name` in flax.linen; `linear` is the identity.

  Raises:
    ValueError: flax.linen has no activation of that name.
  """
  if callable(name):
    return name
  if name == "linear":
    return lambda x: x
  function = getattr(nn, name, None)
  if function is None:
    raise ValueError(
      f"T5Config.mlp_activations names {name!r}, which flax.linen does not have: "
      "use 'linear', 'gelu', 'relu', 'silu' or another activation of flax.linen"
    )
  return function


class MlpBlock(nn.Module):
  """T5's feed-forward block; with two activations it is the gated one of T5 1.1 (Shazeer, 2020).

  Attributes:
    intermediate_dim: the hidden size.
    activations: one name for each projection into the hidden layer; their results are multiplied.
    kernel_init: initialiser of all kernels.
    intermediate_dropout_rate: dropout on the hidden layer, shared along the length.
    dtype: what the products are computed in.
    nd_kernel: how `kernel_init` is called, see `DenseGeneral`.
    make_product: see `DenseGeneral`.
    transpose_batch_sequence: whether inputs are [length, batch, features].
    use_bias: whether the projections have biases.
  """

  intermediate_dim: int = 2048
  activations: Sequence[str | Callable[[Array], Array]] = ("relu",)
  kernel_init: Initializer = fan_in_truncated_normal
  intermediate_dropout_rate: float = 0.1
  dtype: Any = jnp.float32
  nd_kernel: bool = False
  make_product: Callable[[], Product] | None = None
  transpose_batch_sequence: bool = False
  use_bias: bool = False

  @nn.compact
  def __call__(
    self, inputs: Float[Array, "B T D"], decode: bool = False, deterministic: bool = False
  ) -> Float[Array, "B T D"]:
    """Returns the block's output; `decode` is taken for T5X's callers and changes nothing."""
    del decode
    hidden_BTF: jax.Array | None = None
    for index, activation in enumerate(self.activations):
      name = "wi" if len(self.activations) == 1 else f"wi_{index}"
      branch_BTF = DenseGeneral(
        self.intermediate_dim,
        dtype=self.dtype,
        kernel_init=self.kernel_init,
        kernel_axes=("embed", "mlp"),
        nd_kernel=self.nd_kernel,
        make_product=self.make_product,
        transpose_batch_sequence=self.transpose_batch_sequence,
        use_bias=self.use_bias,
        name=name,
      )(inputs)
      branch_BTF = activation_function(activation)(branch_BTF)
      hidden_BTF = branch_BTF if hidden_BTF is None else hidden_BTF * branch_BTF
    length_axis = -3 if self.transpose_batch_sequence else -2
    hidden_BTF = nn.Dropout(rate=self.intermediate_dropout_rate, broadcast_dims=(length_axis,))(
      hidden_BTF, deterministic=deterministic
    )
    hidden_BTF = with_sharding_constraint(
      hidden_BTF, activation_axes("mlp", self.transpose_batch_sequence)
    )
    return DenseGeneral(
      inputs.shape[-1],
      dtype=self.dtype,
      kernel_init=self.kernel_init,
      kernel_axes=("mlp", "embed"),
      nd_kernel=self.nd_kernel,
      make_product=self.make_product,
      transpose_batch_sequence=self.transpose_batch_sequence,
      use_bias=self.use_bias,
      name="wo",
    )(hidden_BTF)
