"""Reads a traced loss: its arrays, the logical axes of their dimensions, its matmuls and its layers.

Nothing here knows a network. A loss is traced for shapes, with one mesh axis for each logical axis, so that the
sharding constraints of the program name the dimensions; other dimensions get their names from these.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from rosetta_t5.parallel.placement import use_placement
from rosetta_t5.traced.dimensions import Dimension, dimensions_of

# The primitives that XLA does not compute as a part of the next operation.
STORED = re.compile(
  "dot_general|gather|scatter.*|sort|top_k|cumsum|conv_general_dilated|while|pallas_call|reduce_.*|arg.*"
)
_REMATERIALIZED = frozenset(("remat", "remat2", "checkpoint"))
# The sizes of the mesh axes of a trace: more than 1, or constraints would be left out.
_AXIS_SIZE = 2


@dataclasses.dataclass(eq=False, slots=True)
class Value:
  """An array of a traced program.

  Attributes:
    primitive: the operation that computes it; "input", "parameter" or "constant".
    operands: the arrays that it is computed from.
    dims: its dimensions.
    dtype: its type.
    is_batched: whether it depends on the examples, so that its size is proportional to their number.
    is_trained: whether it depends on a parameter, so that it has a gradient.
    parameters: the numbers of the parameters, if it is made of nothing else and without matmuls.
    flops: the floating-point operations of a matmul.
    params: the parameters of the primitive.
    is_boundary: whether it is the result of a layer.
    repeats: how often it is computed in a loop other than one over layers, and again for the gradient.
  """

  primitive: str
  operands: tuple[Value, ...]
  dims: tuple[Dimension, ...]
  dtype: Any
  is_batched: bool = False
  is_trained: bool = False
  parameters: frozenset[int] = frozenset()
  flops: float = 0.0
  params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  is_boundary: bool = False
  repeats: float = 1.0

  @property
  def shape(self) -> tuple[int, ...]:
    """Its sizes."""
    return tuple(math.prod(size for _, size in dim) for dim in self.dims)

  @property
  def nbytes(self) -> int:
    """Its bytes."""
    return math.prod(self.shape) * self.dtype.itemsize

  @property
  def axes(self) -> tuple[str | None, ...]:
    """The logical axis of each factor of its dimensions."""
    return tuple(name for dim in self.dims for name, _ in dim)


@dataclasses.dataclass(eq=False)
class Segment:
  """A part of a program: one or more equal layers, or what is computed before, between or after layers.

  Attributes:
    values: the arrays that it computes, those of one layer.
    count: the number of layers; 0 for a part that is not a layer.
    is_scanned: whether the layers are a scan.
    parameters: the numbers of the parameters that all of its layers use.
  """

  values: list[Value] = dataclasses.field(default_factory=list)
  count: int = 0
  is_scanned: bool = False
  parameters: set[int] = dataclasses.field(default_factory=set)

  @property
  def layers(self) -> int:
    """How often it is computed."""
    return max(self.count, 1)


def trace_loss(
  model: Any, params: Any, batch: Mapping[str, Any], axes: Sequence[str] = ("none",)
) -> ClosedJaxpr:
  """Returns the traced loss of a model whose layers are rematerialized, so that each can be found.

  Attention is traced as XLA's kernel, whose operations can be read. No device is used.

  Args:
    model: the model.
    params: the parameters, or their shapes.
    batch: the shapes of the features of a batch.
    axes: the logical axes, whose names are then those of the dimensions.
  """
  plain = with_config(model, attention_kernel="xla", remat_policy="full")
  axes = tuple(dict.fromkeys(axes))
  device = AbstractDevice("cpu", None, "cpu")
  types, sizes = (AxisType.Auto,) * len(axes), (_AXIS_SIZE,) * len(axes)
  mesh = AbstractMesh(sizes, axes, axis_types=types, abstract_device=device)
  with use_placement(mesh, [(name, name) for name in axes]):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, dict(batch)))
    # With a key, because experts have more slots in training; only its shape, to use no device.
    key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    return jax.make_jaxpr(lambda *args: plain.loss_fn(*args)[0])(*shapes, key)


def with_config(model: Any, **changes: Any) -> Any:
  """Returns a copy of a model with these values in its network's config, if it has the fields."""
  config: Any = getattr(model, "network_config", None)
  known = {name: value for name, value in changes.items() if hasattr(config, name)}
  if not known:
    return model
  changed = copy.copy(model)
  changed.module = model.module.clone(config=dataclasses.replace(config, **known))
  return changed


