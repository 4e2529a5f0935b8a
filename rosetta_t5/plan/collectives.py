"""The collectives of a training step and their bytes, from its traced loss and the layout of its arrays.

Four rules cover tensor, sequence, expert, context and fully sharded data parallelism, whatever the network:
- If the contracted dimension of a matmul is sharded, each device has partial sums of the result, which are added
  up over devices.
- If an operand is sharded along a dimension along which the result is not, the operand is gathered.
- If rows are looked up in a table of which each device has a part of every row, the devices exchange these parts.
- The gradient of a parameter is summed over the mesh axes that shard the examples and positions.
tests/parallel/test_collectives.py compares the bytes with those of compiled steps.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from rosetta_t5.kernels.context_attention import splits_heads
from rosetta_t5.networks.other_networks import setting_of
from rosetta_t5.parallel import mesh
from rosetta_t5.plan.activations import is_attention, stored_view
from rosetta_t5.plan.workload import Workload
from rosetta_t5.traced.program import Segment, Value

ALL_REDUCE = "all-reduce"
ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"
ALL_TO_ALL = "all-to-all"
PERMUTE = "collective-permute"


@dataclasses.dataclass(frozen=True)
class Collective:
  """Collectives of one kind over the same axes for the same purpose.

  Attributes:
    kind: all-reduce, all-gather, reduce-scatter, all-to-all or collective-permute.
    axes: the mesh axes whose devices take part.
    size: the bytes of the whole arrays on each device per step; for an all-to-all or a permute, of the
      device's shards.
    why: what is sent: "gradients", "parameters", "activations", "keys", "queries" or "microbatches"
      (everything that stages send to each other).
    terms: the number of arrays whose sum is needed. On GPUs, XLA adds them on each device and sends only the
      sum (AllReduceReassociate); on CPUs, it sends each of them.
    sent: the bytes that each device sends in a step. `estimate_step` sets this and the next two.
    seconds: how long that takes.
    leaves_node: whether it uses the network between nodes, and not only NVLink.
  """

  kind: str
  axes: tuple[str, ...]
  size: float
  why: str
  terms: int = 1
  sent: float = 0.0
  seconds: float = 0.0
  leaves_node: bool = False

  def wire_bytes(self, axis_sizes: Mapping[str, int]) -> float:
    """Returns the bytes that one device sends per step in a ring."""
    if self.kind == PERMUTE:
      return self.size
    n = math.prod(axis_sizes[axis] for axis in self.axes)
    return (2 if self.kind == ALL_REDUCE else 1) * (n - 1) / n * self.size


def step_collectives(work: Workload) -> list[Collective]:
  """Returns the collectives of a training step; [] if its loss cannot be traced."""
  sizes: dict[Collective, float] = collections.defaultdict(float)
  segments = work.activations.segments if work.activations else ()
  # What is outside layers counts as one segment, because all that read a table there share its gradient.
  outside = Segment([value for part in segments if not part.count for value in part.values])
  parts = (outside, *(part for part in segments if part.count))
  kinds = (_activation_collectives, _parameter_collectives, _stage_collectives)
  for each in (each for part in parts for kind in kinds for each in kind(part, work)):
    if each.axes and each.size:
      sizes[dataclasses.replace(each, size=0.0)] += each.size
  return [dataclasses.replace(each, size=size) for each, size in sizes.items()]


def _activation_collectives(part: Segment, work: Workload) -> Iterator[Collective]:
  """Yields the collectives of a segment's activations, those between tokens and experts included."""
  layout = work.layout
  inputs: dict[int, list[tuple[Value, int]]] = collections.defaultdict(list)
  for value in part.values:
    if not value.is_batched:
      continue
    size = part.layers * value.repeats * layout.bytes_of(value, work.examples)
    if summed := layout.summed_over(value):
      is_scattered = set(summed) <= set(layout.axes_of(value))
      whole = size * work.shards(summed) if is_scattered else size
      yield Collective(REDUCE_SCATTER if is_scattered else ALL_REDUCE, summed, whole, "activations")
      if is_scattered and value.is_trained:
        yield Collective(ALL_GATHER, summed, whole, "activations")  # its gradient
    elif value.primitive == "sharding_constraint" and _exchanges_experts(value):
      # Tokens, forward; and their gradients, backward.
      yield Collective(ALL_TO_ALL, work.present((mesh.EXPERT_AXIS,)), 2 * size, "activations")
    if value.primitive == "dot_general":
      for side, operand in enumerate(value.operands):
        if operand.is_batched and operand.is_trained:
          inputs[id(stored_view(operand))].append((value, side))
  for readers in inputs.values():
    yield from _input_collectives(part, work, readers)


