"""Estimates the memory that a run needs on each device, from shapes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from rosetta_t5.parallel.mesh import CONTEXT_AXIS, FSDP_AXIS, MODEL_AXIS, axis_names
from rosetta_t5.plan.activations import RECOMPUTED, Activations, is_attention, stored_view
from rosetta_t5.plan.workload import Workload
from rosetta_t5.traced.program import Segment, are_trained, parameters_read


def state_bytes(state: Any, specs: Any, mesh: Mapping[str, int]) -> dict[str, float]:
  """Returns the bytes per device of a train state's parts, "params" and, if it has one, "optimizer"."""
  parts = {"params": (state.params, specs.params)}
  if hasattr(state, "optimizer_def"):
    parts["optimizer"] = (state.param_states, specs.param_states)
  count = functools.partial(array_bytes, mesh=mesh)
  return {name: sum(jax.tree.leaves(jax.tree.map(count, *trees))) for name, trees in parts.items()}


def array_bytes(array: Any, spec: Sequence[Any] | None, mesh: Mapping[str, int]) -> int:
  """Returns the bytes of one device's shard of an array. Sizes that are not divisible are padded.

  Args:
    array: anything with shape and dtype.
    spec: the mesh axes that shard its first dimensions.
    mesh: the size of each mesh axis.
  """
  axes = [*(spec or ()), *[None] * array.ndim][: array.ndim]
  shape = [
    math.ceil(size / math.prod(mesh[name] for name in axis_names(axis)))
    for size, axis in zip(array.shape, axes, strict=True)
  ]
  return math.prod(shape) * array.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class StateMemory:
  """The part of a step's memory that depends on the train state and the mesh only.

  Attributes:
    held: the bytes per device of "params" and "optimizer".
    trained: the bytes per device of the parameters that have gradients.
    gradients: the bytes per device of the gradients of the parameters of each segment; None if the
      loss cannot be traced.
  """

  held: dict[str, float]
  trained: float
  gradients: list[float] | None

  @classmethod
  def of(cls, state: Any, specs: Any, work: Workload) -> StateMemory:
    """Returns the memory of a train state with these PartitionSpecs on the mesh of a step."""
    count = functools.partial(array_bytes, mesh=work.mesh)
    bytes_of_params = jax.tree.leaves(jax.tree.map(count, state.params, specs.params))
    trained = are_trained(state.params, getattr(state, "optimizer_def", None))
    sizes = [size * is_trained for size, is_trained in zip(bytes_of_params, trained, strict=True)]
    gradients = None if work.activations is None else _gradient_bytes(work, sizes)
    return cls(state_bytes(state, specs, work.mesh), sum(sizes), gradients)

  def step(self, work: Workload) -> dict[str, float]:
    """Returns the bytes per device of the parts of a training step at its peak, on the same mesh.

    The parts are "params", "optimizer", "activations" unless the loss cannot be traced, and those of
    "gradients", "logits" and "gathered parameters" that exist at the peak.
    """
    if self.gradients is None or work.activations is None:
      return {**self.held, "gradients": self.trained}
    moments = _Moments(self.trained, self.gradients, work, work.activations).all()
    return self.held | max(moments, key=lambda parts: sum(parts.values()))


def _gradient_bytes(work: Workload, sizes: Sequence[float]) -> list[float]:
  """Returns the bytes of the gradients of the parameters of each segment.

  XLA keeps the gradients of layers in the compute dtype, and those of a scan and of what is outside layers
  in float32.
  """
  segments = work.activations.segments if work.activations else ()
  of_segment: dict[int, int] = {}
  # Layers first, because what is computed before a scan also reads its stacked parameters, to transpose them.
  for number, part in sorted(enumerate(segments), key=lambda pair: not pair[1].count):
    for parameter in part.parameters or parameters_read(part):
      of_segment.setdefault(parameter, number)
  found = [0.0] * len(segments)
  for parameter, number in of_segment.items():
    is_narrow = segments[number].count and not segments[number].is_scanned
    found[number] += sizes[parameter] * (work.itemsize / 4 if is_narrow else 1)
  return found


