"""The collectives of a training step and their bytes, derived from the mesh and the shapes.

Matmuls are sharded over `model` as in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), and states
over `data` and `fsdp` as in ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054).
tests/parallel/test_collectives.py compares these collectives with those of compiled steps.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from rosetta_t5.parallel.mesh import (
  CONTEXT_AXIS,
  DATA_AXIS,
  EXPERT_AXIS,
  MODEL_AXIS,
  PIPELINE_AXIS,
  TOKEN_AXES,
  axis_names,
)
from rosetta_t5.plan.activation_collectives import (
  ALL_GATHER,
  ALL_REDUCE,
  OVER_CONTEXT,
  OVER_MODEL,
  OVER_PIPELINE,
  PERMUTE,
  REDUCE_SCATTER,
  Collective,
  activation_collectives,
  context_collectives,
  expert_collectives,
  pipeline_collectives,
)
from rosetta_t5.plan.memory import array_bytes
from rosetta_t5.plan.workload import Workload
from rosetta_t5.training.optimizers.optimizer_def import path_name

_TABLES = re.compile(r"token_embedder|position_embedding|logits_dense|router_weights")
_LAYER = re.compile(r"(?<=layers)_\d+")
# Parameters without the logical axis `embed`.
_WITHOUT_EMBED_AXIS = re.compile(r"(query|key|value|wi\w*)/bias|rel_embedding")


def step_collectives(params: Any, specs: Any, work: Workload) -> list[Collective]:
  """Returns the collectives of a training step."""
  # Layers are alike: the collectives of one are counted as often as there are layers.
  alike: dict[tuple[str, Any, Any], list[Any]] = collections.defaultdict(list)
  for path, param, spec in named_parameters(params, specs):
    alike[_LAYER.sub("", path), param.shape, tuple(spec)].append(param)
  found: list[Collective] = []
  for (name, _, spec), same in alike.items():
    for each in _parameter_collectives(_Parameter(name, same[0], spec, work)):
      size, count = each.size * len(same), each.count * len(same)
      found.append(dataclasses.replace(each, size=size, count=count))
  if work.model_shards > 1:
    is_any_over_batch = any(_batch_axes_of(spec, work.mesh) for _, _, spec in alike)
    found += activation_collectives(work, is_any_over_batch)
  if work.mesh.get(EXPERT_AXIS, 1) > 1:
    found += expert_collectives(work)
  if work.schedule.stages > 1 and work.activations is not None:
    found += pipeline_collectives(work)
  if work.context_shards > 1 and work.activations is not None:
    found += context_collectives(work)
  return _merge(found)


def _merge(collectives: Sequence[Collective]) -> list[Collective]:
  """Adds up the sizes and counts of collectives that are otherwise the same."""
  merged: dict[tuple[Any, ...], Collective] = {}
  for each in collectives:
    key = (each.kind, each.axes, each.why, each.terms)
    total = merged.get(key, dataclasses.replace(each, size=0.0, count=0))
    size, count = total.size + each.size, total.count + each.count
    merged[key] = dataclasses.replace(each, size=size, count=count)
  return list(merged.values())


def named_parameters(params: Any, specs: Any) -> Iterator[tuple[str, Any, Any]]:
  """Yields the name, the shape and the PartitionSpec of each parameter."""
  all_specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))
  leaves = jax.tree_util.tree_leaves_with_path(params)
  for (path, param), spec in zip(leaves, all_specs, strict=True):
    yield path_name(path), param, spec


def is_table(name: str) -> bool:
  """Returns whether a parameter is one of a lookup, the output layer or a router, which stay in float32."""
  return _TABLES.search(name) is not None


# The collectives of parameters and their gradients.


@dataclasses.dataclass(frozen=True)
class _Parameter:
  """A parameter, and what its collectives follow from."""

  name: str
  array: Any
  spec: Sequence[Any]
  work: Workload

  @property
  def batch_axes(self) -> tuple[str, ...]:
    """The batch axes over which it is gathered. An expert is never gathered."""
    axes = _batch_axes_of(self.spec, self.work.mesh)
    return tuple(axis for axis in axes if axis != EXPERT_AXIS)

  @property
  def lookups(self) -> int:
    """How many times per step it is looked up: 0 unless it is a table of tokens or positions."""
    if "token_embedder" not in self.name:
      return int(self.name.endswith("position_embedding"))
    return 2 if hasattr(self.work.config, "num_encoder_layers") else 1

  @property
  def is_tied(self) -> bool:
    """Whether it is an embedding table and also the kernel of the matmul that computes the logits."""
    is_shared = getattr(self.work.config, "logits_via_embedding", False)
    return is_shared and "token_embedder" in self.name

  @property
  def has_matmul_gradient(self) -> bool:
    """Whether its gradient is the result of a matmul, unlike that of a lookup or of a norm's scale."""
    return self.lookups == 0 and self.array.ndim > 1

  @property
  def count(self) -> int:
    """1, or 0 if it and its gradient are sent in the same array as another kernel."""
    if not getattr(self.work.config, "fuse_qkv_params", False):
      return 1
    is_cross = "encoder_decoder_attention" in self.name
    fused = ("key/kernel",) if is_cross else ("key/kernel", "query/kernel")
    return 0 if self.name.endswith(fused) else 1

  @property
  def stored(self) -> float:
    """Its bytes on a device after it has been gathered, in the dtype of the train state."""
    spec = [part if part in (MODEL_AXIS, EXPERT_AXIS) else None for part in self.spec]
    return array_bytes(self.array, spec, self.work.mesh)

  @property
  def sent(self) -> float:
    """These bytes as they are sent: kernels and their gradients in the compute dtype, tables as stored."""
    itemsize = self.array.dtype.itemsize if is_table(self.name) else self.work.itemsize
    return self.stored * itemsize / self.array.dtype.itemsize


