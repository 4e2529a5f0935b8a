"""The arrays that a training step keeps from its forward pass for its backward pass, from the traced loss.

XLA's GPU compiler keeps what is found here: tests/gpu_program/test_plan_memory.py compares the estimate with
compiled programs. It computes elementwise operations again rather than storing their results.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from flax.linen import partitioning as flax_partitioning

from rosetta_t5.parallel.mesh import BATCH_AXES, axis_names
from rosetta_t5.traced.program import STORED, Segment, Value

# The operations whose result is the same bytes.
_VIEWS = re.compile(
  "reshape|transpose|sharding_constraint|squeeze|copy|optimization_barrier|stop_gradient"
)
# The operations whose gradient needs neither operands nor result.
_LINEAR = re.compile(
  "add|sub|neg|add_any|convert_element_type|broadcast_in_dim|reduce_sum|concatenate|pad|slice|split|stack"
  "|dynamic_slice|dynamic_update_slice|cumsum|rev|gather|scatter.*|while|" + _VIEWS.pattern
)
# The operations that XLA does not compute together with those before them.
_FROM_MEMORY = re.compile("dot_general|conv_general_dilated|sort|top_k|pallas_call")
# The gradient of each operand needs the other operands only.
_PRODUCTS = ("mul", "div", "dot_general", "select_n")
KEEP_NOTHING = ("full", "nothing_saveable")
KEEP_MATMULS = ("minimal", "dots_with_no_batch_dims_saveable", "dots_saveable")
RECOMPUTED = "recomputed"
_POLICIES = {
  "none": jax.checkpoint_policies.everything_saveable,
  "minimal": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  "full": jax.checkpoint_policies.nothing_saveable,
}


@dataclasses.dataclass(frozen=True)
class Kept:
  """An array that is kept.

  Attributes:
    value: the array.
    reader: the matmul that reads it and needs it in memory; None for others.
    is_computed: whether it is kept for this matmul only.
    copies: how many arrays of this size are kept.
  """

  value: Value
  reader: Value | None = None
  is_computed: bool = False
  copies: int = 1


class Activations:
  """What is kept of each segment of a program; see `traced.program.read_program`."""

  def __init__(self, segments: Sequence[Segment], examples: int):
    """Reads a program.

    Args:
      segments: its segments.
      examples: the number of examples with which it was traced.
    """
    self.segments, self.examples = segments, examples
    self._owner = {id(v): n for n, part in enumerate(segments) for v in part.values}
    self._pairs = {id(v) for part in segments for v in _pairs_of_attention(part)}
    self._roots: dict[int, list[Value]] = {}
    self.kept = functools.cache(self._kept)

  def is_pair(self, value: Value) -> bool:
    """Returns whether an array is one of attention's logits and probabilities, or between them."""
    return id(value) in self._pairs

  def _kept(self, policy: str, is_fused: bool) -> list[list[Kept]]:
    """Returns the arrays of each segment that are kept with a policy.

    Args:
      policy: what layers keep, "none", "minimal", "full" or a name of `jax.checkpoint_policies`; or
        `RECOMPUTED` for what a layer needs once its forward pass has been computed again.
      is_fused: whether one kernel computes attention and keeps neither logits nor probabilities.
    """
    found: list[dict[int, Kept]] = [{} for _ in self.segments]
    for number, part in enumerate(self.segments):
      if part.count and policy not in ("none", RECOMPUTED):
        kept = self._kept_by_policy(number, policy, is_fused)
      else:
        kept = self._kept_by_xla(part, policy == "none" and part.is_scanned)
      for each in kept:
        owner = self._owner.get(id(each.value))
        is_excluded = each.value.is_temporary or (is_fused and self.is_pair(each.value))
        # Of a scan that stacks what its norms compute, only the last layer's result is kept.
        is_last_only = policy == "none" and owner != number and self._is_scan(owner)
        if owner is not None and not is_excluded and not is_last_only:
          before = found[owner].get(id(each.value))
          if before is None or (before.is_computed and not each.is_computed):
            found[owner][id(each.value)] = each
    return [list(each.values()) for each in found]

  def _is_scan(self, number: int | None) -> bool:
    return number is not None and self.segments[number].is_scanned

  def _kept_by_xla(self, part: Segment, is_stacked: bool) -> Iterator[Kept]:
    """Yields what the gradients of a segment read, and what else they need is computed from.

    Args:
      is_stacked: whether a scan stacks it, so that XLA cannot compute it again.
    """
    for value in part.values:
      for operand in needed_operands(value):
        if _FROM_MEMORY.fullmatch(value.primitive):
          stored = stored_view(operand)
          yield Kept(stored, value, not self._is_stored(stored))
        elif is_stacked and self._is_norm(operand):
          # The gradient of a square needs its double.
          yield Kept(operand, copies=2 if value.primitive == "square" else 1)
        else:
          yield from (Kept(root) for root in self.roots(operand))

  def _kept_by_policy(self, number: int, policy: str, is_fused: bool) -> Iterator[Kept]:
    """Yields what a rematerialized layer keeps: its inputs, and what the policy saves of what is needed."""
    saves: Any = _POLICIES.get(policy) or getattr(jax.checkpoint_policies, policy)
    stack = [x for value in self.segments[number].values for x in needed_operands(value)]
    seen = set()
    while stack:
      value = stack.pop()
      if id(value) in seen or value.parameters:
        continue
      seen.add(id(value))
      if self._owner.get(id(value)) != number:
        is_array = value.is_trained and value.primitive != "constant"
        if is_array:
          yield Kept(stored_view(value))
      elif value.primitive == "dot_general" and not (is_fused and self.is_pair(value)):
        avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in value.operands]
        if saves(jax.lax.dot_general_p, *avals, **value.params):
          yield Kept(value)
        else:
          stack += value.operands
      else:
        stack += value.operands

  def _is_norm(self, value: Value) -> bool:
    """Returns whether a needed array is one of a norm: in float32, or computed from a sum over features."""
    if self.is_pair(value) or not (value.is_batched and value.is_trained):
      return False
    while not self._is_stored(value):
      if value.dtype.itemsize == 4:
        return True
      value = next((x for x in value.operands if x.is_batched), Value("input", (), (), value.dtype))
      if value.primitive == "input":
        return False
    return False

  def _is_stored(self, value: Value) -> bool:
    """Returns whether XLA stores a result: a layer's, a matmul's, or a sum that a matmul adds."""
    if value.is_boundary or STORED.fullmatch(value.primitive):
      return True
    if value.primitive != "add":
      return False
    first, second = (stored_view(x) for x in value.operands)
    if first.primitive != "dot_general":
      first, second = second, first
    return first.primitive == "dot_general" and first not in self.roots(second)

  def roots(self, value: Value) -> list[Value]:
    """Returns the stored arrays from which elementwise operations compute an array."""
    value = stored_view(value)
    if id(value) not in self._roots:
      self._roots[id(value)] = []
      if self._is_stored(value):
        found = [value]
      else:
        found = [root for operand in value.operands for root in self.roots(operand)]
      self._roots[id(value)] = list({id(root): root for root in found}.values())
    return self._roots[id(value)]


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
  """Returns the array whose bytes a value has, in another shape."""
  while _VIEWS.fullmatch(value.primitive) and not value.is_boundary:
    value = value.operands[0]
  return value


