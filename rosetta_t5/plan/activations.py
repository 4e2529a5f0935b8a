"""The arrays that a training step keeps from its forward pass for its backward pass, from the traced loss.

XLA's GPU compiler keeps what is found here: tests/gpu_program/test_plan_memory.py compares the estimate with
compiled programs. It computes elementwise operations again rather than storing their results.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from flax.linen import partitioning as flax_partitioning

from rosetta_t5.networks.layers.stack import REMAT_POLICIES
from rosetta_t5.parallel.mesh import BATCH_AXES, axis_names
from rosetta_t5.traced.program import STORED, Segment, Value

# The number of examples of a trace. Each mesh axis of a trace has two devices, and only dimensions that are
# divisible by two get names: the examples, and the examples of one device, of which groups of experts consist.
TRACED_EXAMPLES = 4
# Operations whose result has the bytes of their operand.
_VIEWS = re.compile(
  "reshape|transpose|sharding_constraint|squeeze|copy|optimization_barrier|stop_gradient"
)
# Operations whose gradient needs neither operands nor result.
_LINEAR = re.compile(
  "add|sub|neg|add_any|convert_element_type|broadcast_in_dim|reduce_sum|concatenate|pad|slice|split|stack"
  "|dynamic_slice|dynamic_update_slice|cumsum|rev|gather|scatter.*|while|" + _VIEWS.pattern
)
# Operations that read their operands from memory: XLA does not fuse them with those before them.
_FROM_MEMORY = re.compile("dot_general|conv_general_dilated|sort|top_k|pallas_call")
# Operations in which the gradient of each operand needs the other operands only.
_PRODUCTS = ("mul", "div", "dot_general", "select_n")
# Names of rematerialization policies, except for RECOMPUTED; see `Activations.kept`.
KEEP_NOTHING = ("full", "nothing_saveable")
RECOMPUTED = "recomputed"
KEEP_MATMULS = ("minimal", "dots_with_no_batch_dims_saveable", "dots_saveable")


class Activations:
  """The arrays that each segment of a program keeps; see `traced.program.read_program`."""

  def __init__(self, segments: Sequence[Segment]):
    """Reads the segments of a program that was traced with TRACED_EXAMPLES."""
    self.segments = segments
    self._owner = {v: n for n, part in enumerate(segments) for v in part.values}
    # The arrays from the first to the second matmul of attention, which a fused kernel does not store.
    attention = [v for part in segments for v in part.values if is_attention(v)]
    operands = [x for matmul in attention for x in matmul.operands]
    self._pairs = {v for x in operands for v in _path_to_matmul(x)}
    self.roots = functools.cache(self._roots)
    self.kept = functools.cache(self._kept)

  def is_pair(self, value: Value) -> bool:
    """Returns whether an array has a number for each query and key: logits, probabilities, and those between."""
    return value in self._pairs

  def _kept(self, policy: str, is_fused: bool) -> list[list[Value]]:
    """Returns the arrays of each segment that are kept with a policy.

    Args:
      policy: what layers keep, "none", "minimal", "full" or a name of `jax.checkpoint_policies`; or
        `RECOMPUTED` for what a layer needs once its forward pass has been computed again.
      is_fused: whether one kernel computes attention and keeps neither logits nor probabilities.
    """
    found: list[dict[Value, None]] = [{} for _ in self.segments]
    for number, part in enumerate(self.segments):
      if part.count and policy not in ("none", RECOMPUTED):
        kept = self._kept_by_policy(number, policy, is_fused)
      else:
        kept = self._kept_by_xla(part)
      for value in kept:
        owner = self._owner.get(value)
        is_excluded = value.repeats > 1 or (is_fused and self.is_pair(value))
        if owner is not None and not is_excluded:
          found[owner][value] = None
    return [list(each) for each in found]

  def _kept_by_xla(self, part: Segment) -> Iterator[Value]:
    """Yields the arrays that XLA stores for the gradients of a segment; it computes the others from these."""
    for value in part.values:
      for operand in needed_operands(value):
        if _FROM_MEMORY.fullmatch(value.primitive):
          yield stored_view(operand)
        else:
          yield from self.roots(operand)

  def _kept_by_policy(self, number: int, policy: str, is_fused: bool) -> Iterator[Value]:
    """Yields what a rematerialized layer keeps: its inputs, and the results of matmuls that the policy saves."""
    saves: Any = REMAT_POLICIES.get(policy) or getattr(jax.checkpoint_policies, policy)
    stack = [x for value in self.segments[number].values for x in needed_operands(value)]
    seen = set()
    while stack:
      value = stack.pop()
      if value in seen or value.parameters:
        continue
      seen.add(value)
      if self._owner.get(value) != number:
        if value.is_trained and value.primitive != "constant":
          yield stored_view(value)
      elif value.primitive == "dot_general" and not (is_fused and self.is_pair(value)):
        avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in value.operands]
        if saves(jax.lax.dot_general_p, *avals, **value.params):
          yield value
        else:
          stack += value.operands
      else:
        stack += value.operands

  def _is_stored(self, value: Value) -> bool:
    """Returns whether XLA stores a result: of a layer, of a matmul (see STORED), or of an addition fused with one."""
    if value.is_boundary or STORED.fullmatch(value.primitive):
      return True
    if value.primitive != "add":
      return False
    first, second = (stored_view(x) for x in value.operands)
    if first.primitive != "dot_general":
      first, second = second, first
    return first.primitive == "dot_general" and first not in self.roots(second)

  def _roots(self, value: Value) -> list[Value]:
    """Returns the stored arrays from which XLA computes an array by elementwise operations."""
    value = stored_view(value)
    if self._is_stored(value):
      return [value]
    return list(dict.fromkeys(root for operand in value.operands for root in self.roots(operand)))


def needed_operands(value: Value) -> Iterator[Value]:
  """Yields the operands that the gradient of an operation needs."""
  if not value.is_trained or _LINEAR.fullmatch(value.primitive):
    return
  is_product = value.primitive in _PRODUCTS
  for number, operand in enumerate(value.operands):
    others = any(x.is_trained for n, x in enumerate(value.operands) if n != number)
    is_divisor = value.primitive == "div" and number == 1 and operand.is_trained
    is_array = operand.primitive != "constant" and not operand.parameters
    if is_array and (others or is_divisor or not is_product):
      yield operand


def stored_view(value: Value) -> Value:
  """Returns the array of which a value is a view: the same bytes in another shape."""
  while _VIEWS.fullmatch(value.primitive) and not value.is_boundary:
    value = value.operands[0]
  return value


def _path_to_matmul(value: Value) -> set[Value]:
  """Returns the arrays from a matmul of attention to an array; none if it is not computed from one elementwise."""
  path, stack, is_found = set[Value](), [value], False
  while stack:
    value = stack.pop()
    if value in path or not (value.is_batched and value.is_trained):
      continue
    path.add(value)
    if is_attention(value):
      is_found = True
    elif not value.is_boundary and (
      value.primitive.startswith("reduce_") or not STORED.fullmatch(value.primitive)
    ):
      stack += value.operands
  return path if is_found else set()


def is_attention(value: Value) -> bool:
  """Returns whether an operation is a matmul of attention: a batched one of two activations."""
  is_matmul = value.primitive == "dot_general" and value.params["dimension_numbers"][1][0]
  return bool(is_matmul) and all(x.is_batched and x.is_trained for x in value.operands)


class Layout:
  """How arrays are split over devices."""

  def __init__(self, rules: Sequence[Any], mesh: Mapping[str, int]):
    """Describes a mesh.

    Args:
      rules: (logical axis, mesh axis) pairs.
      mesh: the size of each mesh axis.
    """
    self._rules, self._mesh = tuple(rules), mesh
    self.spec_of = functools.cache(self._spec_of)

  def bytes_of(self, value: Value, examples: float, gathered: Sequence[str] = ()) -> float:
    """Returns the bytes of an array on one device.

    Args:
      value: the array.
      examples: the number of examples that the device computes.
      gathered: mesh axes over which the array has been gathered.
    """
    axes = [axis for axis in self.axes_of(value) if axis not in gathered]
    size = value.nbytes / math.prod(self._mesh[axis] for axis in axes)
    return size * examples / TRACED_EXAMPLES if value.is_batched else size

  def axes_of(self, value: Value) -> tuple[str, ...]:
    """Returns the mesh axes over which an array is split, except those that split examples."""
    return tuple(axis for part in self.spec_of(value) for axis in part)

  def _spec_of(self, value: Value) -> list[tuple[str, ...]]:
    """Returns the mesh axes of each dimension, except those that split examples if the array has them."""
    spec, found = iter(_mesh_axes(value.axes, self._rules)), list[tuple[str, ...]]()
    for dim in value.dims:
      axes = [axis for _ in dim for axis in axis_names(next(spec))]
      axes = [axis for axis in axes if not (value.is_batched and axis in BATCH_AXES)]
      shards = math.prod(self._mesh.get(axis, 1) for axis in axes)
      size = math.prod(size for _, size in dim)
      found.append(tuple(axes) if shards > 1 and size % shards == 0 else ())
    return found

  def summed_over(self, value: Value) -> tuple[str, ...]:
    """Returns the mesh axes over which the parts of a result are added up.

    They split the dimensions that a matmul contracts, a reduction reduces, or a lookup looks up.
    """
    if value.primitive == "dot_general":
      return tuple(a for a in self.contracted_axes(value, 0) if a in self.contracted_axes(value, 1))
    dims: Sequence[int] = ()
    if value.primitive == "gather":
      dims = value.params["dimension_numbers"].collapsed_slice_dims
    elif value.primitive.startswith("reduce_"):
      dims = value.params["axes"]
    return tuple(axis for n in dims for axis in self.spec_of(value.operands[0])[n])

  def contracted_axes(self, matmul: Value, side: int) -> tuple[str, ...]:
    """Returns the mesh axes that split the contracted dimensions of an operand of a matmul."""
    spec = self.spec_of(matmul.operands[side])
    return tuple(a for n in matmul.params["dimension_numbers"][0][side] for a in spec[n])

  def gathered_for(self, matmul: Value, side: int) -> tuple[str, ...]:
    """Returns the mesh axes over which an operand must be gathered before a matmul."""
    spec, dims = self.spec_of(matmul.operands[side]), _dims_of_operand(matmul, side)
    result, other = self.spec_of(matmul), self.contracted_axes(matmul, 1 - side)
    allowed = [result[at] if at is not None else other for at in dims]
    return tuple(a for axes, kept in zip(spec, allowed, strict=True) for a in axes if a not in kept)

  def gradient_summed_over(self, matmul: Value, side: int) -> tuple[str, ...]:
    """Returns the mesh axes over which the parts of an operand's gradient are added up."""
    spec, dims = self.spec_of(matmul.operands[1 - side]), _dims_of_operand(matmul, 1 - side)
    result, own = self.spec_of(matmul), set(_dims_of_operand(matmul, side))
    pairs = zip(spec, dims, strict=True)
    free = [(axes, at) for axes, at in pairs if at is not None and at not in own]
    return tuple(axis for axes, at in free for axis in axes if axis in result[at])


def _dims_of_operand(matmul: Value, side: int) -> list[int | None]:
  """Returns, for each dimension of an operand, its index in the result; None if it is contracted."""
  contracted, batch = matmul.params["dimension_numbers"]
  # In the result, the dimensions of the batch come first, then those of the left operand.
  of_left = len(matmul.operands[0].dims) - len(contracted[0])
  free = iter(range(of_left if side else len(batch[0]), len(matmul.dims)))
  return [
    batch[side].index(n) if n in batch[side] else None if n in contracted[side] else next(free)
    for n in range(len(matmul.operands[side].dims))
  ]


@functools.cache
def _mesh_axes(names: tuple[str | None, ...], rules: tuple[Any, ...]) -> tuple[Any, ...]:
  """Returns the mesh axes of dimensions; if a name is repeated, only its first dimension is split."""
  unique = tuple(name if name not in names[:n] else None for n, name in enumerate(names))
  return tuple(flax_partitioning.logical_to_mesh_axes(unique, rules) or ())