def flops_of_training(model: Any, params: Any, batch: Mapping[str, Any]) -> float | None:
  """Returns the FLOPs of a training step for one example of `batch`; None if the loss cannot be traced.

  It counts two FLOPs per multiply-add of each matmul of examples, and as much for each operand that has a
  gradient: what T5X's formula counts. Causal attention is counted in full, as are the empty slots of
  experts; recomputation is not. For a decoder-only model, the result equals the formula of Narayanan et al.
  2021 (arXiv:2104.04473) without recomputation.

  Args:
    model: the model.
    params: the parameters, or their shapes.
    batch: the arrays or the shapes of the features.
  """
  shapes = {name: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for name, x in batch.items()}
  try:
    traced, trained = trace_loss(model, params, shapes), are_trained(params, model.optimizer_def)
    segments = read_program(traced, trained)
  except Exception:  # a model of the user's, with other features or another loss
    return None
  return flops_of_segments(segments)


def flops_of_segments(segments: Sequence[Segment]) -> float:
  """Returns the FLOPs of the segments of a loss, forward and backward; see `flops_of_training`."""

  def of_value(value: Value) -> float:
    return value.flops * (1 + sum(operand.is_trained for operand in value.operands))

  return sum(part.layers * of_value(value) for part in segments for value in part.values)


def are_trained(params: Any, optimizer_def: Any) -> list[bool]:
  """Returns whether each parameter has a gradient; without an optimizer, all have one."""
  trained = params if optimizer_def is None else optimizer_def.trained(params)
  paths = {path for path, _ in jax.tree.leaves_with_path(trained)}
  return [path in paths for path, _ in jax.tree.leaves_with_path(params)]


def read_program(
  traced: ClosedJaxpr, trained: Sequence[bool], axes: Sequence[Sequence[str | None]] = ()
) -> list[Segment]:
  """Returns the segments of a traced loss, in their order; equal layers that follow each other are one.

  Args:
    traced: the result of `trace_loss`; its first inputs are the parameters.
    trained: whether each of them has a gradient.
    axes: the logical axes of each parameter.
  """
  reader = _Reader()
  inputs = []
  last = len(traced.jaxpr.invars) - 1  # the key of dropout
  for number, var in enumerate(traced.jaxpr.invars):
    is_parameter, is_key = number < len(trained), number == last
    names = axes[number] if is_parameter and axes else (None,) * len(var.aval.shape)
    if not is_parameter and not is_key and axes and var.aval.shape:
      names = ("batch", "length", *names)[: len(names)]
    dims = tuple(((name, size),) for name, size in zip(names, var.aval.shape, strict=True))
    value = Value("parameter" if is_parameter else "input", (), dims, var.aval.dtype)
    value.is_batched = not is_parameter and not is_key
    value.is_trained = is_parameter and trained[number]
    value.parameters = frozenset([number] if is_parameter else [])
    inputs.append(value)
  reader.read(traced.jaxpr, inputs, [_constant(x) for x in traced.consts])
  return reader.segments


def parameters_read(part: Segment) -> set[int]:
  """Returns the numbers of the parameters that the operations of a segment read."""
  return {n for value in part.values for x in value.operands for n in x.parameters}


def _constant(x: Any) -> Value:
  dims = tuple(((None, size),) for size in getattr(x, "shape", ()))
  return Value("constant", (), dims, getattr(x, "dtype", jax.numpy.dtype("float32")))