def _input_collectives(
  part: Segment, work: Workload, readers: Sequence[tuple[Value, int]]
) -> Iterator[Collective]:
  """Yields the collectives that gather an input of matmuls and sum its gradient over devices.

  Args:
    part: the segment of the matmuls.
    work: the step.
    readers: the matmuls that read the input, each with the index of the input among its operands.
  """
  layout, (matmul, side) = work.layout, readers[0]
  operand = matmul.operands[side]
  gathered = layout.gathered_for(matmul, side)
  whole = part.layers * operand.repeats * layout.bytes_of(operand, work.examples, gathered)
  why, gathers = "activations", 1
  if is_attention(matmul):
    # A fused kernel gathers keys and values again for the backward pass, and so does rematerialization.
    why, forward, is_flash = "keys", 1 + (work.remat_policy != "none"), work.kernel == "flash"
    gathers = forward + is_flash
    other, passes = matmul.operands[1 - side], (forward + 1) * part.layers
    is_query = work.activations and not work.activations.is_pair(other)
    queries = 2 * passes * layout.bytes_of(other, work.examples) if is_query else 0.0
    if gathered and is_flash and _splits_heads(operand, work, gathered):
      # Devices exchange positions for heads, and outputs back; likewise their gradients.
      keys = passes * layout.bytes_of(operand, work.examples)
      yield Collective(ALL_TO_ALL, gathered, keys, "keys")
      yield Collective(ALL_TO_ALL, gathered, queries, "queries")
      return
    if gathered and is_flash and _is_causal(work):
      # So that all devices have equal work, each sends its queries and its outputs, and their gradients; of two
      # devices, each keeps one half.
      sent = queries / 2 if work.shards(gathered) == 2 else queries
      yield Collective(PERMUTE, gathered, sent, "queries")
  elif set(gathered) & set(layout.contracted_axes(matmul, side)):
    # XLA gathers an input that is split along features for each matmul, and again for its gradient.
    gathers = 2 * len(readers)
  yield Collective(ALL_GATHER, gathered, gathers * whole, why)
  summed = layout.gradient_summed_over(matmul, side)
  kind = REDUCE_SCATTER if gathered else ALL_REDUCE
  yield Collective(kind, gathered or summed, whole, why, len(readers))


