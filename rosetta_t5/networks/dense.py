"""Projections without biases: one dense layer and T5's feed-forward block."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.partitioning import param_with_axes, with_sharding_constraint
from jaxtyping import Array, Float

Initializer = Callable[..., Array]

fan_in_truncated_normal = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


def _as_tuple(value: int | Sequence[int]) -> tuple[int, ...]:
  return (value,) if isinstance(value, int) else tuple(value)


class DenseGeneral(nn.Module):
  """A projection over `axis` onto `features`, both of which may span several dimensions.

  The kernel is stored, and drawn, as a matrix [inputs, outputs] whose sides join those dimensions,
  as T5X stores it: its initial values depend on that.

  Attributes:
    features: the size, or sizes, of the output's last dimensions.
    axis: the input dimension(s) that are summed over; they must be the last ones.
    dtype: what the product is computed in; the kernel is kept in float32.
    kernel_init: called as init(key, [inputs, outputs], float32).
    kernel_axes: logical names of the kernel's two dimensions.
  """

  features: int | Sequence[int]
  axis: int | Sequence[int] = -1
  dtype: Any = jnp.float32
  kernel_init: Initializer = fan_in_truncated_normal
  kernel_axes: tuple[str, ...] = ()

  @nn.compact
  def __call__(self, inputs: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the projection, [..., *features], in `dtype`.

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
    shape = (math.prod(inputs.shape[len(kept) :]), math.prod(features))
    kernel = param_with_axes(
      "kernel", self.kernel_init, shape, jnp.float32, axes=tuple(self.kernel_axes)
    )
    rows = inputs.astype(self.dtype).reshape(-1, shape[0])
    outputs = matrix_product(rows, jnp.asarray(kernel, self.dtype))
    return outputs.reshape(*kept, *features)


@jax.custom_vjp
def matrix_product(x_NI: Float[Array, "N I"], w_IO: Float[Array, "I O"]) -> Float[Array, "N O"]:
  """Returns x·w. Its gradient for w is written as xᵀ·dy.

  Differentiated by jax it would be (dyᵀ·x)ᵀ, for which XLA on a CPU computes dy, often a long chain
  of a gated activation, straight into a transposed array: slower than the product itself.
  """
  return jnp.dot(x_NI, w_IO)


def _product_forward(x_NI: Array, w_IO: Array) -> tuple[Array, tuple[Array, Array]]:
  return jnp.dot(x_NI, w_IO), (x_NI, w_IO)


def _product_backward(operands: tuple[Array, Array], dy_NO: Array) -> tuple[Array, Array]:
  x_NI, w_IO = operands
  return jnp.dot(dy_NO, w_IO.T), jnp.dot(x_NI.T, dy_NO)


matrix_product.defvjp(_product_forward, _product_backward)


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
  """

  intermediate_dim: int = 2048
  activations: Sequence[str | Callable[[Array], Array]] = ("relu",)
  kernel_init: Initializer = fan_in_truncated_normal
  intermediate_dropout_rate: float = 0.1
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, inputs_BTD: Float[Array, "B T D"], decode: bool = False, deterministic: bool = False
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
        name=name,
      )(inputs_BTD)
      branch_BTF = activation_function(activation)(branch_BTF)
      hidden_BTF = branch_BTF if hidden_BTF is None else hidden_BTF * branch_BTF
    hidden_BTF = nn.Dropout(rate=self.intermediate_dropout_rate, broadcast_dims=(-2,))(
      hidden_BTF, deterministic=deterministic
    )
    hidden_BTF = with_sharding_constraint(hidden_BTF, ("batch", "length", "mlp"))
    return DenseGeneral(
      inputs_BTD.shape[-1],
      dtype=self.dtype,
      kernel_init=self.kernel_init,
      kernel_axes=("mlp", "embed"),
      name="wo",
    )(hidden_BTF)