def _parameter_collectives(parameter: _Parameter) -> Iterator[Collective]:
  """Yields how a parameter is gathered and how its gradient is summed."""
  if PIPELINE_AXIS in parameter.spec:
    yield from _stage_parameter_collectives(parameter)
    return
  if parameter.batch_axes:
    gathers = _num_gathers(parameter)
    size = gathers * parameter.sent * parameter.work.microbatches
    count = parameter.count * gathers
    yield Collective(ALL_GATHER, parameter.batch_axes, size, "parameters", count=count)
  yield from _gradient_collectives(parameter)


def _gradient_collectives(parameter: _Parameter) -> Iterator[Collective]:
  """Yields how the gradient of a parameter is summed, and what ZeRO-1 adds."""
  name, work, lookups = parameter.name, parameter.work, parameter.lookups
  # The gradient of an expert is complete but for the other batch axes.
  complete_over = [EXPERT_AXIS] if EXPERT_AXIS in parameter.spec else []
  bias_bytes, layers = _position_bias(name, work)
  if bias_bytes and work.context_shards > 1:
    # Each device adds up its own queries' gradients by bucket.
    yield Collective(ALL_REDUCE, OVER_CONTEXT, parameter.sent * work.microbatches, "gradients")
    complete_over.append(CONTEXT_AXIS)
  work = work.replace(mesh={**work.mesh, **dict.fromkeys(complete_over, 1)})
  gradient = bias_bytes or float(parameter.sent)
  sums = _gradient_sums(
    gradient=gradient,
    terms=(lookups + parameter.is_tied) or layers,
    other_terms=0 if parameter.has_matmul_gradient else lookups or 1,
    batch_axes=parameter.batch_axes,
    # The optimizer's state is sharded where the parameter has `embed` (see `PjitPartitioner.zero1`).
    stored=parameter.stored if work.zero1 and not _WITHOUT_EMBED_AXIS.search(name) else None,
    work=work,
  )
  for each in sums:
    matmuls = each.terms if parameter.has_matmul_gradient else max(each.terms - max(lookups, 1), 0)
    for one in _split_sums(each, matmuls):
      yield dataclasses.replace(one, count=parameter.count) if one.why == "gradients" else one
  if work.model_shards > 1:
    yield from _split_activation_gradients(parameter, gradient * work.microbatches)


def _stage_parameter_collectives(parameter: _Parameter) -> Iterator[Collective]:
  """Yields how the parameters of a stage are gathered before its first microbatch, and summed at the end."""
  spec, work = parameter.spec, parameter.work
  mesh = {**work.mesh, PIPELINE_AXIS: 1}
  kept_spec = [part if part in (MODEL_AXIS, PIPELINE_AXIS) else None for part in spec]
  size = array_bytes(parameter.array, kept_spec, work.mesh) * work.microbatches
  rounds = work.schedule.rounds
  if gathered_over := _batch_axes_of(spec, mesh):
    yield Collective(ALL_GATHER, gathered_over, size, "parameters")
  if summed_over := _batch_axes(mesh):
    yield Collective(ALL_REDUCE, summed_over, size, "gradients")
  if rounds > 1:
    # Chunks of layers go to the stages that compute them, and their gradients come back.
    yield Collective(PERMUTE, OVER_PIPELINE, 2 * size, "parameters", count=2 * rounds)


