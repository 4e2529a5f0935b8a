"""The logical axes of the dimensions of an operation's result, from those of its operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

# A dimension is the product of factors (logical axis or None, size): one, unless dimensions were merged.
Dimension = tuple[tuple[str | None, int], ...]


def dimensions_of(
  eqn: JaxprEqn, operands: Sequence[Any], shape: tuple[int, ...]
) -> tuple[Dimension, ...]:
  """Returns the dimensions of a result of this shape; without names where they are unknown.

  Args:
    eqn: the operation.
    operands: the arrays that it reads, with their `shape` and `dims`.
    shape: the sizes of the result.
  """
  dims = _RULES.get(eqn.primitive.name, _same_dimensions)(eqn, operands, shape)
  if tuple(math.prod(size for _, size in dim) for dim in dims) == shape:
    return tuple(dims)
  return tuple(((None, size),) for size in shape)


def _same_dimensions(eqn: JaxprEqn, operands: Sequence[Any], shape: tuple[int, ...]) -> Any:
  dims: list[Dimension] = [((None, size),) for size in shape]
  for operand in operands:
    if len(operand.dims) != len(shape):
      continue
    for number, dim in enumerate(operand.dims):
      is_named = any(name for name, _ in dim) and not any(name for name, _ in dims[number])
      if is_named and math.prod(size for _, size in dim) == shape[number]:
        dims[number] = dim
  return tuple(dims)


def _matmul(eqn: JaxprEqn, operands: Sequence[Any], shape: tuple[int, ...]) -> Any:
  contracted, batch = eqn.params["dimension_numbers"]
  left, right = (x.dims for x in operands)
  free = [
    [dim for n, dim in enumerate(dims) if n not in contracted[side] and n not in batch[side]]
    for side, dims in enumerate((left, right))
  ]
  return (*(left[n] for n in batch[0]), *free[0], *free[1])


def _reshape(eqn: JaxprEqn, operands: Sequence[Any], shape: tuple[int, ...]) -> Any:
  factors = [factor for dim in operands[0].dims for factor in dim if factor[1] != 1]
  dims: list[Dimension] = []
  for size in shape:
    dim: list[tuple[str | None, int]] = []
    while size > 1 and factors:
      name, factor = factors.pop(0)
      taken = math.gcd(factor, size)
      dim.append((name, taken))
      size //= taken
      if taken < factor:
        factors.insert(0, (None, factor // taken))
      if taken == 1:
        break
    dims.append(tuple(dim) or ((None, 1),))
  return tuple(dims)


def _lookup(eqn: JaxprEqn, operands: Sequence[Any], shape: tuple[int, ...]) -> Any:
  numbers = eqn.params["dimension_numbers"]
  hidden = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
  offsets = iter([dim for n, dim in enumerate(operands[0].dims) if n not in hidden])
  indices = iter(operands[1].dims[:-1])
  return tuple(next(offsets if n in numbers.offset_dims else indices) for n in range(len(shape)))


def _constrained(eqn: JaxprEqn, operands: Sequence[Any], shape: tuple[int, ...]) -> Any:
  spec = (*eqn.params["sharding"].spec, *[None] * len(shape))[: len(shape)]
  return tuple(
    ((names, size),) if isinstance(names, str) else ((None, size),)
    for names, size in zip(spec, shape, strict=True)
  )


def _broadcast(eqn: JaxprEqn, operands: Sequence[Any], shape: tuple[int, ...]) -> Any:
  dims: list[Dimension] = [((None, size),) for size in shape]
  for source, target in enumerate(eqn.params["broadcast_dimensions"]):
    if operands[0].shape[source] == shape[target]:
      dims[target] = operands[0].dims[source]
  return tuple(dims)


def _stack(eqn: JaxprEqn, operands: Sequence[Any], shape: tuple[int, ...]) -> Any:
  axis, dims = eqn.params["axis"], operands[0].dims
  return (*dims[:axis], ((None, len(operands)),), *dims[axis:])


def _dropping(parameter: str) -> Callable[..., Any]:
  def drop(eqn: JaxprEqn, operands: Sequence[Any], shape: tuple[int, ...]) -> Any:
    return tuple(d for n, d in enumerate(operands[0].dims) if n not in eqn.params[parameter])

  return drop


_RULES: dict[str, Callable[[JaxprEqn, Sequence[Any], tuple[int, ...]], Any]] = {
  "dot_general": _matmul,
  "reshape": _reshape,
  "gather": _lookup,
  "sharding_constraint": _constrained,
  "broadcast_in_dim": _broadcast,
  "stack": _stack,
  "squeeze": _dropping("dimensions"),
  "transpose": lambda eqn, operands, _: tuple(
    operands[0].dims[n] for n in eqn.params["permutation"]
  ),
  **dict.fromkeys(
    ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin"),
    _dropping("axes"),
  ),
}