class _Reader:
  """Walks through a jaxpr and appends what it computes to segments."""

  def __init__(self) -> None:
    """Starts without segments."""
    self.segments: list[Segment] = []
    self._repeats = 1.0
    self._in_layer = False

  def read(self, jaxpr: Jaxpr, inputs: Sequence[Value], consts: Sequence[Value]) -> list[Value]:
    """Returns the results of a jaxpr."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def value_of(atom: Any) -> Value:
      return _constant(atom.aval) if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
      results = self._read_equation(eqn, [value_of(atom) for atom in eqn.invars])
      values.update(zip(eqn.outvars, results, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]

  def _read_equation(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    name = eqn.primitive.name
    inner = next((eqn.params[k] for k in ("jaxpr", "call_jaxpr") if k in eqn.params), None)
    if name == "cond":
      return self._read_closed(eqn.params["branches"][0], operands[1:])
    if name == "scan":
      return self._read_scan(eqn, operands)
    if inner is None or name == "pallas_call":
      return [self._append(eqn, var, number, operands) for number, var in enumerate(eqn.outvars)]
    if name in _REMATERIALIZED and not self._in_layer:
      return self._read_layer(inner, operands, count=1)
    return self._read_closed(inner, operands)

  def _read_closed(self, jaxpr: Any, operands: Sequence[Value]) -> list[Value]:
    if isinstance(jaxpr, ClosedJaxpr):
      return self.read(jaxpr.jaxpr, operands, [_constant(x) for x in jaxpr.consts])
    return self.read(jaxpr, operands, [])

  def _read_layer(self, jaxpr: Any, operands: Sequence[Value], count: int) -> list[Value]:
    """Reads layers as a segment of their own; adds a layer to the segment before it if they are equal."""
    layer = Segment(count=count)
    self.segments.append(layer)
    self._in_layer = True
    results = self._read_closed(jaxpr, operands)
    self._in_layer = False
    for value in results:
      value.is_boundary = value.is_batched and value.is_trained
    layer.parameters = parameters_read(layer)
    before = self.segments[-2] if len(self.segments) > 1 else Segment()
    if _signature(before) == _signature(layer):
      self.segments.pop()
      before.count += count
      before.parameters |= layer.parameters
      before.values = layer.values  # the next segment reads the last layer's results
    return results

  def _read_scan(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    params = eqn.params
    num_shared, num_carried = params["num_consts"], params["num_carry"]
    scanned = [_without_first(value) for value in operands[num_shared + num_carried :]]
    inputs = [*operands[: num_shared + num_carried], *scanned]
    length, is_layers = params["length"], any(x.parameters for x in scanned)
    if is_layers and not self._in_layer:
      results = self._read_layer(params["jaxpr"], inputs, length)
      self.segments[-1].is_scanned = True
    else:
      self._repeats *= length
      results = self._read_closed(params["jaxpr"], inputs)
      self._repeats /= length
    stacked = [_with_first(value, length) for value in results[num_carried:]]
    return [*results[:num_carried], *stacked]

  def _append(self, eqn: JaxprEqn, var: Any, number: int, operands: list[Value]) -> Value:
    name, shape = eqn.primitive.name, tuple(getattr(var.aval, "shape", ()))
    dims = dimensions_of(eqn, operands, shape)
    arrays = [x for x in operands if x.primitive != "constant"]
    value = Value(name, tuple(operands), dims, getattr(var.aval, "dtype", jax.numpy.dtype("int32")))
    value.is_batched = any(x.is_batched for x in arrays)
    is_float = jax.numpy.issubdtype(value.dtype, jax.numpy.floating)
    value.is_trained = is_float and any(x.is_trained for x in arrays) and name != "stop_gradient"
    value.params, value.repeats = eqn.params, self._repeats
    if all(x.parameters for x in arrays) and not STORED.fullmatch(name):
      value.parameters = frozenset().union(*(x.parameters for x in arrays))
    if name == "dot_general" and value.is_batched:
      (contracted, _), _ = eqn.params["dimension_numbers"]
      inner = math.prod(operands[0].shape[n] for n in contracted)
      value.flops = 2.0 * math.prod(shape) * inner * value.repeats
    if not self._in_layer and (not self.segments or self.segments[-1].count):
      self.segments.append(Segment())
    self.segments[-1].values.append(value)
    return value


def _signature(layer: Segment) -> list[Any]:
  return [(value.primitive, value.dims, value.dtype) for value in layer.values]


def _without_first(value: Value) -> Value:
  """Returns what one iteration of a scan reads of an array."""
  slice_ = dataclasses.replace(value, primitive="squeeze", operands=(value,), dims=value.dims[1:])
  return dataclasses.replace(slice_, is_boundary=False, flops=0.0)


def _with_first(value: Value, length: int) -> Value:
  """Returns the results of all iterations of a scan."""
  stacked = dataclasses.replace(value, primitive="stack", operands=(value,), flops=0.0)
  return dataclasses.replace(stacked, dims=(((None, length),), *value.dims))