class _Moments:
  """The memory of a step at each moment that may be its peak.

  Its methods compute the bytes per device. `tables` are the bytes of the gradients outside layers, which are
  mostly those of the embedding and the output layer."""

  def __init__(
    self, params: float, gradients: Sequence[float], work: Workload, activations: Activations
  ):
    """Stores what the moments have in common."""
    self.params, self.gradients, self.work = params, gradients, work
    self.segments, self.activations = activations.segments, activations
    self.layout = work.layout
    self.examples = work.examples / work.microbatches
    self.layers = [n for n, part in enumerate(self.segments) if part.count]
    self.tables = sum(gradients) - sum(gradients[n] for n in self.layers)

  def all(self) -> Iterator[dict[str, float]]:
    """Yields what exists besides the train state at each moment.

    The moments are: when the gradient of the last segment's result exists; the beginning of the backward
    pass of each stack of layers; when all gradients exist; and, if positions are split over `model` and
    nothing is rematerialized, when XLA computes the kernels' gradients that it has deferred (`_deferred`).
    """
    work, segments = self.work, self.segments
    # In the bubble a stage computes unused results, and it keeps those too.
    in_layers = self.examples / (1.0 - work.schedule.bubble)
    examples = [in_layers if part.count else self.examples for part in segments]
    kept = [self._kept(number, each) for number, each in enumerate(examples)]
    copies = [self._kernel_copies(n) for n in range(len(segments))]
    buffers = self._pipeline_buffers()
    gathered, gathered_at_end, gathered_layers = self._gathered()
    loss = self._gradient(segments[-1], self.examples)
    is_one = math.prod(work.mesh.values()) == work.microbatches == 1
    # XLA sets the gradients of lookups to zero before the backward pass of a scan, or of one device and batch.
    is_scanned = any(part.is_scanned for part in segments)
    lookups = self.tables if is_scanned or is_one else 0.0
    last = self.layers[-1] if self.layers else len(segments) - 1
    everything = sum(kept) + sum(copies) + buffers
    complete = gathered + gathered_layers.get(last, 0.0)
    yield self._moment(everything - loss, lookups, 2 * loss, complete)
    # XLA sets the stacked gradients of all scanned layers to zero before the first backward pass, and keeps the
    # gradient of the logits until after it. A pipeline adds up those of all ticks.
    sums = 2 if work.schedule.stages > 1 else 1
    stacked = sums * (sum(self.gradients) - self.tables) if is_scanned else 0.0
    for number in reversed(self.layers):
      held = sum(kept[: number + 1]) + sum(copies[: number + 1]) + buffers
      held += self._gradient(segments[number], work.stage_examples) + self._recomputed(number)
      later = sum(self.gradients[n] for n in self.layers if n > number)
      logits = loss if is_scanned and number == last else 0.0
      if number == last:
        held += sum(kept[number + 1 :]) - loss
      complete = gathered + gathered_layers.get(number, 0.0)
      yield self._moment(held, self.tables + (stacked or later), logits, complete)
    yield self._moment(0.0, sum(self.gradients), 0.0, gathered_at_end)
    if work.remat_policy == "none" and (deferred := self._deferred()):
      yield self._moment(deferred + buffers, sum(self.gradients), loss, gathered_at_end)

  def _moment(
    self, activations: float, gradients: float, logits: float, gathered: float
  ) -> dict[str, float]:
    # Microbatches are added up in float32.
    added_up = self.params if self.work.microbatches > 1 else 0.0
    parts = {"gradients": added_up + gradients, "activations": activations, "logits": logits}
    parts["gathered parameters"] = gathered
    return {name: size for name, size in parts.items() if size or name == "activations"}

  def _kept(self, number: int, examples: float, policy: str | None = None) -> float:
    """Returns the bytes that the layers of a segment keep for the backward pass."""
    part = self.segments[number]
    policy = policy or self.work.remat_policy
    kept = self.activations.kept(policy, self.work.is_attention_fused)[number]
    arrays = [value for value in kept if value.is_batched or not part.count]
    return part.layers * sum(self.layout.bytes_of(value, examples) for value in arrays)

  def _recomputed(self, number: int) -> float:
    """Returns the bytes that the backward pass of one rematerialized layer computes again."""
    if self.work.remat_policy == "none":
      return 0.0
    kept, examples = functools.partial(self._kept, number), self.work.stage_examples
    return max(kept(examples, RECOMPUTED) - kept(examples), 0.0) / self.segments[number].layers

  def _gradient(self, part: Segment, examples: float) -> float:
    """Returns the bytes of the gradients of activations at the peak of a segment's backward pass.

    They belong to the results of all matmuls of one operand, or to attention's logits and probabilities.
    """
    sums: dict[int, float] = {}
    for value in part.values:
      if value.primitive != "dot_general" or not (value.is_batched and value.is_trained):
        continue
      size = self.layout.bytes_of(value, examples)
      if not is_attention(value):
        source = stored_view(next(x for x in value.operands if x.is_batched))
        sums[id(source)] = sums.get(id(source), 0.0) + size
      elif self.activations.is_pair(value) and not self.work.is_attention_fused:
        sums[id(value)] = 2 * size
    return max(sums.values(), default=0.0)

  def _deferred(self) -> float:
    """Returns the bytes of what XLA keeps for the kernels' gradients that it defers; 0 if it defers none.

    XLA's GPU compiler computes these gradients after the activations' gradients of all layers, if activations
    between blocks are split by position. Until then it keeps
    the gathered inputs of the matmuls and the gathered gradients of their results.
    """
    total, is_split = 0.0, False
    for part in self.segments:
      sizes: dict[int, float] = {}
      for value in part.values if part.count else ():
        if value.primitive != "dot_general" or is_attention(value) or not value.is_batched:
          continue
        operand = next(x for x in value.operands if x.is_batched)
        source = stored_view(operand)
        gathered = self.layout.gathered_for(value, value.operands.index(operand))
        is_split = is_split or MODEL_AXIS in gathered
        sizes[id(source)] = self.layout.bytes_of(source, self.examples, gathered)
        summed = self.layout.summed_over(value)
        sizes[id(value)] = self.layout.bytes_of(value, self.examples, summed)
      total += part.layers * sum(sizes.values())
    return total if is_split else 0.0

  def _pipeline_buffers(self) -> float:
    """Returns the bytes of a pipeline's buffers: each stage has one for the outputs of all microbatches."""
    stages = self.work.schedule.stages
    outputs = [v for n in self.layers for v in self.segments[n].values if v.is_boundary]
    size = sum(self.layout.bytes_of(value, self.examples, (MODEL_AXIS,)) for value in outputs)
    return stages * size if stages > 1 else 0.0

  def _gathered(self) -> tuple[float, float, dict[int, float]]:
    """Returns the bytes of the parameters that are gathered over `fsdp` and `context` at one time.

    The result has those outside layers, those at the end of a step, and {segment: those of its layers}. The
    factors below were measured in programs that XLA compiled.
    """
    work, shards = self.work, self.work.shards((FSDP_AXIS, CONTEXT_AXIS))
    if shards == 1:
      return 0.0, 0.0, {}
    # Tables of tokens are not gathered, because rows are exchanged. Output layers are, and the kernels of a stack of
    # layers, which XLA gathers well before their backward pass, so that communication overlaps.
    bytes_by_kernel = {
      x.parameters: self.layout.bytes_of(x, 0, (FSDP_AXIS, CONTEXT_AXIS))
      for part in self.segments
      for value in part.values
      for x in value.operands
      if not part.count and value.primitive == "dot_general" and value.is_batched and x.parameters
    }
    outputs = sum(bytes_by_kernel.values())
    # The gradient of an output layer exists beside it if gradients of microbatches are added up.
    factor = 1.0 if work.microbatches == 1 else 2.0
    layers = {}
    for number in self.layers:
      part, share = self.segments[number], 1.0
      if work.schedule.stages > 1:
        share = 2.0  # a pipeline adds up the gradients of gathered parameters
      elif part.is_scanned:
        # A scan gathers one layer's kernels while it computes another's, in the compute dtype.
        share = 2 * work.itemsize / 4 / part.count
        factor = 1.0
      elif work.microbatches == 1:
        # XLA gathers about half of the kernels ahead; those of one layer if layers are rematerialized or the
        # kernels are in fp8.
        is_ahead = work.remat_policy == "none" and not work.fp8
        share = 0.5 if is_ahead else 1 / part.count
      layers[number] = share * shards * self.gradients[number]
    return factor * outputs, outputs, layers

  def _kernel_copies(self, number: int) -> float:
    """Returns the bytes of the copies of a segment's kernels that are kept for the backward pass.

    They are in the type of the matmuls; rematerialized layers convert the kernels again instead. If layers are
    scanned, there is also a float32 copy of the stacked kernels with the layers' dimension first, where a
    forward pass is repeated.
    """
    work, part = self.work, self.segments[number]
    is_kept = work.remat_policy == "none"
    if not part.count:
      return 0.0
    if part.is_scanned:
      is_read_again = not is_kept or work.microbatches > 1
      size = is_read_again + (work.itemsize / 4 if is_kept else 0.0)
    elif not is_kept or work.itemsize == 4:
      size = 0.0
    else:
      size = 1 / work.itemsize if work.fp8 else 1.0
    return self.gradients[number] * size