def _pairs_of_attention(part: Segment) -> Iterator[Value]:
  """Yields the arrays between two matmuls of activations: a fused kernel does not store them."""
  for value in part.values:
    if is_attention(value):
      for operand in value.operands:
        yield from _path_to_matmul(operand)


def _path_to_matmul(value: Value) -> list[Value]:
  """Returns the arrays from which an array is computed elementwise, if there is a matmul of attention."""
  path, stack, is_found = [], [value], False
  seen = set()
  while stack:
    value = stack.pop()
    if id(value) in seen or not (value.is_batched and value.is_trained):
      continue
    seen.add(id(value))
    path.append(value)
    if is_attention(value):
      is_found = True
    elif not value.is_boundary and (
      value.primitive.startswith("reduce_") or not STORED.fullmatch(value.primitive)
    ):
      stack += value.operands
  return path if is_found else []


def is_attention(value: Value) -> bool:
  """Returns whether an operation multiplies arrays of the same examples."""
  is_matmul = value.primitive == "dot_general" and value.params["dimension_numbers"][1][0]
  return bool(is_matmul) and all(x.is_batched and x.is_trained for x in value.operands)


class Layout:
  """How arrays are split over devices."""

  def __init__(self, rules: Sequence[Any], mesh: Mapping[str, int], traced_examples: int):
    """Describes a mesh.

    Args:
      rules: (logical axis, mesh axis) pairs.
      mesh: the size of each mesh axis.
      traced_examples: the number of examples of a traced program.
    """
    self._rules, self._mesh, self._examples = tuple(rules), mesh, traced_examples
    # Values stay alive as long as the program, so their ids identify them.
    self._specs: dict[int, tuple[Value, list[tuple[str, ...]]]] = {}

  def bytes_of(self, value: Value, examples: float, gathered: Sequence[str] = ()) -> float:
    """Returns the bytes of an array on a device that computes so many examples.

    Args:
      value: the array.
      examples: the examples of a device.
      gathered: mesh axes over which it is complete.
    """
    axes = [axis for axis in self.axes_of(value) if axis not in gathered]
    size = value.nbytes / math.prod(self._mesh[axis] for axis in axes)
    return size * examples / self._examples if value.is_batched else size

  def axes_of(self, value: Value) -> tuple[str, ...]:
    """Returns the mesh axes over which an array is split, without those of examples."""
    return tuple(axis for part in self.spec_of(value) for axis in part)

  def spec_of(self, value: Value) -> list[tuple[str, ...]]:
    """Returns the mesh axes of each dimension, without those of examples if it has examples."""
    if id(value) not in self._specs:
      self._specs[id(value)] = value, list(self._find_spec(value))
    return self._specs[id(value)][1]

  def _find_spec(self, value: Value) -> Iterator[tuple[str, ...]]:
    spec = iter(_mesh_axes(value.axes, self._rules))
    for dim in value.dims:
      axes = [axis for _ in dim for axis in axis_names(next(spec))]
      axes = [axis for axis in axes if not (value.is_batched and axis in BATCH_AXES)]
      shards = math.prod(self._mesh.get(axis, 1) for axis in axes)
      size = math.prod(size for _, size in dim)
      yield tuple(axes) if shards > 1 and size % shards == 0 else ()

  def summed_over(self, matmul: Value) -> tuple[str, ...]:
    """Returns the mesh axes over which the results of a matmul are added up."""
    contracted, _ = matmul.params["dimension_numbers"]
    left, right = (self.spec_of(x) for x in matmul.operands)
    pairs = zip(*contracted, strict=True)
    return tuple(axis for i, j in pairs for axis in left[i] if axis in right[j])

  def gathered_for(self, value: Value, reader: Value) -> tuple[str, ...]:
    """Returns the mesh axes over which a matmul cannot read an operand in parts."""
    side = 0 if stored_view(reader.operands[0]) is value else 1
    own, other = (self.spec_of(reader.operands[n]) for n in (side, 1 - side))
    contracted, batch = reader.params["dimension_numbers"]
    # The dimensions of the result: those of the batch, then the free ones of both operands.
    results = self.spec_of(reader)[len(batch[0]) :]
    num_free = len(own) - len(batch[side]) - len(contracted[side])
    free = iter(results[:num_free] if side == 0 else results[len(results) - num_free :])
    gathered: list[str] = []
    for number, axes in enumerate(own):
      if number in contracted[side]:
        allowed = other[contracted[1 - side][contracted[side].index(number)]]
      else:
        allowed = axes if number in batch[side] else next(free)
      gathered += [axis for axis in axes if axis not in allowed]
    return tuple(gathered)


@functools.cache
def _mesh_axes(names: tuple[str | None, ...], rules: tuple[Any, ...]) -> tuple[Any, ...]:
  """Returns the mesh axes of dimensions; the first of equal names has those of the name."""
  unique = tuple(name if name not in names[:n] else None for n, name in enumerate(names))
  return tuple(flax_partitioning.logical_to_mesh_axes(unique, rules) or ())