def _split_activation_gradients(parameter: _Parameter, gradient: float) -> Iterator[Collective]:
  """Yields what norms and position tables need if the activations are sharded over `model`."""
  array, work = parameter.array, parameter.work
  is_table = parameter.name.endswith("position_embedding")
  is_sharded = MODEL_AXIS in parameter.spec
  if work.activation_split == "length" and not is_sharded and (array.ndim == 1 or is_table):
    # Each device computes the gradient of its own positions only.
    yield Collective(ALL_REDUCE, OVER_MODEL, gradient, "gradients")
  if is_table and is_sharded:
    # A table that is sharded along `embed` is gathered for the lookup, and its gradient too.
    table = math.prod(array.shape) * array.dtype.itemsize * work.microbatches
    yield Collective(ALL_GATHER, OVER_MODEL, 2 * table, "parameters", count=2)


def _num_gathers(parameter: _Parameter) -> int:
  """Returns how often per step a parameter that is sharded over batch axes is gathered."""
  if parameter.lookups == 0:
    # XLA keeps the gathered kernel of a router, which is small, for the backward pass. The gradient of a
    # sum needs no bias.
    is_single = parameter.name.endswith("bias") or "router_weights" in parameter.name
    return 1 if is_single else 2
  if not parameter.is_tied:
    return 1  # The gradient of a lookup does not need the table.
  # If the vocabulary is sharded and the gradient is summed over another axis too, the matmul with the
  # table gathers it again for the backward pass.
  work = parameter.work
  others = set(_batch_axes(work.mesh)) - set(parameter.batch_axes)
  return 2 + (work.model_shards > 1 and bool(others))


def _gradient_sums(
  gradient: float,
  terms: int,
  other_terms: int,
  batch_axes: tuple[str, ...],
  stored: float | None,
  work: Workload,
) -> Iterator[Collective]:
  """Yields how the gradient of one parameter is summed over the batch, and what ZeRO-1 adds.

  Args:
    gradient: its bytes.
    terms: the number of arrays whose sum the gradient is.
    other_terms: how many of these arrays are not the result of a matmul.
    batch_axes: the batch axes that the parameter is sharded over.
    stored: the parameter's bytes if its optimizer state is sharded over `data`, else None.
  """
  all_axes = _batch_axes(work.mesh)
  others = tuple(axis for axis in all_axes if axis not in batch_axes)
  size = gradient * work.microbatches
  if batch_axes and others and other_terms:
    # XLA sums these over all batch axes at once, and each device keeps its shard.
    yield Collective(ALL_REDUCE, all_axes, size, "gradients", other_terms)
    terms = max(terms - other_terms, 0)
  shards = math.prod(work.mesh[axis] for axis in batch_axes)
  if terms and batch_axes:
    yield Collective(REDUCE_SCATTER, batch_axes, size, "gradients", terms)
    size, terms = size / shards, 1
  zero1 = stored is not None and DATA_AXIS in others
  if terms and others:
    yield Collective(REDUCE_SCATTER if zero1 else ALL_REDUCE, others, size, "gradients", terms)
  if zero1:
    yield Collective(ALL_GATHER, (DATA_AXIS,), (stored or 0.0) / shards, "parameters")


def _batch_axes(mesh: Mapping[str, int]) -> tuple[str, ...]:
  return tuple(axis for axis, size in mesh.items() if axis in TOKEN_AXES and size > 1)


def _split_sums(gradient: Collective, matmuls: int) -> list[Collective]:
  """Returns the sums of a gradient, of whose terms `matmuls` are results of a matmul.

  XLA computes such a sum over examples and positions at once, and others one after the other.
  """
  others = tuple(axis for axis in gradient.axes if axis != CONTEXT_AXIS)
  if matmuls == gradient.terms or others == gradient.axes or not others:
    return [gradient]
  at_once = [dataclasses.replace(gradient, terms=matmuls)] if matmuls else []
  terms = gradient.terms - matmuls
  return at_once + [
    dataclasses.replace(gradient, axes=axes, terms=terms) for axes in (others, OVER_CONTEXT)
  ]


def _batch_axes_of(spec: Sequence[Any], mesh: Mapping[str, int]) -> tuple[str, ...]:
  """Returns the batch axes over which a parameter is sharded."""
  named = {axis for part in spec for axis in axis_names(part)}
  return tuple(axis for axis in _batch_axes(mesh) if axis in named)


def _position_bias(name: str, work: Workload) -> tuple[float, int]:
  """Returns the bytes of a relative position bias and the number of its layers; (0, 1) for others.

  Each layer's gradient is summed as [heads, T, T], before its elements are added up by bucket.
  """
  if "rel_embedding" not in name:
    return 0, 1
  side = "encoder" if "encoder" in work.lengths and "encoder/" in name else "decoder"
  heads = work.config.num_heads / work.model_shards
  pairs = work.lengths[side] ** 2 / work.context_shards
  return heads * pairs * work.itemsize, work.layers[side]
