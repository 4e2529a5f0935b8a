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

from rosetta_t5.networks.gpu_fusion import cast_parameter, computes_on_gpu, separate_from_matmul
from rosetta_t5.networks.layers import matmuls
from rosetta_t5.networks.layers.adapted_kernels import AdaptedKernel
from rosetta_t5.networks.layers.dropout import BatchRows, feature_dropout
from rosetta_t5.parallel.placement import constrain

Initializer = Callable[..., Array]

fan_in_truncated_normal = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


def _as_tuple(value: int | Sequence[int]) -> tuple[int, ...]:
  return (value,) if isinstance(value, int) else tuple(value)


class DenseParameters(nn.Module):
  """The kernel and bias of a projection, for a caller that stacks several kernels into one matmul.

  The kernel is initialized as a matrix [inputs, outputs], and stored as one, as in T5X's T5. With
  `nd_kernel` it is stored with its separate dimensions, as in T5X's scalable T5.

  Attributes:
    features: the size of the output's last dimension, or the sizes of its last dimensions.
    axis: the input dimensions that are contracted; they must be the last ones.
    dtype: the type of the matmul; parameters are stored in float32.
    kernel_init: called as init(key, [inputs, outputs], float32).
    kernel_axes: the logical axes of the kernel's dimensions.
    nd_kernel: whether the kernel is stored as [*inputs, *outputs].
    use_bias: whether there is a bias [outputs], initially zero. T5 has none.
    kernel_divisor: what the kernel is divided by after the cast to `dtype`; None for 1.
  """

  features: int | Sequence[int]
  axis: int | Sequence[int] = -1
  dtype: Any = jnp.float32
  kernel_init: Initializer = fan_in_truncated_normal
  kernel_axes: tuple[str, ...] = ()
  nd_kernel: bool = False
  use_bias: bool = False
  kernel_divisor: jax.Array | None = None

  @nn.compact
  def __call__(self, inputs: Float[Array, "..."]) -> Any:
    """Returns (kernel [inputs, outputs], bias [*features] or None) in `dtype`.

    Raises:
      ValueError: `axis` is not the input's last dimensions, or K-FAC cannot measure this layer.
    """
    _refuse_kfac(self)
    kernel, bias = self._parameters(inputs)
    return kernel.merged(self.dtype) if isinstance(kernel, AdaptedKernel) else kernel, bias

  def _parameters(self, inputs: jax.Array) -> tuple[Any, jax.Array | None]:
    """Returns the kernel, which may be an `AdaptedKernel`, and the bias or None."""
    features, axes = _as_tuple(self.features), tuple(self.kernel_axes)
    contracted = inputs.shape[len(self._leading_shape(inputs)) :]
    matrix = (math.prod(contracted), math.prod(features))
    shape = (*contracted, *features) if self.nd_kernel else matrix

    def initialize(key: jax.Array) -> jax.Array:
      return self.kernel_init(key, matrix, jnp.float32).reshape(shape)

    stored: Any = self.get_variable("params", "kernel")
    if isinstance(stored, AdaptedKernel):
      kernel: Any = stored.replace(kernel=constrain(stored.kernel, axes)).astype(self.dtype)
    else:
      stored = param_with_axes("kernel", initialize, axes=axes)
      kernel = cast_parameter(stored.reshape(matrix), self.dtype)
    if self.kernel_divisor is not None:
      kernel = kernel / self.kernel_divisor
    if not self.use_bias:
      return kernel, None
    bias_O = param_with_axes("bias", nn.initializers.zeros, matrix[1:], jnp.float32, axes=axes[-1:])
    return kernel, bias_O.astype(self.dtype).reshape(features)

  def _leading_shape(self, inputs: jax.Array) -> tuple[int, ...]:
    """Returns the sizes of the dimensions that are not contracted."""
    axes = tuple(axis % inputs.ndim for axis in _as_tuple(self.axis))
    if axes != tuple(range(inputs.ndim - len(axes), inputs.ndim)):
      raise ValueError(f"axis must be the last dimensions of {inputs.shape}, got {self.axis}")
    return inputs.shape[: inputs.ndim - len(axes)]