def _parameter_collectives(part: Segment, work: Workload) -> Iterator[Collective]:
  """Yields the collectives that gather the parameters of a segment and sum their gradients."""
  if work.schedule.stages > 1 and part.is_scanned:
    return
  readers: dict[int, tuple[Value, list[Value]]] = {}
  for value in part.values:
    for operand in value.operands if value.is_batched else ():
      if (operand.is_trained or operand.parameters) and not operand.is_batched:
        array = _array_sent(operand, value)
        readers.setdefault(id(array), (array, []))[1].append(value)
  own = {id(value) for value in part.values}
  for array, values in readers.values():
    # Each layer has its own parameters, but all layers share an array that was computed from a parameter
    # before the first layer.
    is_shared = not array.parameters and id(array) not in own
    layers = 1 if is_shared else part.layers
    yield from _array_collectives(array, values, layers, part.layers // layers, work)


def _array_collectives(
  array: Value, readers: Sequence[Value], count: int, layers: int, work: Workload
) -> Iterator[Collective]:
  """Yields the collectives that gather an array of parameters and sum its gradient over devices.

  Args:
    array: a parameter, or what is computed from parameters only.
    readers: the operations that combine it with arrays of examples.
    count: the number of such arrays.
    layers: the number of layers that read each of them.
    work: what the step computes.
  """
  split = set(work.layout.axes_of(array))
  # The axes that split examples and positions. The parameters of an expert are not gathered, and its device
  # computes the whole gradient.
  excluded = {mesh.PIPELINE_AXIS, *({mesh.EXPERT_AXIS} & split)}
  rows = {*mesh.BATCH_AXES, *work.layout.axes_of(readers[0])} - excluded
  shards = work.present(rows & split & {*mesh.BATCH_AXES, mesh.CONTEXT_AXIS})
  others = work.present(rows - split)
  size = count * work.microbatches * work.layout.bytes_of(array, work.examples, shards)
  # The devices that have parts of a table look up each other's tokens, and then exchange parts of rows.
  lookups = [x for x in readers if x.primitive == "gather" and shards]
  looked_up = sum(work.layout.bytes_of(x, work.examples) for x in lookups)
  yield Collective(ALL_TO_ALL, shards, (1 + array.is_trained) * looked_up, "activations")
  whole = [x for x in readers if x not in lookups]
  # The table of tied logits is gathered once for both passes.
  gathers = sum(1 if lookups else _times_read(x) for x in whole)
  yield Collective(ALL_GATHER, shards, gathers * size, "parameters")
  if not array.is_trained:
    return
  yield Collective(REDUCE_SCATTER, shards, size if whole else 0.0, "gradients", layers * len(whole))
  size, terms = size / work.shards(shards), 1 if shards else layers * len(readers)
  is_zero1 = work.zero1 and mesh.DATA_AXIS in others and "embed" in array.axes
  yield Collective(REDUCE_SCATTER if is_zero1 else ALL_REDUCE, others, size, "gradients", terms)
  if is_zero1:
    stored = size / work.microbatches * 4 / array.dtype.itemsize
    yield Collective(ALL_GATHER, (mesh.DATA_AXIS,), stored, "parameters")


def _times_read(reader: Value) -> int:
  """Returns how often an operation reads an array: a matmul again for the gradient of its activations.

  The loss in chunks is a loop, before which its kernel is gathered for both passes.
  """
  is_matmul = reader.primitive == "dot_general" and reader.repeats == 1
  return 1 + (is_matmul and any(x.is_batched and x.is_trained for x in reader.operands))


def _array_sent(value: Value, reader: Value) -> Value:
  """Returns the array that is sent for an operand of an operation.

  XLA sums the gradient of a broadcast to the shape of the array before sending it, and converts the rows that
  it looks up rather than their table.
  """
  passed = ("broadcast_in_dim", "convert_element_type" if reader.primitive == "gather" else "")
  while value.primitive in passed or stored_view(value) is not value:
    value = stored_view(value.operands[0] if value.primitive in passed else value)
  return value


def _splits_heads(keys: Value, work: Workload, axes: tuple[str, ...]) -> bool:
  """Returns whether the devices that share a row split its heads in attention (`kernels.context_attention`)."""
  heads = math.prod(size for dim in keys.dims for name, size in dim if name == "heads")
  return splits_heads(heads // work.shards((mesh.MODEL_AXIS,)), work.shards(axes))


def _is_causal(work: Workload) -> bool:
  """Returns whether all attention is causal and without a bias, so that devices exchange queries."""
  has_bias = setting_of(work.config, "positions") == "relative"
  return not has_bias and not hasattr(work.config, "num_encoder_layers")


def _exchanges_experts(value: Value) -> bool:
  """Returns whether an array is split over experts and its operand over examples, or the other way around."""
  return (mesh.EXPERT_AXIS in value.axes) != (mesh.EXPERT_AXIS in value.operands[0].axes)


def _stage_collectives(part: Segment, work: Workload) -> Iterator[Collective]:
  """Yields the collectives of a pipeline: those between its stages, and those of its parameters.

  A stage sends the results of its layers, the arrays that all layers read (such as masks and the output of an
  encoder), and the gradients of those that have one.
  """
  schedule, layout = work.schedule, work.layout
  if schedule.stages == 1 or not part.is_scanned:
    return
  own = {id(value) for value in part.values}
  read = {id(x): x for v in part.values for x in map(stored_view, v.operands) if x.is_batched}
  sent = [x for x in read.values() if id(x) not in own]
  # The buffers of microbatches are complete over `model`.
  rows = work.stage_examples * work.microbatches
  sizes = [(1 + x.is_trained) * layout.bytes_of(x, rows, (mesh.MODEL_AXIS,)) for x in sent]
  # In each tick, a stage sends the microbatch that it has finished, and one that has yet to enter.
  yield Collective(PERMUTE, (mesh.PIPELINE_AXIS,), 2 * schedule.ticks * sum(sizes), "microbatches")
  results = [layout.bytes_of(x, rows, (mesh.MODEL_AXIS,)) for x in part.values if x.is_boundary]
  outputs = 2 * schedule.microbatches * sum(results)
  yield Collective(ALL_TO_ALL, (mesh.PIPELINE_AXIS,), outputs, "microbatches")
  # Parameters are gathered before the first microbatch, and their gradients summed after the last, in the
  # type of the train state.
  batch = work.present(axis for axis in mesh.BATCH_AXES if axis != mesh.PIPELINE_AXIS)
  arrays = {id(x): x for v in part.values for x in v.operands if x.parameters and v.is_batched}
  whole = sum(layout.bytes_of(x, 0, batch) * 4 / x.dtype.itemsize for x in arrays.values())
  size = part.layers / schedule.stages * work.microbatches * whole
  is_split = any(set(batch) & set(layout.axes_of(x)) for x in arrays.values())
  yield Collective(ALL_GATHER, batch if is_split else (), size, "parameters")
  yield Collective(ALL_REDUCE, batch, size, "gradients")
  if schedule.rounds > 1:
    # Chunks of layers go to the stages that compute them, and their gradients come back.
    yield Collective(PERMUTE, (mesh.PIPELINE_AXIS,), 2 * size, "parameters")