class DenseGeneral(DenseParameters):
  """A projection of the dimensions `axis` to the dimensions `features`.

  Attributes:
    matmul: how rows are multiplied by the kernel; None for `matmul_of_variables`. It may create linen
      modules, whose state is then stored in this module.
    row_axes: the logical axes of the input's first two dimensions.
  """

  matmul: matmuls.Matmul | None = None
  row_axes: tuple[str, str] = ("batch", "length")

  @nn.compact
  def __call__(self, inputs: Float[Array, "..."]) -> Any:
    """Returns the projection, [..., *features], in `dtype`.

    Raises:
      ValueError: `axis` is not the input's last dimensions, or K-FAC cannot measure this layer.
    """
    features, leading = _as_tuple(self.features), self._leading_shape(inputs)
    kernel, bias = self._parameters(inputs)
    if self.matmul is not None:
      _refuse_kfac(self)
    axes: matmuls.Axes = matmuls.flat_row_axes(self.row_axes)
    row_shape = leading if len(axes) > 1 else (-1,)
    rows = inputs.astype(self.dtype).reshape(*row_shape, math.prod(inputs.shape[len(leading) :]))
    num_contracted = inputs.ndim - len(leading)
    kernel_axes = self.kernel_axes or (None,) * (num_contracted + 1)
    axes += (kernel_axes[0], kernel_axes[num_contracted if self.nd_kernel else 1])
    matmul = functools.partial(self.matmul or matmuls.matmul_of_variables, self)
    if isinstance(kernel, AdaptedKernel) and matmuls.is_decoding(self):
      kernel = kernel.merged(self.dtype)  # It is computed once, and cached for all steps.
    if isinstance(kernel, AdaptedKernel):
      outputs = kernel.project(self, rows, lambda x, w: matmul(x, w, axes))
    else:
      outputs = matmul(rows, kernel, axes)
    outputs = outputs.reshape(*leading, *features)
    return outputs if bias is None else outputs + bias.reshape((1,) * len(leading) + features)


def _refuse_kfac(module: nn.Module) -> None:
  if matmuls.is_measured(module):
    raise ValueError(
      f"K-FAC cannot measure {module.path[-1]}: set fuse_qkv_params = False and no fp8, or skip the "
      "layer with precondition_by_kfac.skip_layers"
    )


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
  pairs = zip(names, branches_BTF, strict=True)
  return functools.reduce(jnp.multiply, [activation_function(name)(x) for name, x in pairs])


class MlpBlock(nn.Module):
  """T5's feed-forward block; with two activations it is the gated one of T5 1.1 (Shazeer, 2020).

  Attributes:
    intermediate_dim: the hidden size.
    activations: one name for each projection to the hidden layer; their results are multiplied.
    kernel_init: initializer of all kernels.
    intermediate_dropout_rate: dropout of the hidden layer, shared by all positions.
    dtype: the type of the matmuls.
    matmul: see `DenseGeneral`.
    use_bias: whether the projections have biases.
    row_axes: see `DenseGeneral`.
    mlp_axis: the logical axis of the hidden layer's features.
  """

  intermediate_dim: int = 2048
  activations: Sequence[str | Callable[[Array], Array]] = ("relu",)
  kernel_init: Initializer = fan_in_truncated_normal
  intermediate_dropout_rate: float = 0.1
  dtype: Any = jnp.float32
  matmul: matmuls.Matmul | None = None
  use_bias: bool = False
  row_axes: tuple[str, str] = ("batch", "length")
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
      matmul=self.matmul,
      use_bias=self.use_bias,
      row_axes=self.row_axes,
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
    dropout = feature_dropout(self.intermediate_dropout_rate, self.row_axes)
    hidden_BTF = dropout(hidden_BTF, deterministic, rows)
    hidden_BTF = constrain(hidden_BTF, (*self.row_axes, self.mlp_axis))
    output = dense(inputs.shape[-1], kernel_axes=(self.mlp_axis, "embed"), name="wo")
    return output(hidden_BTF)
